"""What running reads show: which of them count, what they make of the figures, and whom they warn of."""

from __future__ import annotations

import logging
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorlink as tl
from tensorlink import network
from tensorlink.measured import BULK_NBYTES, FILE, SMALL_NBYTES, Measured
from tensorlink.observing import Observing
from tensorlink.types import Figure, Link, PeerId, PeerInfo
from tests.cluster import Cluster, cluster, networks, put
from tests.peer import Peer, kept, nursery

__all__ = ["cluster", "networks", "nursery"]

pytestmark = pytest.mark.usefixtures("nursery")

MIB = 1 << 20
HERE = "host-a"
DECLARED = Link("tcp", bytes_per_s=3e9, latency_s=30e-6, reach="network")
PEERS = {
    name: PeerInfo(PeerId(name, 1), f"unix:/nowhere,{at}:7", host, 1)
    for name, host, at in (("b", "host-b", "127.0.0.1"), ("b2", "host-b", "127.0.0.1"), ("c", "host-c", "127.0.0.1"))
}


class Seen(Measured):
    """Figures that keep what was observed."""

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"))
        self.seen: list[tuple[str, str, int]] = []

    def observe(self, here: str, there: str, transport: str, nbytes: int, seconds: float) -> None:
        assert here == HERE and seconds > 0
        self.seen.append((there, transport, nbytes))


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def observing(seen: Seen) -> Observing:
    return Observing(seen, HERE, [DECLARED], PEERS.get)


# Which reads count


def test_large_reads_count_and_small_ones_now_and_then(observing: Observing) -> None:
    assert all(observing.due(nbytes) for nbytes in (BULK_NBYTES, 1 << 40))
    assert not any(observing.due(nbytes) for nbytes in (SMALL_NBYTES + 1, BULK_NBYTES - 1))
    assert sum(observing.due(SMALL_NBYTES) for _ in range(640)) == 10


def test_a_read_that_is_not_due_costs_next_to_nothing(observing: Observing) -> None:
    def cost() -> float:
        began = time.perf_counter()
        for _ in range(1000):
            observing.due(100)
        return (time.perf_counter() - began) / 1000

    assert min(cost() for _ in range(50)) < 1e-6


def test_each_read_counts_for_the_way_to_its_host(observing: Observing, seen: Seen) -> None:
    for nbytes in (MIB, 100):
        with observing.read(PeerId("b", 1), "tcp", nbytes, 0):
            pass
    assert seen.seen == [("host-b", "tcp", MIB), ("host-b", "tcp", 100)]


def test_reads_that_overlap_count_as_one(observing: Observing, seen: Seen) -> None:
    first, second = (observing.read(PeerId(name, 1), "tcp", MIB, 0) for name in ("b", "b2"))
    with first:
        second.__enter__()
        with observing.read(PeerId("b", 1), "tcp", 100, 0):
            pass  # it waits behind the others
    assert not seen.seen, "the second goes on"
    second.__exit__(None, None, None)
    assert seen.seen == [("host-b", "tcp", 2 * MIB)]


def test_reads_from_two_hosts_at_once_tell_nothing(observing: Observing, seen: Seen) -> None:
    with observing.read(PeerId("b", 1), "tcp", MIB, 0), observing.read(PeerId("c", 1), "tcp", MIB, 0):
        pass
    assert not seen.seen


@pytest.mark.parametrize("peer, limit", [(PeerId("b", 1), 1000), (PeerId("b", 2), 0), (PeerId("unknown", 1), 0)])
def test_what_tells_nothing_of_the_way_is_left_out(observing: Observing, seen: Seen, peer: PeerId, limit: int) -> None:
    for nbytes in (MIB, 100):
        with observing.read(peer, "tcp", nbytes, limit):
            pass
    assert not seen.seen


def test_reads_that_fail_tell_nothing_and_fail_as_they_are(observing: Observing, seen: Seen) -> None:
    for nbytes in (MIB, 100):
        with pytest.raises(tl.PeerLostError), observing.read(PeerId("b", 1), "tcp", nbytes, 0):
            raise tl.PeerLostError("gone")
    with observing.read(PeerId("b", 1), "tcp", MIB, 0):
        pass
    assert len(seen.seen) == 1, "and the next one counts again"


