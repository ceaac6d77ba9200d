"""The TCP port against strangers: refused or closed, told once each, and the peers that are connected notice nothing."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator

import numpy as np
import pytest

import tensorlink as tl
from tensorlink.control import PeerClient
from tensorlink.network import join_address
from tensorlink.transports.tcp import TcpAddress
from tests.cluster import TOKEN, get
from tests.joined import Pair, joined, let_go
from tests.peer import DEADLINE_S, Nursery, Peer, eventually, kept, nursery

__all__ = ["let_go", "nursery"]

ENVIRONMENT = {"TENSORLINK_TRANSPORTS": "tcp", "TENSORLINK_TOKEN": TOKEN}
MAGIC, LANE = 0x31534C54, 1
CHALLENGE = struct.Struct("<II16s")
HEAD = struct.Struct("<IHHIIQQ16s16s")  # magic, role, port, size of the body, 0, incarnations, nonce, masked key
KIB = 1 << 10


@pytest.fixture(scope="module")
def home(_isolated_session: None) -> dict[str, str]:
    """The environment in which processes find the module's peers, whatever directory a test has for itself."""
    return {**ENVIRONMENT, "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}


@pytest.fixture(scope="module")
def pair(nursery: Nursery, home: dict[str, str]) -> Iterator[Pair]:
    """The endpoint `a` of this process, whose port is knocked at, and its peer `b`."""
    with joined(nursery, home) as both:
        yield both


@pytest.fixture
def at(pair: tuple[tl.Endpoint, Peer]) -> Iterator[TcpAddress]:
    """Where `a` listens. Its peer gets what it has, before and after."""
    a, b = pair
    ref = a.put(np.ones(300 * KIB, np.uint8))
    whole = b.call(get, ref)
    yield TcpAddress.decode(a._links.transports["tcp"].address())
    assert b.call(get, ref) == whole
    b.call(tl.send, "still here", "a")
    assert a.recv("b", timeout=DEADLINE_S) == "still here"
    ref.release()


def knock(at: TcpAddress) -> tuple[socket.socket, bytes]:
    """A connection, and the nonce of its challenge."""
    made = socket.create_connection((at.host, at.port), DEADLINE_S)
    magic, _, nonce = CHALLENGE.unpack(read(made, CHALLENGE.size))
    assert magic == MAGIC
    return made, nonce


def read(made: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        data += made.recv(nbytes - len(data)) or b"\0" * nbytes
    return data


def hello(key: bytes, theirs: bytes, to: tl.Endpoint, *, incarnation: int = 1) -> bytes:
    """What a peer says that knows the key."""
    ours = os.urandom(16)
    body = b"\0".join([b"stranger", to.name.encode(), b"127.0.0.1"])
    head = HEAD.pack(MAGIC, LANE, 1, len(body), 0, incarnation, to.id.incarnation, ours, bytes(16))
    proof = hmac.digest(key, b"tensorlink hello" + theirs + ours + head + body, hashlib.sha256)
    return head + body + proof


def closed(made: socket.socket) -> bool:
    """Waits until the other side has closed it, without a welcome: who greets with a wrong key is told that it is wrong."""
    made.settimeout(DEADLINE_S)
    data = b""
    try:
        while more := made.recv(4096):
            data += more
    except ConnectionError:
        pass
    finally:
        made.close()
    return not data or struct.unpack_from("<IH", data)[1] == 0


def refusals(log: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in log.messages if text.startswith("refused a connection from ")]


def test_strangers_are_refused_and_told_of_once_each(
    pair: tuple[tl.Endpoint, Peer], at: TcpAddress, caplog: pytest.LogCaptureFixture
) -> None:
    a, _ = pair
    caplog.set_level(logging.WARNING, "tensorlink")
    key = bytes.fromhex(at.key)
    made, nonce = knock(at)  # knows the key: this one is welcome
    recorded = hello(key, nonce, a)
    made.sendall(recorded)
    assert struct.unpack_from("<IH", read(made, 16))[1] == 1
    made.close()
    whos = []
    for words in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(100), os.urandom(400), b"\xff" * 5000, recorded):
        made, _ = knock(at)
        whos.append(join_address(*made.getsockname()))
        made.sendall(words)
        assert closed(made)
    made, nonce = knock(at)
    whos.append(join_address(*made.getsockname()))
    made.sendall(hello(bytes(16), nonce, a))
    assert closed(made)
    made, _ = knock(at)  # says nothing and goes
    made.close()
    eventually(lambda: all(sum(who in text for text in refusals(caplog)) == 1 for who in whos), "each was told of once")
    assert at.key not in caplog.text and TOKEN not in caplog.text


def test_a_slow_greeting_is_cut_off(
    pair: tuple[tl.Endpoint, Peer], at: TcpAddress, caplog: pytest.LogCaptureFixture
) -> None:
    a, _ = pair
    caplog.set_level(logging.WARNING, "tensorlink")
    made, nonce = knock(at)
    started = time.monotonic()
    for byte in hello(bytes.fromhex(at.key), nonce, a)[:5]:
        made.sendall(bytes([byte]))
    assert closed(made)
    assert 4 < time.monotonic() - started < 8
    eventually(lambda: any("too long" in text for text in refusals(caplog)), "it was told of")


def crowd(host: str, port: int, size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kept["crowd"] = [socket.create_connection((host, port), DEADLINE_S) for _ in range(size)]


def test_a_thousand_half_open_connections(
    pair: tuple[tl.Endpoint, Peer], at: TcpAddress, home: dict[str, str], nursery: Nursery
) -> None:
    a, b = pair
    before = descriptors()
    silent = nursery.start()
    silent.call(crowd, at.host, at.port, 1000)
    b.call(tl.send, "meanwhile", "a")
    assert a.recv("b", timeout=DEADLINE_S) == "meanwhile"
    newcomer = nursery.start(**home)
    newcomer.call(tl.init, "c")
    newcomer.call(tl.send, "hello", "a")
    assert a.recv("c", timeout=DEADLINE_S) == "hello"
    eventually(lambda: descriptors() < before + 300, "few of them are kept")
    newcomer.call(tl.shutdown)
    for peer in (newcomer, silent):
        peer.close()
    eventually(lambda: descriptors() <= before, "the descriptors came back")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_calls_without_the_token_are_refused(
    pair: tuple[tl.Endpoint, Peer], home: dict[str, str], nursery: Nursery
) -> None:
    a, _ = pair
    far = a._server.address.rpartition(",")[2]
    for token in (None, "wrong"):
        client = PeerClient(far, peer="a", me=a.id, token=token)
        with pytest.raises(tl.AuthenticationError):
            client.hello({}, DEADLINE_S)
        client.close()
    for token in ("", "wrong"):
        stranger = nursery.start(**{**home, "TENSORLINK_TRANSPORTS": "shm", "TENSORLINK_TOKEN": token})
        with pytest.raises(tl.AuthenticationError):
            stranger.call(tl.init, "stranger")
        stranger.close()
