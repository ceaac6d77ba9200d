"""The relay passes bytes on as they are, and each of its faults does what it says."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

from tensorlink.testing.faults import Relay
from tests import leaks
from tests.peer import DEADLINE_S, eventually

MIB = 1 << 20
BYTES = random.Random(0).randbytes(3 * MIB)
Ends = tuple[socket.socket, socket.socket]


@pytest.fixture(params=["127.0.0.1", "::1"], ids=["IPv4", "IPv6"])
def server(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        listener = socket.create_server((request.param, 0), family=family)
    except OSError as error:
        pytest.skip(f"no {request.param}: {error}")
    with listener:
        listener.settimeout(DEADLINE_S)
        yield listener


@pytest.fixture
def relay(server: socket.socket) -> Iterator[Relay]:
    host, port = server.getsockname()[:2]
    with Relay(host, port, listen=host) as relay:
        yield relay


@pytest.fixture
def connect(relay: Relay, server: socket.socket) -> Iterator[Callable[[], Ends]]:
    """Makes a connection through the relay: the client's end and the server's."""
    made: list[socket.socket] = []

    def connect() -> Ends:
        made.append(socket.create_connection(relay.address, DEADLINE_S))
        made.append(server.accept()[0])
        made[-1].settimeout(DEADLINE_S)
        return made[-2], made[-1]

    yield connect
    for end in made:
        end.close()


def receive(end: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes and (more := end.recv(min(MIB, nbytes - len(data)))):
        data += more
    return bytes(data)


def through(source: socket.socket, sink: socket.socket, data: bytes = BYTES) -> bytes:
    """What arrives of `data`."""
    sender = threading.Thread(target=source.sendall, args=(data,))
    sender.start()
    arrived = receive(sink, len(data))
    sender.join(DEADLINE_S)
    return arrived


def is_reset(end: socket.socket) -> bool:
    """Whether it ends in a reset, whatever came before."""
    try:
        while end.recv(MIB):
            pass
    except ConnectionResetError:
        return True
    return False


def nothing_comes(end: socket.socket, seconds: float = 0.1) -> bool:
    end.settimeout(seconds)
    try:
        end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(DEADLINE_S)
    return False


def flipped(sent: bytes, arrived: bytes) -> list[int]:
    """Where a bit was turned over."""
    differ = np.frombuffer(sent, np.uint8) ^ np.frombuffer(arrived, np.uint8)
    places = np.flatnonzero(differ)
    assert all(int(differ[at]).bit_count() == 1 for at in places)
    return list(map(int, places))


def test_bytes_pass_both_ways_in_any_number_of_connections(relay: Relay, connect: Callable[[], Ends]) -> None:
    for client, served in [connect() for _ in range(3)]:
        assert through(client, served) == BYTES
        assert through(served, client) == BYTES
    assert relay.counters.connections == relay.open_connections == 3
    assert relay.counters.forward_bytes == relay.counters.backward_bytes == 3 * len(BYTES)


def test_each_direction_ends_for_itself(relay: Relay, connect: Callable[[], Ends]) -> None:
    client, served = connect()
    client.sendall(b"question")
    client.shutdown(socket.SHUT_WR)
    assert receive(served, MIB) == b"question"
    assert through(served, client) == BYTES
    served.close()
    assert client.recv(1) == b""
    eventually(lambda: not relay.open_connections, "the relay forgets the connection")


def test_who_is_reset_resets_the_other(connect: Callable[[], Ends]) -> None:
    client, served = connect()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    assert is_reset(served)


def test_a_slow_receiver_slows_the_sender(connect: Callable[[], Ends], relay: Relay) -> None:
    client, _ = connect()
    client.settimeout(0.3)
    with pytest.raises(TimeoutError):
        while True:
            client.sendall(BYTES)
    assert relay.open_connections == 1


def test_a_target_that_does_not_answer_resets_the_client(relay: Relay, server: socket.socket) -> None:
    server.close()
    try:
        with socket.create_connection(relay.address, DEADLINE_S) as client:
            assert is_reset(client)
    except ConnectionResetError:
        pass  # it came while the client was still connecting


def test_cut(relay: Relay, connect: Callable[[], Ends]) -> None:
    ends = [*connect(), *connect()]
    relay.cut()
    assert all(map(is_reset, ends))
    assert relay.counters.cuts == 2 and relay.open_connections == 0
    assert through(*connect()) == BYTES


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_cut_after(relay: Relay, connect: Callable[[], Ends], direction: str) -> None:
    source, sink = connect()[:: 1 if direction == "forward" else -1]
    assert through(source, sink) == BYTES
    relay.cut_after(1000, direction)  # type: ignore[arg-type]
    source.sendall(BYTES[:999])
    assert receive(sink, 999) == BYTES[:999]
    source.sendall(b"+-")
    arrived = b""
    with pytest.raises(ConnectionResetError):
        while True:
            arrived += sink.recv(10)
    assert arrived in (b"+", b"")
    assert is_reset(source)
    assert through(*connect()) == BYTES


def test_cut_after_may_meet_every_connection(relay: Relay, connect: Callable[[], Ends]) -> None:
    relay.cut_after(10, once=False)
    for number in range(1, 4):
        client, served = connect()
        client.sendall(b"0123456789")
        assert is_reset(client) and is_reset(served)
        assert relay.counters.cuts == number


def test_refuse(relay: Relay, connect: Callable[[], Ends]) -> None:
    client, served = connect()
    relay.refuse()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(relay.address, DEADLINE_S)
    assert through(client, served) == BYTES
    relay.refuse(False)
    assert through(*connect()) == BYTES


def test_stall(relay: Relay, connect: Callable[[], Ends]) -> None:
    client, served = connect()
    relay.stall("forward")
    client.sendall(b"held")
    client.shutdown(socket.SHUT_WR)
    assert nothing_comes(served)
    assert through(served, client) == BYTES
    fresh, opposite = connect()
    fresh.sendall(b"as well")
    assert nothing_comes(opposite)
    relay.resume()
    assert receive(served, MIB) == b"held"
    assert receive(opposite, 7) == b"as well"


def test_stall_in_the_middle_loses_nothing(relay: Relay, connect: Callable[[], Ends]) -> None:
    client, served = connect()
    sender = threading.Thread(target=client.sendall, args=(BYTES * 4,))
    sender.start()
    arrived = receive(served, MIB)
    for _ in range(20):
        relay.stall()
        before = relay.counters.forward_bytes
        arrived += receive(served, before - len(arrived))
        assert relay.counters.forward_bytes == before
        relay.resume()
    arrived += receive(served, 4 * len(BYTES) - len(arrived))
    sender.join(DEADLINE_S)
    assert arrived == BYTES * 4


def test_delay(relay: Relay, connect: Callable[[], Ends]) -> None:
    client, served = connect()
    relay.delay(0.1)
    begin = time.monotonic()
    for byte in b"in order":
        client.sendall(bytes([byte]))
    assert receive(served, 8) == b"in order"
    served.sendall(b"!")
    assert receive(client, 1) == b"!"
    assert time.monotonic() - begin >= 0.2
    relay.delay(0.001)
    assert through(client, served) == BYTES


def test_corrupt(relay: Relay, connect: Callable[[], Ends]) -> None:
    stretch = 100_000
    client, served = connect()
    relay.corrupt(stretch, "forward", seed=1)
    places = flipped(BYTES, through(client, served))
    assert len(places) == relay.counters.flips
    assert all(end - begin <= 2 * stretch for begin, end in zip([-1, *places], [*places, len(BYTES)], strict=True))
    assert through(served, client) == BYTES
    relay.heal()
    assert through(client, served) == BYTES
    relay.corrupt(stretch, seed=1)
    assert flipped(BYTES, through(*connect())) == places


def test_corrupt_once(relay: Relay, connect: Callable[[], Ends]) -> None:
    client, served = connect()
    assert through(client, served, b"before") == b"before"
    relay.corrupt_once(MIB)
    assert flipped(BYTES, through(client, served)) == [MIB]
    assert through(client, served) == BYTES


def test_dribble(relay: Relay, connect: Callable[[], Ends]) -> None:
    client, served = connect()
    relay.dribble(7, every_s=0.001)
    begin = time.monotonic()
    assert through(client, served, BYTES[:701]) == BYTES[:701]
    assert time.monotonic() - begin >= 0.1
    relay.dribble(1000)
    assert through(served, client, BYTES[:MIB]) == BYTES[:MIB]
    relay.heal()
    assert through(client, served) == BYTES


def test_faults_in_the_middle_of_traffic_from_many_threads(relay: Relay, connect: Callable[[], Ends]) -> None:
    client, served = connect()
    faults: list[Callable[[], None]] = [relay.heal, relay.stall, relay.resume, lambda: relay.delay(0.001)]
    threads = [threading.Thread(target=lambda act=act: [act() for _ in range(50)]) for act in faults]
    for thread in threads:
        thread.start()
    sender = threading.Thread(target=client.sendall, args=(BYTES,))
    sender.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    relay.heal()
    assert receive(served, len(BYTES)) == BYTES
    sender.join(DEADLINE_S)


def test_nothing_is_left(server: socket.socket) -> None:
    before = leaks.Snapshot.take()
    host, port = server.getsockname()[:2]
    relay = Relay(host, port)
    relay.delay(60)
    with closing(socket.create_connection(relay.address)) as client, closing(server.accept()[0]) as served:
        client.sendall(b"x")
        eventually(lambda: relay.open_connections, "it is open")
        relay.close()
        assert is_reset(served)
    relay.close()
    with pytest.raises(RuntimeError):
        relay.cut()
    with pytest.raises(OSError, match="assign"):
        Relay(host, port, listen="192.0.2.1")
    assert not leaks.settle(before)
