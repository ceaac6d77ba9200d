"""The coordinator's calls: bad requests, versions, TCP, and many peers."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from tensorlink.control import ControlClient, PeerServer, list_peers, wire
from tensorlink.control import control_pb2 as pb
from tensorlink.errors import AuthenticationError, ClosedError, NameInUseError, PeerUnknownError, TensorLinkError
from tensorlink.lifecycle import Action, Fire
from tensorlink.settings import Settings
from tests.control.control_processes import Member, environment, eventually

Start = Callable[..., Member]


LONG_S = 120.0
"""A lease that no test outlasts: these clients send no heartbeats."""


@pytest.fixture
def joiner(run_dir: Path) -> Iterator[Callable[..., ControlClient]]:
    """Clients in this process, joined."""
    clients: list[ControlClient] = []

    def join(name: str, **options: object) -> ControlClient:
        options = {"address": "unix:/nowhere", **options}
        client = ControlClient(Settings(lease_s=LONG_S), name=name, **options)  # type: ignore[arg-type]
        clients.append(client)
        client.join(30)
        return client

    yield join
    for client in clients:
        client.leave()
        client.close()


def raw(run_dir: Path) -> grpc.Channel:
    return wire.channel(wire.unix_target(run_dir / "c-default.sock"))


METHODS = [
    *(f"/tensorlink.Coordinator/{name}" for name in ("Join", "Leave", "Resolve", "Find", "Advertise", "Watch")),
    *(
        f"/tensorlink.PeerService/{name}"
        for name in ("Hello", "Deliver", "Release", "Mailbox", "Ping", "Scratch", "Nonsense")
    ),
]


class Silent:
    """Handlers that take everything."""

    def hello(self, hello: object) -> dict[str, bytes]:
        return {}

    def deliver(self, *_: object) -> bytes:
        return b""

    def release(self, *_: object) -> None:
        return None

    def mailbox(self, source: object, box: object) -> None:
        return None

    def scratch(self, *_: object) -> bytes:
        return b""


@pytest.mark.parametrize("method", METHODS)
def test_random_bytes_are_refused_and_harm_nothing(member: Start, run_dir: Path, method: str) -> None:
    # In a process of its own: a server whose gRPC could not read a request keeps threads of gRPC alive.
    a = member("a")
    a.joined()
    [info] = list_peers(Settings.load(), 5)
    target = wire.unix_target(run_dir / "c-default.sock") if "Coordinator" in method else info.address
    noise = random.Random(method)
    with wire.channel(target) as channel:
        call = channel.unary_unary(method)
        for _ in range(100):
            request = noise.randbytes(noise.randrange(64))
            try:
                call(request, timeout=0.05 if method.endswith(("Resolve", "Find", "Watch", "Mailbox")) else 5)
            except grpc.RpcError as error:
                assert error.code() is not grpc.StatusCode.UNAVAILABLE, error.details()
    assert a.call("peers")[:1] == ["a"]
    assert [peer.name for peer in list_peers(Settings.load(), 5)][:1] == ["a"]


@pytest.mark.parametrize(
    "request_, message",
    [
        (pb.JoinRequest(version=99, peer=pb.Peer(name="b", address="x"), nonce=bytes(16)), "version 99"),
        (pb.JoinRequest(version=1, peer=pb.Peer(name="", address="x"), nonce=bytes(16)), "name"),
        (pb.JoinRequest(version=1, peer=pb.Peer(name="b" * 300, address="x"), nonce=bytes(16)), "name"),
        (pb.JoinRequest(version=1, peer=pb.Peer(name="b\n", address="x"), nonce=bytes(16)), "name"),
        (pb.JoinRequest(version=1, peer=pb.Peer(name="b", address="x"), nonce=b"short"), "nonce"),
        (pb.JoinRequest(version=1, peer=pb.Peer(name="b", address="x", incarnation=2**63), nonce=bytes(16)), "range"),
        (
            pb.JoinRequest(version=1, peer=pb.Peer(name="b", address="x"), nonce=bytes(16), known={"a": 2**64 - 1}),
            "range",
        ),
    ],
)
def test_bad_joins(joiner: Callable[..., ControlClient], run_dir: Path, request_: pb.JoinRequest, message: str) -> None:
    joiner("a")
    with raw(run_dir) as channel:
        join = channel.unary_unary("/tensorlink.Coordinator/Join", pb.JoinRequest.SerializeToString)
        with pytest.raises(grpc.RpcError, match=message):
            join(request_, timeout=5, metadata=wire.token_metadata(None))


def test_unknown_fields_are_ignored(joiner: Callable[..., ControlClient], run_dir: Path) -> None:
    client = joiner("a")
    with raw(run_dir) as channel:
        resolve = channel.unary_unary("/tensorlink.Coordinator/Resolve", None, pb.Peer.FromString)
        request = pb.ResolveRequest(name="a").SerializeToString() + b"\xfa\x7f\x03new"
        assert resolve(request, timeout=5, metadata=wire.token_metadata(None)).name == client.name


def test_waits_end_with_the_answer_or_the_deadline(joiner: Callable[..., ControlClient]) -> None:
    a = joiner("trainer")
    with pytest.raises(PeerUnknownError, match="Near names: trainer"):
        a.resolve("trainr", 0.1)
    with pytest.raises(PeerUnknownError):
        a.find("weights/policy", 0.1)
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(a.find("weights/policy", 20).name))
    waiting.start()
    server = PeerServer(Silent(), name="late")
    b = joiner("late", address=server.address)
    b.advertise("weights/policy")
    waiting.join(20)
    assert found == ["late"]
    with pytest.raises(NameInUseError, match="late"):
        joiner("other").advertise("weights/policy", 20)
    with pytest.raises(NameInUseError, match="late"):
        joiner("late")
    server.close()
    b.close()
    with pytest.raises(ClosedError):
        b.resolve("trainer", 1)


def test_events_come_in_order_from_one_thread(joiner: Callable[..., ControlClient]) -> None:
    seen: list[tuple[str, str, str]] = []

    def hear(actions: list[Action]) -> None:
        hooks = [action for action in actions if isinstance(action, Fire)]
        seen.extend((fire.hook, fire.info.name, threading.current_thread().name) for fire in hooks)

    joiner("w", act=hear)
    for _ in range(3):
        one = joiner("a")
        one.leave()
        one.close()
    eventually(lambda: len(seen) == 6, "all events came")
    kinds = [kind for kind, _, _ in seen]
    assert kinds == ["peer_up", "peer_down", "peer_restart", "peer_down", "peer_restart", "peer_down"]
    assert {name for _, name, _ in seen} == {"a"} and len({thread for _, _, thread in seen}) == 1


def test_a_slow_watcher_holds_nobody_up_and_catches_up(joiner: Callable[..., ControlClient]) -> None:
    gate = threading.Event()
    slow = joiner("slow", act=lambda _: gate.wait(30) and None)
    busy = joiner("busy")
    for i in range(1500):
        busy.advertise(f"s{i % 7}")
        busy.withdraw(f"s{i % 7}")
    busy.advertise("last")
    gate.set()
    eventually(lambda: getattr(slow.known("busy"), "services", ()) == ("last",), "it caught up")


@pytest.fixture
def tcp(run_dir: Path) -> Iterator[str]:
    """Address of a coordinator on TCP with the token `secret`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorlink.cli", "coordinator", "--listen", "127.0.0.1:0", "--lease", "1"],
        env=environment(TENSORLINK_TOKEN="secret"),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process.stdout.readline().split()[2].rstrip(",")
    process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()


