"""Calls between two endpoints' services: messages, mailboxes, errors and deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import grpc
import pytest

from tensorlink.control import Hello, Mailbox, PeerClient, PeerServer, wire
from tensorlink.control import control_pb2 as pb
from tensorlink.control import control_pb2_grpc as pb_grpc
from tensorlink.control.pool import DaemonPool
from tensorlink.errors import (
    AuthenticationError,
    ClosedError,
    PeerLostError,
    PoolExhaustedError,
    TensorLinkError,
    TransferTimeoutError,
    TransportError,
)
from tensorlink.types import PeerId
from tests.control.control_processes import eventually

ME = PeerId("a", 7)


class Recorder:
    """Handlers that keep what came, and do what the tag of a message says."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []
        self.boxes: SimpleQueue[Mailbox] = SimpleQueue()
        self.go_on = threading.Event()

    def hello(self, hello: Hello) -> dict[str, bytes]:
        self.seen.append((hello.peer, dict(hello.connect)))
        return {"shm": b"\0there"}

    def deliver(self, source: PeerId, sequence: int, tag: str, frame: bytes) -> bytes:
        self.seen.append((source, sequence, tag, frame))
        if tag == "full":
            raise PoolExhaustedError("no room for été", peer="b", hint="Wait")
        if tag == "bug":
            raise KeyError("oops")
        if tag == "wait":
            self.go_on.wait(30)
        return frame[::-1][:16]

    def release(self, source: PeerId, ids: list[int]) -> None:
        self.seen.append((source, ids))

    def mailbox(self, source: PeerId, box: Mailbox) -> None:
        self.boxes.put(box)

    def scratch(self, source: PeerId, nbytes: int) -> bytes:
        self.seen.append((source, nbytes))
        return b"a handle\0"


@pytest.fixture
def handlers() -> Recorder:
    return Recorder()


@pytest.fixture
def server(run_dir: Path, handlers: Recorder) -> Iterator[PeerServer]:
    server = PeerServer(handlers, name="b", token="secret")
    server.incarnation = 9
    yield server
    handlers.go_on.set()
    server.close()
    assert list(run_dir.iterdir()) == []


@pytest.fixture
def client(server: PeerServer) -> Iterator[PeerClient]:
    client = PeerClient(server.address, peer="b", me=ME, token="secret")
    yield client
    client.close()


def test_calls(client: PeerClient, handlers: Recorder) -> None:
    hello = client.hello({"shm": b"here\0"}, 10)
    assert (hello.peer, hello.connect) == (PeerId("b", 9), {"shm": b"\0there"})
    assert client.deliver(1, "tag", b"\0abc", 10) == b"cba\0"
    client.release([1, 2**64 - 1], 10)
    assert client.ping(10) == PeerId("b", 9)
    assert client.scratch(2**64 - 1, 10) == b"a handle\0"
    calls = [(ME, {"shm": b"here\0"}), (ME, 1, "tag", b"\0abc"), (ME, [1, 2**64 - 1]), (ME, 2**64 - 1)]
    assert handlers.seen == calls


def test_errors_of_the_peer_come_back_as_what_they_are(client: PeerClient) -> None:
    with pytest.raises(PoolExhaustedError, match="no room for été") as caught:
        client.deliver(1, "full", b"", 10)
    assert (caught.value.peer, caught.value.hint, caught.value.phase) == ("b", "Wait", "deliver")
    with pytest.raises(TransportError, match="KeyError"):
        client.deliver(2, "bug", b"", 10)


def test_deadline_and_close(client: PeerClient, handlers: Recorder) -> None:
    began = time.monotonic()
    with pytest.raises(TransferTimeoutError):
        client.deliver(1, "wait", b"", 0.2)
    assert time.monotonic() - began < 2
    threading.Timer(0.2, client.close).start()
    with pytest.raises(ClosedError):
        client.deliver(2, "wait", b"", 30)
    with pytest.raises(ClosedError):
        client.ping(1)


