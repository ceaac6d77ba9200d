"""What strangers and peers can make a process keep or do has a bound; at the bound they are told, and nobody else notices."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import pytest

import tensorlink as tl
from tensorlink import _core
from tensorlink.control import PeerClient, PeerServer, heartbeat, list_peers, wire
from tensorlink.control import control_pb2 as pb
from tensorlink.control.mailbox import Mailbox
from tensorlink.control.membership import MAX_MEMBERS, MAX_REMEMBERED, MAX_SERVICES, Membership
from tensorlink.settings import Settings
from tensorlink.testing import eventually
from tensorlink.transports.tcp import TcpAddress
from tensorlink.types import PeerId, PeerInfo
from tests.peer import DEADLINE_S
from tests.test_port import closed, hello, knock, read

TOKEN = "only-members-know-this"
DELAY_S = _core.Throttle.DELAY_S


# Logins over gRPC


@pytest.fixture
def port(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[tl.Endpoint]:
    """The endpoint `a` of this process, which listens on TCP."""
    caplog.set_level(logging.INFO, "tensorlink")
    monkeypatch.setenv("TENSORLINK_TOKEN", TOKEN)
    with tl.init("a") as a:
        yield a
    request.node.funcargs.pop("port", None)  # pytest would keep it beyond the module's check for leaks


def far(a: tl.Endpoint) -> str:
    return a._server.address.rpartition(",")[2]


def coordinator_target() -> str:
    return wire.unix_target(Path(os.environ["XDG_RUNTIME_DIR"]) / "tensorlink" / "c-default.sock")


def guess(a: tl.Endpoint, token: str) -> float:
    """How long it takes until that token is refused."""
    client = PeerClient(far(a), peer="a", me=PeerId("stranger", 1), token=token)
    began = time.monotonic()
    with pytest.raises(tl.AuthenticationError, match="TENSORLINK_TOKEN"):
        client.ping(DEADLINE_S)
    client.close()
    return time.monotonic() - began


def let_in_after(a: tl.Endpoint) -> float:
    """How long a new caller with the right token waits. One of several may be slow on a busy machine, not all."""
    member = PeerClient(far(a), peer="a", me=PeerId("b", 1), token=TOKEN)
    began = time.monotonic()
    assert member.ping(DEADLINE_S) == a.id
    took = time.monotonic() - began
    member.close()
    return took


def test_who_guesses_on_waits_and_the_right_token_does_not(port: tl.Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(8) as pool:
        waits = list(pool.map(lambda i: guess(port, f"guess {i}"), range(24)))
    assert sum(wait >= DELAY_S for wait in waits) >= 24 - _core.Throttle.BURST - 4
    assert min(let_in_after(port) for _ in range(3)) < DELAY_S  # from the same address
    told = [text for text in caplog.messages if text.startswith("refused a call from ")]
    assert 0 < len(told) <= _core.Throttle.BURST + 4
    assert TOKEN not in caplog.text and "guess 0" not in caplog.text


@pytest.mark.parametrize("method", ["PeerService/Hello", "Coordinator/Join"])
def test_who_has_no_token_is_refused_before_a_message_of_its_is_read(port: tl.Endpoint, method: str) -> None:
    """gRPC would receive and unpack it, up to 64 MiB, before any handler saw the token."""
    end = threading.Event()
    with wire.channel(far(port) if "Peer" in method else coordinator_target()) as channel:
        call = channel.stream_unary(f"/tensorlink.{method}", None, None)

        def messages() -> Iterator[bytes]:
            end.wait()
            yield b""

        with pytest.raises(grpc.RpcError) as refused:
            call(messages(), timeout=DEADLINE_S, metadata=wire.token_metadata("wrong"))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        end.set()


def test_a_wrong_token_and_keys_are_nowhere_in_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "TENSORLINK_TOKEN": TOKEN, "TENSORLINK_LOG": "DEBUG", "TENSORLINK_LEASE_S": "2"}
    log = tmp_path / "coordinator"
    with log.open("w") as out:
        command = [sys.executable, "-m", "tensorlink.cli", "coordinator", "--listen", "127.0.0.1:0"]
        coordinator = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=out, text=True)
    assert coordinator.stdout is not None
    at = coordinator.stdout.readline().split()[2].rstrip(",")
    program = "import tensorlink as tl; tl.init('s', timeout=20)"
    said = ""
    for token in ("a-stale-token", TOKEN):
        joiner = subprocess.run(
            [sys.executable, "-c", program],
            env={**environment, "TENSORLINK_TOKEN": token, "TENSORLINK_COORDINATOR": at},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (joiner.returncode == 0) == (token == TOKEN), joiner.stderr
        said += joiner.stdout + joiner.stderr
    for _ in range(_core.Throttle.BURST + 2):
        with pytest.raises(tl.AuthenticationError) as refused:
            list_peers(Settings(coordinator=at, token="a-stale-token"), DEADLINE_S)
        said += str(refused.value) + repr(refused.value.__dict__)
    assert list_peers(Settings(coordinator=at, token=TOKEN), DEADLINE_S) == []
    coordinator.terminate()
    assert coordinator.wait(20) == 0
    said += coordinator.stdout.read() + log.read_text()
    coordinator.stdout.close()
    assert "AuthenticationError" in said and "refused a call from" in log.read_text()
    assert TOKEN not in said and "a-stale-token" not in said


class Patient:
    """Handlers whose releases take as long as the test wants."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Semaphore(0), threading.Event()

    def hello(self, _: object) -> dict[str, bytes]:
        return {}

    def deliver(self, *_: object) -> bytes:
        return b""

    def release(self, *_: object) -> None:
        self.began.release()
        self.go_on.wait(DEADLINE_S)

    def mailbox(self, *_: object) -> None:
        return None

    def scratch(self, *_: object) -> bytes:
        return b""


