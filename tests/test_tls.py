"""Mutual TLS: nothing that goes over TCP can be read, and who has no fitting certificate gets nowhere and harms nobody."""

from __future__ import annotations

import logging
import os
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tensorlink as tl
from tensorlink import _core
from tensorlink.network import join_address
from tensorlink.testing import TransportContract, TwoProcesses
from tensorlink.testing.pairs import Side, digest, pattern
from tensorlink.transports.tcp import TcpAddress
from tests.authority import Authority, Tap, authority, other
from tests.cluster import get, put, receive, send
from tests.joined import Pair, joined, let_go
from tests.peer import DEADLINE_S, Nursery, eventually, kept, nursery

__all__ = ["authority", "let_go", "nursery", "other"]

MIB = 1 << 20


@pytest.fixture(scope="module")
def home(authority: Authority) -> dict[str, str]:
    """The environment of the module's peers: certificates, and no token."""
    return {
        **authority.issue("peer"),
        "TENSORLINK_TRANSPORTS": "tcp",
        "TENSORLINK_TOKEN": "",
        "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"],
    }


@pytest.fixture(scope="module")
def pair(nursery: Nursery, home: dict[str, str]) -> Iterator[Pair]:
    with joined(nursery, home) as both:
        yield both


def address(a: tl.Endpoint) -> TcpAddress:
    return TcpAddress.decode(a._links.transports["tcp"].address())


@pytest.mark.parametrize("nbytes", [10, 5_000, 200_000, 8 * MIB])
def test_all_that_goes_between_two_peers(pair: Pair, nbytes: int) -> None:
    a, b = pair
    expected = digest(pattern(3, nbytes))
    for into in (False, True):
        assert b.call(get, a.put(pattern(3, nbytes)), into) == expected
    assert digest(np.asarray(a.get(b.call(put, 3, nbytes)))) == expected
    a.send(pattern(3, nbytes), "b", tag="there")
    assert b.call(receive, "a", "there") == expected
    b.call(send, 3, nbytes, "a", "back")
    assert digest(np.asarray(a.recv("b", tag="back", timeout=DEADLINE_S))) == expected


def test_files_that_have_gone_since_are_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in Authority(tmp_path).issue("peer").items():
        monkeypatch.setenv(name, value)
    with tl.init("a") as a, tl.init("b") as b:
        for path in tmp_path.iterdir():
            path.unlink()
        joins = a._control._joins
        a._control.rejoin_needed()
        eventually(lambda: a._control._joins > joins, "it has joined again")
        a.send(1, "b")
        assert b.recv("a") == 1


def pull(name: str, nbytes: int) -> tuple[int, str]:
    into = {"w": np.zeros(nbytes, np.uint8)}
    with tl.WeightSubscriber(name, into=into) as subscriber:
        return subscriber.pull(timeout=DEADLINE_S), digest(into["w"])


def test_weights(pair: Pair, home: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair
    for name, value in home.items():
        monkeypatch.setenv(name, value)
    with tl.WeightPublisher("w", {"w": pattern(5, 8 * MIB)}, endpoint=a) as publisher:
        version = publisher.publish()
        assert b.call(pull, "w", 8 * MIB) == (version, digest(pattern(5, 8 * MIB)))
        with tl.init("c") as c:  # its lane brings the news together with the welcome
            into = {"w": np.zeros(8 * MIB, np.uint8)}
            with tl.WeightSubscriber("w", into=into, endpoint=c) as late:
                assert late.pull(timeout=DEADLINE_S) == version
            assert digest(into["w"]) == digest(pattern(5, 8 * MIB))


def send_many(count: int, to: str) -> None:
    for i in range(count):
        tl.send(np.full(1000 + i, i), to, tag="many")


def test_many_messages_both_ways_at_once(pair: Pair) -> None:
    a, b = pair
    b.start(send_many, 2000, "a")
    for i in range(2000):
        a.send(np.full(1000 + i, i), "b", tag="many")
    for i in range(2000):
        assert np.array_equal(a.recv("b", tag="many", timeout=DEADLINE_S), np.full(1000 + i, i))
    b.finish()
    b.call(take_many, 2000)


def take_many(count: int) -> None:
    for i in range(count):
        assert np.array_equal(tl.recv("a", tag="many", timeout=DEADLINE_S), np.full(1000 + i, i))


# Strangers


def context(environment: dict[str, str]) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=environment["TENSORLINK_TLS_CA"])
    made.load_cert_chain(environment["TENSORLINK_TLS_CERT"], environment["TENSORLINK_TLS_KEY"])
    return made


def knock(at: TcpAddress, environment: dict[str, str] | None, certified: bool = True) -> tuple[str, bytes]:
    """Shakes hands as a stranger: where from, and what is heard then; nothing: it was turned away."""
    made = socket.create_connection((at.host, at.port), DEADLINE_S)
    here = join_address(*made.getsockname())
    with made:
        if environment is None:
            made.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
            return here, heard(made)
        shaker = (
            context(environment) if certified else ssl.create_default_context(cafile=environment["TENSORLINK_TLS_CA"])
        )
        with shaker.wrap_socket(made, server_hostname="tensorlink") as shaken:
            assert shaken.version() == "TLSv1.3"
            return here, heard(shaken)


def heard(made: socket.socket) -> bytes:
    try:
        return made.recv(24)
    except (ConnectionError, ssl.SSLError):
        return b""


