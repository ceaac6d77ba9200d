"""`tensorlink bench`: what a peer gives to be measured with, the measuring, and the command."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tensorlink as tl
from tensorlink import benchmark, scratch
from tensorlink.cli.app import app
from tensorlink.control import PeerClient, host_identity
from tensorlink.errors import AuthenticationError, NoPathError, PeerLostError, PeerUnknownError, PoolExhaustedError
from tensorlink.measured import Measured
from tensorlink.settings import Settings
from tensorlink.types import PeerId, TensorRef
from tests.cluster import Cluster, cluster, networks
from tests.joined import Pair, join, let_go, pair
from tests.peer import DEADLINE_S, Peer, eventually, nursery, spawn

__all__ = ["cluster", "join", "let_go", "networks", "nursery", "pair", "spawn"]

pytestmark = pytest.mark.usefixtures("nursery")

TOKEN = "a secret of the tests"
MIB = 1 << 20


# What a peer gives


@pytest.fixture
def client(pair: Pair) -> Iterator[Callable[..., PeerClient]]:
    """`client("x")` calls the endpoint `a` of this process as `x`."""
    made: list[PeerClient] = []

    def connect(name: str, **how: Any) -> PeerClient:
        a = pair[0]
        how = {"token": a.settings.token, **how}
        made.append(PeerClient(a._server.address, peer="a", me=PeerId(name, 1), **how))
        return made[-1]

    yield connect
    for one in made:
        one.scratch(0, DEADLINE_S)
        one.close()


def handles(endpoint: tl.Endpoint) -> int:
    return int(endpoint.stats()["pool"]["handles"])


def test_it_is_of_the_size_that_was_asked_for_and_shows_nothing(pair: Pair, client: Callable[..., PeerClient]) -> None:
    a, _ = pair
    tl.put(b"\xaa" * MIB).release()
    ref = TensorRef.from_bytes(client("x").scratch(MIB, DEADLINE_S))
    assert ref.nbytes == MIB and not a.get(ref).any()


def test_a_caller_has_one_at_a_time(pair: Pair, client: Callable[..., PeerClient]) -> None:
    before, x = handles(pair[0]), client("x")
    first = TensorRef.from_bytes(x.scratch(MIB, DEADLINE_S))
    second = TensorRef.from_bytes(x.scratch(2 * MIB, DEADLINE_S))
    assert (handles(pair[0]), second.nbytes) == (before + 1, 2 * MIB)
    with pytest.raises(tl.StaleRefError):
        pair[0].get(first)
    assert x.scratch(0, DEADLINE_S) == b"" and handles(pair[0]) == before


def test_few_callers_have_one(pair: Pair, client: Callable[..., PeerClient]) -> None:
    for number in range(scratch.MOST_CALLERS):
        client(f"x{number}").scratch(1, DEADLINE_S)
    with pytest.raises(PoolExhaustedError, match="x0, x1, x2, x3 measure"):
        client("one more").scratch(1, DEADLINE_S)
    client("x3").scratch(0, DEADLINE_S)
    assert client("one more").scratch(1, DEADLINE_S)


def test_it_ends_with_its_time(pair: Pair, client: Callable[..., PeerClient], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_TTL_S", 0.01)
    for number in range(scratch.MOST_CALLERS):
        client(f"x{number}").scratch(1, DEADLINE_S)
    late = client("one more")

    def gets_one() -> bytes:
        with contextlib.suppress(PoolExhaustedError):
            return late.scratch(1, DEADLINE_S)
        return b""

    assert eventually(gets_one, "their time is over")


def ask(to: str, nbytes: int) -> int:
    """In a peer: how much it gets."""
    a = next(one for one in tl.peers() if one.name == to)
    me = tl.current()
    caller = PeerClient(a.address, peer=to, me=me.id, token=me.settings.token)
    try:
        handle = caller.scratch(nbytes, DEADLINE_S)
        return TensorRef.from_bytes(handle).nbytes if handle else 0
    finally:
        caller.close()


def test_it_ends_with_its_caller(join: Callable[..., Peer]) -> None:
    with tl.init("owner") as owner:
        caller = join("caller")
        assert caller.call(ask, "owner", MIB) == MIB and handles(owner) == 1
        caller.kill()
        eventually(lambda: handles(owner) == 0, "it is released")


def test_an_application_keeps_most_of_its_pool(join: Callable[..., Peer]) -> None:
    with tl.init("owner", pool_bytes=32 * MIB) as owner:
        one, two = (join(name) for name in ("one", "two"))
        assert 7 * MIB < one.call(ask, "owner", 2**63) <= 8 * MIB
        with pytest.raises(PoolExhaustedError, match="no room in the pool for anything"):
            two.call(ask, "owner", 1)
        assert one.call(ask, "owner", 0) == 0 and two.call(ask, "owner", MIB) == MIB
        with owner.put(bytes(20 * MIB)):
            assert MIB < one.call(ask, "owner", 2**63) < 2 * MIB


def test_strangers_get_none(join: Callable[..., Peer]) -> None:
    with tl.init("owner", token=TOKEN) as owner:
        stranger = PeerClient(owner._server.address, peer="owner", me=PeerId("x", 1), token="wrong")
        with pytest.raises(AuthenticationError):
            stranger.scratch(1, DEADLINE_S)
        stranger.close()
        assert handles(owner) == 0


def test_one_that_leaves_gives_none() -> None:
    with tl.init("owner") as owner:
        caller = PeerClient(owner._server.address, peer="owner", me=PeerId("x", 1), token=owner.settings.token)
        owner.drain()
        with pytest.raises(PeerLostError, match="leaving"):
            caller.scratch(1, DEADLINE_S)
        caller.close()


# The measuring, and the command


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})


@pytest.mark.shm
def test_every_transport_is_measured_and_kept(join: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLINK_TOKEN", TOKEN)
    trainer = join("trainer")
    done = command("trainer", "--sizes", "1K,4K,2M", "--seconds", "0.3", "--save", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert {(one["transport"], one["nbytes"]) for one in said["timings"]} == {
        (name, nbytes) for name in ("shm", "tcp") for nbytes in (1024, 4096, 2 * MIB)
    }
    assert all(one["reads"] > 0 and one["bytes_per_s"] > 0 for one in said["timings"])
    assert said["missing"] == {"local": "it is another process"}
    here = host_identity()
    found = Measured().of(here, here)
    assert {name: figure.bytes_per_s for name, figure in found.items()} == {
        name: figure["bytes_per_s"] for name, figure in said["figures"].items()
    }
    assert found["shm"].latency_s < found["tcp"].latency_s
    eventually(lambda: trainer.call(held) == 0, "the peer has its pool back")


def held() -> int:
    return handles(tl.current())


@pytest.mark.shm
def test_the_table(join: Callable[..., Peer]) -> None:
    join("trainer")
    done = command("trainer", "--sizes", "512,1m", "--seconds", "0.1")
    assert done.exit_code == 0, done.output
    for text in ("512 B", "1 MiB", "shm", "GB/s", "tcp: it listens for other hosts, which needs a token"):
        assert text in done.stdout, done.stdout
    assert not Measured()._rows, "nothing was to be kept"


@pytest.mark.shm
def test_what_cannot_be_kept_is_told(join: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    join("trainer")
    monkeypatch.setenv("TENSORLINK_MEASURED", "off")
    done = command("trainer", "--sizes", "1K,1M", "--seconds", "0.1", "--save")
    assert done.exit_code == 1 and "not saved: TENSORLINK_MEASURED is off" in done.stdout


@pytest.mark.shm
def test_a_peer_that_dies_meanwhile_is_no_success(join: Callable[..., Peer]) -> None:
    trainer = join("trainer")

    def kill() -> None:
        eventually(lambda: trainer.call(held) == 1, "it lends something")
        trainer.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    done = command("trainer", "--sizes", "1K,64M", "--seconds", "60", "--save")
    killer.join()
    assert done.exit_code == 1, done.output
    assert not Measured()._rows


@pytest.mark.shm
def test_more_than_a_peer_lends_is_told(join: Callable[..., Peer]) -> None:
    join("trainer")
    done = command("trainer", "--sizes", "1G")
    assert done.exit_code == 1 and "trainer lends" in done.stderr and "256 MiB" in done.stderr
    done = command("trainer", "--sizes", "1K", "--seconds", "0.1", "--save")
    assert done.exit_code == 1 and "not saved: it takes sizes up to 16K and from 1M" in done.stdout


def test_latency_is_not_taken_for_a_lack_of_bandwidth() -> None:
    far = [benchmark.Timing("tcp", nbytes, 0.1 + nbytes / 1e9, 1) for nbytes in (1024, 16384)]
    for nbytes in (16384, 256 << 20):
        assert 0.1 <= benchmark.expected(far, nbytes) == pytest.approx(0.1 + nbytes / 1e9)
    assert benchmark.expected(far[:1], 16384) < 0.11 and benchmark.expected([], 1 << 40) == 0


def test_names_and_sizes_that_are_none(join: Callable[..., Peer]) -> None:
    join("trainer")
    with pytest.raises(PeerUnknownError, match="Near names: trainer"):
        benchmark.bench("trainr", Settings.load())
    with pytest.raises(PeerUnknownError, match="There are: trainer"):
        benchmark.bench("zzz", Settings.load())
    with pytest.raises(PeerLostError, match="no coordinator runs in namespace 'nobody'"):
        benchmark.bench("trainer", Settings.load(namespace="nobody"))
    with pytest.raises(ValueError, match="sizes are positive"):
        benchmark.bench("trainer", Settings.load(), sizes=[0])
    with pytest.raises(NoPathError, match="local: "):
        benchmark.bench("trainer", Settings.load(transports="local"))
    assert command("trainer", "--sizes", "1K;2K").exit_code == 1


@pytest.mark.timeout(60)
def test_a_slow_network_is_told_from_a_peer_that_gives_little(cluster: Cluster) -> None:
    cluster.network.hosts[1].limit(400e6)
    cluster.peer(1, "fast")
    cluster.peer(1, "limited", TENSORLINK_MAX_BYTES_PER_S=str(10 * MIB))
    one = cluster.process(0)
    found = one.call(bench_from, "fast", (1024, 4 * MIB, 256 * MIB))
    figure = found.figures()["tcp"]
    assert figure.bytes_per_s == pytest.approx(400e6 / 8, rel=0.3) and found.here != found.there
    assert found.of("tcp", 256 * MIB) is None and "would take longer" in found.notes[0]
    assert "shm" in found.missing and not found.limited
    found = one.call(bench_from, "limited", (1024, 2 * MIB))
    assert found.limited == {"tcp"} and found.save(Measured())


def bench_from(peer: str, sizes: tuple[int, ...]) -> benchmark.Report:
    return benchmark.bench(peer, Settings.load(), sizes=sizes, seconds=1.0)