def test_calls_beyond_the_bound_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorlink.control.peer_service._MAX_CALLS", 3)
    handlers = Patient()
    server = PeerServer(handlers, name="a")
    client = PeerClient(server.address, peer="a", me=PeerId("b", 1))
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(client.release, [1], DEADLINE_S) for _ in range(3)]
        for _ in calls:
            assert handlers.began.acquire(timeout=DEADLINE_S)
        with pytest.raises(tl.TransportError, match="a at unix:.* was refused, as too large or one too many"):
            client.ping(DEADLINE_S)
        handlers.go_on.set()
        for call in calls:
            call.result()
    eventually(lambda: answers(client), "it goes on")
    client.close()
    server.close()


def answers(client: PeerClient) -> bool:
    try:
        client.ping(DEADLINE_S)
    except tl.TransportError:
        return False
    return True


def test_silent_heartbeat_streams_make_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(heartbeat, "MAX_STREAMS", 8)

    async def crowd() -> None:
        members = Membership(60.0, lambda _: None)
        lease = members.join(info("m"), b"n" * 16)
        server = heartbeat.HeartbeatServer(members)
        path = (await server.listen_unix(tmp_path / "hb")).removeprefix("unix:")
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(lease.key)
        assert await reader.readexactly(1) == heartbeat.EXTENDED
        strangers = [await asyncio.open_unix_connection(path) for _ in range(40)]
        for other, _ in strangers[:30]:
            assert await asyncio.wait_for(other.read(1), DEADLINE_S) == b"", "closed"
        writer.write(lease.key)
        assert await reader.readexactly(1) == heartbeat.EXTENDED
        late, its = await asyncio.open_unix_connection(path)  # a member that comes now
        its.write(lease.key)
        assert await late.readexactly(1) == heartbeat.EXTENDED
        assert len(server.streams) <= 9
        for each in (writer, its, *(one for _, one in strangers)):
            each.close()
        server.close()
        await asyncio.sleep(0)

    asyncio.run(crowd())


# The port for data


def place(a: tl.Endpoint) -> TcpAddress:
    return TcpAddress.decode(a._links.transports["tcp"].address())


def refused_after(at: TcpAddress, a: tl.Endpoint) -> float:
    """How long a greeting with a wrong key waits for its answer."""
    made, nonce = knock(at)
    began = time.monotonic()
    made.sendall(hello(bytes(16), nonce, a))
    assert closed(made)
    return time.monotonic() - began


def greeted_after(at: TcpAddress, a: tl.Endpoint) -> float:
    """How long a greeting with the right key waits for its answer."""
    made, nonce = knock(at)
    began = time.monotonic()
    made.sendall(hello(bytes.fromhex(at.key), nonce, a))
    assert struct.unpack_from("<IH", read(made, 16))[1] == 1
    took = time.monotonic() - began
    made.close()
    return took


def test_wrong_keys_again_and_again(port: tl.Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    at = place(port)
    with ThreadPoolExecutor(30) as pool:
        waits = list(pool.map(lambda _: refused_after(at, port), range(30)))
    assert sum(wait >= 0.9 * DELAY_S for wait in waits) >= 30 - _core.Throttle.BURST - 4
    assert min(greeted_after(at, port) for _ in range(3)) < 0.5 * DELAY_S  # from there too
    eventually(lambda: "doesn't know the key" in caplog.text, "some are told of one by one")
    assert caplog.text.count("doesn't know the key") <= _core.Throttle.BURST + 4
    assert at.key not in caplog.text


def test_streams_of_one_peer(port: tl.Endpoint) -> None:
    at = place(port)
    with ExitStack() as streams:
        for count in range(65):
            made, nonce = knock(at)
            streams.enter_context(made)
            made.sendall(hello(bytes.fromhex(at.key), nonce, port))
            _, accepted, size, full = struct.unpack("<IHHQ", read(made, 16))
            assert (accepted, full) == ((1, 0) if count < 64 else (0, 1))
        text = read(made, size).decode()
        assert "64 streams of stranger" in text and "the most that one peer may have" in text
    eventually(lambda: not port._engine.connections(), "they ended")


def use_up() -> list[int]:
    """Descriptors, until none is left."""
    taken: list[int] = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return taken


def test_no_descriptors_left_costs_no_time_and_ends(port: tl.Endpoint) -> None:
    """Whoever waits for an accept would be told of for ever."""
    at = place(port)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64, hard))
    made = socket.socket()
    made.settimeout(DEADLINE_S)
    taken = use_up()
    try:
        made.connect((at.host, at.port))
        before = time.process_time()
        threading.Event().wait(0.5)
        assert time.process_time() - before < 0.2
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert struct.unpack_from("<I", read(made, 24))[0] == 0x31534C54
    made.close()