def test_token_and_version(server: PeerServer, client: PeerClient) -> None:
    for token in (None, "wrong"):
        other = PeerClient(server.address, peer="b", me=ME, token=token)
        with pytest.raises(AuthenticationError):
            other.ping(10)
        with pytest.raises(PeerLostError, match="token"):
            other.mailbox("shm").recv(10)
        other.close()
    with wire.channel(server.address) as channel:
        request = pb.HelloRequest(version=wire.VERSION + 1, name="a", incarnation=1)
        with pytest.raises(grpc.RpcError) as caught:
            pb_grpc.PeerServiceStub(channel).Hello(request, timeout=10, metadata=wire.token_metadata("secret"))
        error = wire.error_of(caught.value, phase="hello")
        assert type(error) is TensorLinkError and "version" in str(error)


def test_too_large_a_message_is_refused_here(client: PeerClient) -> None:
    assert client.deliver(1, "", bytes(wire.MAX_MESSAGE_BYTES - 1000), 60) == bytes(16)
    with pytest.raises(TransportError, match="refused"):
        client.deliver(2, "", bytes(wire.MAX_MESSAGE_BYTES + 1), 60)


def test_nobody_there(run_dir: Path) -> None:
    client = PeerClient(f"unix:{run_dir}/nobody.sock", peer="b", me=ME)
    with pytest.raises(PeerLostError):
        client.ping(10)
    client.close()


def test_mailbox_both_ways_and_its_ends(client: PeerClient, handlers: Recorder) -> None:
    near = client.mailbox("shm")
    far = handlers.boxes.get(timeout=10)
    assert (far.peer, far.transport) == ("a", "shm")
    for i in range(500):
        near.send(b"n%d" % i)
        far.send(b"f%d" % i)
    assert [far.recv(10) for _ in range(500)] == [b"n%d" % i for i in range(500)]
    assert [near.recv(10) for _ in range(500)] == [b"f%d" % i for i in range(500)]
    with pytest.raises(TransferTimeoutError):
        near.recv(0.05)
    far.send(b"last")
    far.close()
    assert near.recv(10) == b"last"
    with pytest.raises(PeerLostError):
        near.recv(10)
    near.close()
    with pytest.raises(PeerLostError):
        near.send(b"late")


@pytest.mark.parametrize("ender", ["near", "client", "server"])
def test_a_lost_mailbox_wakes_its_reader(
    client: PeerClient, server: PeerServer, handlers: Recorder, ender: str
) -> None:
    near = client.mailbox("shm")
    far = handlers.boxes.get(timeout=10)
    ends: dict[str, Callable[[], None]] = {"near": near.close, "client": client.close, "server": server.close}
    ends[ender]()
    for box in (near, far):
        with pytest.raises(PeerLostError):
            box.recv(10)


def test_server_close_is_bounded_with_a_call_in_progress(server: PeerServer, client: PeerClient) -> None:
    failed: SimpleQueue[BaseException] = SimpleQueue()

    def blocked() -> None:
        try:
            client.deliver(1, "wait", b"", 30)
        except TensorLinkError as error:
            failed.put(error)

    threading.Thread(target=blocked, daemon=True).start()
    eventually(lambda: server._handlers.seen, "the call arrived")  # type: ignore[attr-defined]
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 2
    assert isinstance(failed.get(timeout=10), PeerLostError)  # it is the other side that was closed


def test_pool_reuses_idle_threads_and_grows_to_its_limit() -> None:
    pool = DaemonPool("test", limit=4)
    for i in range(50):
        assert pool.submit(lambda i=i: i * 2).result(10) == i * 2
    assert pool._threads == 1
    gate = threading.Event()
    running = [pool.submit(gate.wait, 10) for _ in range(8)]
    eventually(lambda: pool._threads == 4, "it has grown")
    gate.set()
    assert all(future.result(10) for future in running)
    with pytest.raises(KeyError):
        pool.submit({}.__getitem__, "missing").result(10)
    pool.shutdown()
    with pytest.raises(RuntimeError):
        pool.submit(print)