def test_strangers_at_the_port(
    pair: Pair, home: dict[str, str], authority: Authority, other: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = pair
    at = address(a)
    caplog.set_level(logging.WARNING, "tensorlink")
    ref = a.put(pattern(1, 300_000))
    _, challenge = knock(at, home)
    assert challenge.startswith(b"TLS1")  # who has one gets as far as the key
    foreign = {**other.issue("foreign"), "TENSORLINK_TLS_CA": str(authority.ca)}
    whys = {
        knock(at, None)[0]: "doesn't use TLS",
        knock(at, home, certified=False)[0]: "shows no certificate",
        knock(at, foreign)[0]: "unable to get local issuer certificate",
        knock(at, authority.issue("late", days=-1))[0]: "certificate has expired",
        knock(at, authority.issue("misnamed", name="host7"))[0]: "hostname mismatch",
        knock(at, authority.issue("one", more="extendedKeyUsage=serverAuth"))[0]: "unsuitable certificate purpose",
    }

    def told() -> bool:
        lines = [text for text in caplog.messages if text.startswith("refused a connection from ")]
        return all([why in text for text in lines if who in text] == [True] for who, why in whys.items())

    eventually(told, "each was told of once, with the reason")
    assert b.call(get, ref) == digest(pattern(1, 300_000))


def hold(host: str, port: int, count: int) -> None:
    kept["held"] = [socket.create_connection((host, port), DEADLINE_S) for _ in range(count)]
    for made in kept["held"]:
        made.sendall(b"\x16\x03\x01\x02")  # the beginning of a hello of TLS


def test_handshakes_that_stand_still_hold_up_nobody(pair: Pair, nursery: Nursery) -> None:
    a, b = pair
    before = len(os.listdir("/proc/self/fd"))
    silent = nursery.start()
    silent.call(hold, address(a).host, address(a).port, 400)
    b.call(tl.send, "meanwhile", "a")
    assert a.recv("b", timeout=DEADLINE_S) == "meanwhile"
    assert b.call(get, a.put(pattern(2, MIB))) == digest(pattern(2, MIB))
    assert len(os.listdir("/proc/self/fd")) < before + 300
    silent.close()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 2, "the descriptors came back")


def side(patch: pytest.MonkeyPatch, name: str, environment: dict[str, str] | None) -> Side:
    """An end of the transport with these certificates, or none."""
    for variable in ("TENSORLINK_TLS_CERT", "TENSORLINK_TLS_KEY", "TENSORLINK_TLS_CA"):
        patch.setenv(variable, (environment or {}).get(variable, ""))
    return Side("tcp", name, 1)


@pytest.mark.parametrize("wrong", ["none", "foreign", "expired"])
@pytest.mark.parametrize("dials", ["good", "wrong"])
def test_two_that_do_not_fit(
    authority: Authority, other: Authority, monkeypatch: pytest.MonkeyPatch, wrong: str, dials: str
) -> None:
    ways = {
        "none": (None, "nothing but TLS, and .* none", "nothing but TLS, and this process has no certificates"),
        "foreign": (
            {**other.issue("foreign"), "TENSORLINK_TLS_CA": str(authority.ca)},
            "its certificate is refused here: unable to get local issuer certificate",
            "it refuses the certificate of this process: .*unknown ca",
        ),
        "expired": (
            authority.issue("expired", days=-1),
            "its certificate is refused here: certificate has expired",
            "it refuses the certificate of this process: .*certificate expired",
        ),
    }
    environment, told_the_good, told_the_other = ways[wrong]
    good, bad = side(monkeypatch, "good", authority.issue("good")), side(monkeypatch, "bad", environment)
    one, two, told = (good, bad, told_the_good) if dials == "good" else (bad, good, told_the_other)
    with pytest.raises(tl.AuthenticationError, match=f"{told}.*TENSORLINK_TLS_CERT"):
        one.connect(*two.facts()[:2])
    good.shutdown()
    bad.shutdown()


@pytest.mark.parametrize("secured", [False, True])
def test_what_can_be_read_on_the_way(authority: Authority, monkeypatch: pytest.MonkeyPatch, secured: bool) -> None:
    """Without TLS all of it, which shows that this looks in the right place."""
    environment = authority.issue("peer") if secured else None
    near, far = side(monkeypatch, "near", environment), side(monkeypatch, "far", environment)
    peer, address, _ = far.facts()
    there = TcpAddress.decode(address)
    with Tap(there.host, there.port) as tap:
        near.connect(peer, replace(there, port=tap.port).encode())
        lane = near.connection.lane()
        assert lane is not None
        lane.send(pattern(7, 1000), "a tag that tells")
        assert far.engine.receive(_core.ANY_SOURCE, "a tag that tells", DEADLINE_S, None, None).nbytes == 1000
        far.connect(*near.facts()[:2])
        sizes = [100_000, 3 * MIB]
        assert near.fetch(far.expose(9, sizes), sizes) == [digest(pattern(9 + i, n)) for i, n in enumerate(sizes)]
    seen = bytes(tap.seen)
    assert len(seen) > sum(sizes)
    for secret in (
        pattern(7, 1000).tobytes()[:32],
        b"a tag that tells",
        b"near",
        pattern(10, 3 * MIB).tobytes()[MIB:][:32],
    ):
        assert (secret in seen) is not secured
    near.shutdown()
    far.shutdown()


@pytest.mark.soak
class TestTcpByTls(TransportContract):
    transport = "tcp"
    test_more_than_4_gib = None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _certificates(cls, authority: Authority) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in authority.issue("contract").items():
                patch.setenv(name, value)
            cls.pairs = TwoProcesses("tcp")
            yield
            cls.pairs.close()

    @classmethod
    def setup_class(cls) -> None:
        """The environment comes from a fixture, which makes the pairs."""

    @classmethod
    def teardown_class(cls) -> None:
        """As above."""