# What is kept


def test_messages_that_nobody_receives(port: tl.Endpoint) -> None:
    """Over a carrier that gives no credit."""
    engine, other = port._engine, _core.Engine("x", f"/tmp/tl-limits-{os.getpid()}", bytes(16), 1 << 20)
    other.start(1)
    packed = _core.pack(np.zeros(16 << 20, np.uint8))
    payload = packed.to_bytes()
    for _ in range(15):
        engine.deliver("x", 1, other.frame("a", port.id.incarnation, "t", packed.meta, b"", payload))
    last = other.frame("a", port.id.incarnation, "t", packed.meta, b"", payload)
    with pytest.raises(tl.PoolExhaustedError, match="wait until it receives"):
        engine.deliver("x", 1, last)
    engine.receive(engine.source("x"), "t", 0.0, None, None)
    engine.deliver("x", 1, last)  # nothing is lost
    engine.deliver(
        "y", 1, other.frame("a", port.id.incarnation, "t", _core.pack(None).meta, b"", b"")
    )  # others aren't meant
    other.close()


def test_a_mailbox_that_nobody_reads() -> None:
    box, done = Mailbox("b", "shm"), threading.Event()

    def carry() -> None:
        while box.arrived(bytes(8 << 20)):
            pass
        done.set()

    thread = threading.Thread(target=carry)
    thread.start()
    eventually(lambda: len(box._inbox) == 8, "it is full")
    box.recv(1)
    eventually(lambda: len(box._inbox) == 8, "it goes on")
    assert not done.is_set()
    box.end("over")
    thread.join(DEADLINE_S)
    assert done.is_set()


# Joins


def info(name: str, *services: str, incarnation: int = 0) -> PeerInfo:
    return PeerInfo(PeerId(name, incarnation), address="x", host="h", pid=1, services=services)


def test_members_and_services_have_bounds() -> None:
    members = Membership(5.0, lambda _: None)
    for i in range(MAX_MEMBERS):
        lease = members.join(info(f"m{i}"), i.to_bytes(16, "big"))
    with pytest.raises(tl.TensorLinkError, match=f"{MAX_MEMBERS} peers have joined"):
        members.join(info("one more"), b"n" * 16)
    assert members.join(info("m7"), (7).to_bytes(16, "big")).peer.id.name == "m7", "who is there may join again"
    with pytest.raises(tl.TensorLinkError, match=f"{MAX_SERVICES} are the most of one peer"):
        members.advertise(lease, [f"s{i}" for i in range(MAX_SERVICES + 1)])
    assert lease.peer.services == ()


def test_names_that_were_known_are_forgotten_in_time() -> None:
    members = Membership(5.0, lambda _: None)
    lease = members.join(info("first", incarnation=1), b"n" * 16)
    for part in range(5):
        members.learn({f"{part} {i}": 100 + part for i in range(MAX_REMEMBERED // 2)})
    assert len(members._known) <= 2 * MAX_REMEMBERED
    assert members._known["first"] == 1 and members.by_key(lease.key) is lease, "who is there is not forgotten"
    assert "4 0" in members._known and "0 0" not in members._known, "the oldest go"


@pytest.mark.parametrize(
    ("peer", "known", "why"),
    [
        ({"labels": {f"k{i}": "v" for i in range(65)}}, {}, "64 labels"),
        ({"labels": {"k": "v" * 300}}, {}, "255 bytes"),
        ({"links": bytes(65537)}, {}, "65536 bytes"),
        ({"host": "h" * 256}, {}, "255 bytes"),
        ({"services": [f"s{i}" for i in range(300)]}, {}, "256 are the most"),
        ({}, {f"n{i}": 1 for i in range(wire.MAX_KNOWN + 1)}, "leave out the oldest"),
    ],
    ids=["labels", "label", "links", "host", "services", "known"],
)
def test_joins_that_say_too_much(port: tl.Endpoint, peer: dict[str, object], known: dict[str, int], why: str) -> None:
    request = pb.JoinRequest(version=1, peer=pb.Peer(name="b", address="x", **peer), nonce=bytes(16), known=known)  # type: ignore[arg-type]
    with wire.channel(coordinator_target()) as channel:
        join = channel.unary_unary("/tensorlink.Coordinator/Join", pb.JoinRequest.SerializeToString, None)
        with pytest.raises(grpc.RpcError, match=why):
            join(request, timeout=DEADLINE_S, metadata=wire.token_metadata(TOKEN))
    assert [member.id.name for member in tl.peers()] == ["a"]