def test_threads_lose_nothing(observing: Observing, seen: Seen) -> None:
    def read() -> None:
        for _ in range(200):
            with observing.read(PeerId("b", 1), "tcp", MIB, 0):
                pass

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(nbytes for _, _, nbytes in seen.seen) == 800 * MIB and not observing._busy


def test_what_a_transport_says_of_itself_stands_until_more_is_known() -> None:
    measured = Measured(Path("/nonexistent"))
    Observing(measured, HERE, [DECLARED], PEERS.get)
    for _ in range(3):
        measured.observe(HERE, "host-b", "tcp", MIB, 0.01)
    assert measured.of(HERE, "host-b")["tcp"].latency_s == DECLARED.latency_s


# Ways that give far too little


def slow_reads(observing: Observing, count: int, nbytes: int = 16 * MIB, peer: str = "b", seconds: float = 1.0) -> None:
    """As if they had taken that long."""
    for _ in range(count):
        with observing.read(PeerId(peer, 1), "tcp", nbytes, 0):
            observing._busy["tcp"].began -= seconds


@pytest.fixture
def gigabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interface of 10 Gbit/s; what is real is tried between hosts below."""
    monkeypatch.setattr(network, "speed_towards", lambda host: 1.25e9)


@pytest.mark.usefixtures("gigabyte")
def test_it_takes_several_large_reads_in_a_row(observing: Observing, caplog: pytest.LogCaptureFixture) -> None:
    slow_reads(observing, 3)
    slow_reads(observing, 10, nbytes=MIB)
    slow_reads(observing, 1, seconds=0.0)
    slow_reads(observing, 3)
    assert not caplog.records
    slow_reads(observing, 10)
    slow_reads(observing, 4, peer="c")
    told = [record.getMessage() for record in caplog.records]
    assert [text[: text.index(":")] for text in told] == [
        f"expected 1.2 GB/s over tcp to {name}, got 0.017" for name in ("b", "c")
    ]
    assert "`tensorlink doctor b`" in told[0]


@pytest.mark.usefixtures("gigabyte")
def test_a_quarter_is_enough(observing: Observing, caplog: pytest.LogCaptureFixture) -> None:
    slow_reads(observing, 10, nbytes=1 << 30, seconds=3.3)
    assert not caplog.records


@pytest.mark.parametrize("address", ["nonsense", "unix:/nowhere", "x,no.such.name:7", "x,[fe80::1%nowhere]:7"])
def test_an_address_that_tells_nothing_harms_nothing(
    seen: Seen, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    peer = PeerInfo(PeerId("b", 1), address, "host-b", 1)
    slow_reads(Observing(seen, HERE, [DECLARED], {"b": peer}.get), 5)
    assert not caplog.records and len(seen.seen) == 5


@pytest.mark.parametrize("text, rate", [("10000\n", 1.25e9), ("-1\n", None), ("0", None), ("", None), (None, None)])
def test_the_speed_of_an_interface(tmp_path: Path, text: str | None, rate: float | None) -> None:
    (tmp_path / "lo").mkdir()
    if text is not None:
        (tmp_path / "lo/speed").write_text(text)
    assert network.speed_towards("127.0.0.1", tmp_path) == rate


# Between hosts


@pytest.fixture
def slow(cluster: Cluster) -> Iterator[Cluster]:
    """Its second host has a link of 400 Mbit/s, and an interface that says 10 Gbit/s."""
    cluster.network.hosts[1].limit(400e6)
    yield cluster
    cluster.network.hosts[1].limit(None)


@pytest.fixture
def pair(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[Peer, Peer]]]:
    """`owner, reader = pair("x")`: peers on the second and the first host, `x` and one that keeps its warnings."""
    made: list[Peer] = []

    def start(name: str, *, limit: int | None = None, **environment: str) -> tuple[Peer, Peer]:
        limited = {"TENSORLINK_MAX_BYTES_PER_S": str(limit)} if limit else {}
        made.append(cluster.peer(1, name, **limited))
        made.append(cluster.peer(0, f"reader-of-{name}", **environment))
        made[1].call(watch)
        return made[0], made[1]

    yield start
    for peer in made:
        peer.close()


def watch() -> None:
    """In a peer: keeps its warnings."""
    kept["log"] = Log()
    logging.getLogger("tensorlink").addHandler(kept["log"])


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def read(refs: list[tl.TensorRef], times: int) -> list[str]:
    """The warnings since `watch`."""
    for ref in refs:
        out = np.empty(ref.nbytes, np.uint8)
        for _ in range(times):
            tl.get(ref, out=out)
    said: list[str] = kept["log"].said
    return said


def leave() -> tuple[dict[str, Figure], dict[str, int]]:
    """Shuts down; what the next process knows of the way to the other host, and the modes of the files."""
    measured: Any = tl.current()._measured
    tl.shutdown()
    ((one, other),) = measured._figures
    again = Measured()
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in again._file._folder.iterdir()}  # type: ignore[union-attr]
    return dict(again.of(one, other)), files


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("slow")
def test_a_slow_link_is_told_of_once_and_remembered(pair: Callable[..., tuple[Peer, Peer]]) -> None:
    owner, reader = pair("far-away")
    large, small = owner.call(put, 1, 16 * MIB), owner.call(put, 2, 1000)
    said = reader.call(read, [large], 6)
    assert len(said) == 1 and re.match(r"expected 1.2 GB/s over tcp to far-away, got 0\.0[45]\d*: ", said[0]), said
    reader.call(read, [small], 64 * 4)
    figures, files = reader.call(leave)
    assert figures["tcp"].bytes_per_s == pytest.approx(400e6 / 8, rel=0.25)
    assert 1e-5 < figures["tcp"].latency_s < 0.02 and figures["tcp"].samples == 6
    assert files == {FILE: 0o600, "paths.lock": 0o600}


@pytest.mark.usefixtures("slow")
def test_a_limit_of_the_peer_is_nobodys_fault(pair: Callable[..., tuple[Peer, Peer]]) -> None:
    owner, reader = pair("limited", limit=100 * MIB)
    assert reader.call(read, [owner.call(put, 1, 16 * MIB)], 5) == []
    assert reader.call(ways) == []


def ways() -> list[tuple[str, str]]:
    measured: Any = tl.current()._measured
    return list(measured._figures)


@pytest.mark.parametrize("where", ["off", "/proc/nowhere"])
def test_without_a_file_all_goes_on(pair: Callable[..., tuple[Peer, Peer]], where: str) -> None:
    owner, reader = pair(where.replace("/", "-"), TENSORLINK_MEASURED=where)
    assert reader.call(read, [owner.call(put, 1, 2 * MIB)], 4) == []
    assert bool(reader.call(ways)) == (where != "off")
    reader.call(tl.shutdown)
    assert reader.call(read, [], 0) == [], "nothing is said of a cache that can't be written"


def test_a_pull_that_streams_counts_and_one_that_is_passed_on_does_not(
    pair: Callable[..., tuple[Peer, Peer]],
) -> None:
    owner, reader = pair("publisher")
    for stream, found in ((False, 0), (True, 1)):
        for _ in range(3):
            owner.call(publish)
            reader.call(pull, stream)
        assert len(reader.call(ways)) == found


def publish() -> None:
    if "publisher" not in kept:
        kept["publisher"] = tl.WeightPublisher("policy", {"w": np.ones(MIB, np.float32)})
    kept["publisher"].publish()


def pull(stream: bool) -> None:
    if "subscriber" not in kept:
        kept["subscriber"] = tl.WeightSubscriber("policy", {"w": np.empty(MIB, np.float32)})
    kept["version"] = kept.get("version", 0) + 1
    kept["subscriber"].pull(min_version=kept["version"], stream=stream)