def test_tcp(member: Start, tcp: str) -> None:
    extra = {"TENSORLINK_COORDINATOR": tcp, "TENSORLINK_TOKEN": "secret"}
    a, b = member("a", **extra), member("b", **extra)
    first = a.joined()
    b.joined()
    assert b.call("resolve", "a", 20)["incarnation"] == first
    a.kill()
    assert "heartbeat" in b.wait(event="down", name="a")["reason"]
    assert member("a", **extra).joined() > first
    b.wait(event="restart", name="a")
    assert (
        member("c", TENSORLINK_COORDINATOR=tcp, TENSORLINK_TOKEN="x").wait(error=...)["error"] == "AuthenticationError"
    )
    with pytest.raises(AuthenticationError, match="token"):
        list_peers(Settings(coordinator=tcp), 5)


def test_a_hundred_peers_in_one_process_and_clean_leaves(joiner: Callable[..., ControlClient]) -> None:
    clients = [joiner(f"p{i}") for i in range(100)]
    eventually(lambda: len(clients[0].peers()) == 100, "all are seen")
    for client in clients[1:]:
        client.leave()
    eventually(lambda: [peer.name for peer in clients[0].peers()] == ["p0"], "all left")


def test_close_while_the_coordinator_is_away(run_dir: Path) -> None:
    client = ControlClient(Settings(coordinator=f"unix:{run_dir}/none.sock"), name="a", address="unix:/nowhere")
    with pytest.raises(TensorLinkError):
        client.join(0.3)
    client.close()
