"""Peers that listen for other hosts: where, at which ports, and by which of their addresses they are called."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tensorlink as tl
from tensorlink import _core, network
from tensorlink.control import ControlClient, PeerClient, PeerServer, engine_socket, list_peers, listen_address
from tensorlink.control.addresses import route_to
from tensorlink.errors import AuthenticationError, NameInUseError, PeerLostError, TransferTimeoutError, TransportError
from tensorlink.settings import Settings
from tensorlink.types import PeerId
from tests.control.control_member import Handlers
from tests.control.control_processes import environment, eventually
from tests.peer import Peer, nursery, spawn
from tests.test_network import needs_ipv6, taken

__all__ = ["nursery", "spawn"]

pytestmark = pytest.mark.usefixtures("nursery")  # from the first test on: what starts later is taken for left behind

ME = PeerId("a", 7)
TOKEN = {"TENSORLINK_TOKEN": "secret"}
HOSTS = ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"coordinator": "10.0.0.1:4000"}, None),
        ({"token": "secret"}, "127.0.0.1"),
        ({"token": "secret", "coordinator": "unix:/run/c.sock"}, "127.0.0.1"),
        ({"token": "secret", "coordinator": "127.0.0.2:4000"}, "127.0.0.1"),
        pytest.param({"token": "secret", "coordinator": "[::1]:4000"}, "::1", marks=needs_ipv6),
        ({"token": "secret", "interface": "127.0.0.2", "coordinator": "10.0.0.1:4000"}, "127.0.0.2"),
        ({"token": "secret", "interface": "lo"}, "127.0.0.1"),
    ],
    ids=str,
)
def test_where_a_peer_listens(fields: dict[str, str], expected: str | None) -> None:
    assert listen_address(Settings(**fields)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({"interface": "lo", "coordinator": "10.0.0.1:4000"}, True),
        ({"interface": "lo", "coordinator": "localhost:4000"}, False),
        ({"interface": "lo", "coordinator": "unix:/run/c.sock"}, False),
        ({"interface": "lo"}, False),
    ],
    ids=str,
)
def test_loopback_under_a_coordinator_that_others_reach_is_warned_of(
    fields: dict[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert listen_address(Settings(token="secret", **fields)) == "127.0.0.1"  # type: ignore[arg-type]
    assert ("TENSORLINK_INTERFACE=lo" in caplog.text) == warned


def test_where_a_peer_cannot_listen(run_dir: Path) -> None:
    with pytest.raises(AuthenticationError, match="TENSORLINK_TOKEN"):
        tl.init("a", interface="lo")
    with pytest.raises(ValueError, match="TENSORLINK_INTERFACE: .*'nosuch0'.*there are.*lo: 127"):
        tl.init("a", interface="nosuch0", token="secret")
    with pytest.raises(PeerLostError, match=r"coordinator.*nosuch\.invalid:4000.*TENSORLINK_COORDINATOR"):
        tl.init("a", coordinator="nosuch.invalid:4000", token="secret", timeout=0.01)
    with pytest.raises(AuthenticationError, match="TENSORLINK_TOKEN"):
        PeerServer(Handlers(), name="b", listen="127.0.0.1")
    held, ports = taken("127.0.0.1", 2)
    for start in (
        lambda: PeerServer(Handlers(), name="b", token="secret", listen="127.0.0.1", ports=ports),
        lambda: tl.init("a", token="secret", ports=ports),
    ):
        with pytest.raises(TransportError, match=f"every port of {ports} is taken"):
            start()
    for one in held:
        one.close()
    assert list(run_dir.iterdir()) == []


@pytest.fixture(params=HOSTS)
def server(request: pytest.FixtureRequest, run_dir: Path) -> Iterator[PeerServer]:
    server = PeerServer(Handlers(), name="b", token="secret", listen=request.param)
    server.incarnation = 9
    yield server
    server.close()


def test_calls_by_tcp(server: PeerServer) -> None:
    near, far = server.address.split(",")
    assert near.startswith("unix:/") and network.split_address(far)[1] > 0
    for address in (server.address, near, far):
        client = PeerClient(address, peer="b", me=ME, token="secret")
        assert client.hello({}, 10).peer == PeerId("b", 9)
        assert client.deliver(1, "", b"abc", 10) == b""
        client.close()
    for token in (None, "wrong"):
        client = PeerClient(far, peer="b", me=ME, token=token)
        with pytest.raises(AuthenticationError, match="TENSORLINK_TOKEN"):
            client.hello({}, 10)
        client.close()


def test_the_nearest_that_answers_is_called(server: PeerServer) -> None:
    near, far = server.address.split(",")
    assert route_to(server.address).target == near
    os.unlink(near.removeprefix("unix:"))
    assert route_to(server.address).target == far
    client = PeerClient(server.address, peer="b", me=ME, token="secret")
    assert client.ping(10) == PeerId("b", 9)
    client.close()


def test_an_error_names_each_address_that_was_tried(run_dir: Path) -> None:
    with network.listener("127.0.0.1") as silent:  # takes connections and says nothing
        far = network.join_address(*silent.getsockname())
        client = PeerClient(f"unix:/nowhere,{far}", peer="b", me=ME)
        with pytest.raises(TransferTimeoutError, match=rf"b at {far} \(unix:/nowhere: nobody.*TENSORLINK_INTERFACE"):
            client.ping(0.2)
        client.close()
    client = PeerClient(f"unix:/nowhere,{far}", peer="b", me=ME)
    with pytest.raises(PeerLostError, match=rf"b at {far} \(unix:/nowhere: nobody.*refused.*TENSORLINK_INTERFACE"):
        client.ping(10)
    client.close()
    for address in ("", "unix:/nowhere", "unix:/nowhere,nonsense", "dns:host", "host:80", "127.0.0.1:0"):
        client = PeerClient(address, peer="b", me=ME)
        for call in (lambda c=client: c.ping(10), lambda c=client: c.mailbox("shm")):
            with pytest.raises(PeerLostError, match="b cannot be reached.*listens nowhere else"):
                call()
        client.close()


@pytest.fixture
def coordinator(run_dir: Path) -> Iterator[Callable[..., str]]:
    """Starts a coordinator that listens on TCP, with the token `secret`; its address."""
    processes = []

    def start(listen: str, **extra: str) -> str:
        process = subprocess.Popen(
            [sys.executable, "-m", "tensorlink.cli", "coordinator", "--listen", listen, "--lease", "1"],
            env=environment(**TOKEN, **extra),
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout is not None
        return process.stdout.readline().split()[2].rstrip(",")

    yield start
    for process in processes:
        process.terminate()
        assert process.wait(20) == 0
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize(
    ("listen", "dialled"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost"),
        pytest.param("[::1]", "[::1]", marks=needs_ipv6),
        pytest.param("[::]", "[::1]", marks=needs_ipv6),
        pytest.param("[::]", "127.0.0.1", marks=needs_ipv6),
        pytest.param("0.0.0.0", "localhost", marks=needs_ipv6),
    ],
)
def test_where_a_coordinator_listens_and_takes_heartbeats(
    coordinator: Callable[..., str], listen: str, dialled: str
) -> None:
    held, ports = taken("127.0.0.1", 2)
    first = int(ports.partition("-")[0])
    for one in held:
        one.close()
    listening = coordinator(f"{listen}:{first}", TENSORLINK_PORTS=ports)
    assert network.split_address(listening)[1] == first
    settings = Settings(coordinator=f"{dialled}:{first}", token="secret")
    client = ControlClient(settings, name="a", address="unix:/nowhere")
    host, port = network.split_address(client.join(20).heartbeat_address)
    assert network.is_ip(host) and port == first + 1
    assert [peer.name for peer in list_peers(settings, 10)] == ["a"]
    client.leave()
    client.close()


def test_a_coordinator_that_is_not_there_is_named() -> None:
    with network.listener("127.0.0.1") as silent:
        address = network.join_address(*silent.getsockname())
        with pytest.raises(TransferTimeoutError, match=f"the coordinator at {address}"):
            list_peers(Settings(coordinator=address, token="secret"), 0.2)
    with pytest.raises(PeerLostError, match=f"the coordinator at {address} cannot be reached"):
        tl.init("a", coordinator=address, token="secret", timeout=0.2)


BEATING, UNREACHABLE = 2, 4


@pytest.mark.parametrize("host", HOSTS)
def test_heartbeats_notice_a_host_that_says_nothing_any_more(run_dir: Path, host: str) -> None:
    engine = _core.Engine("a", str(engine_socket()), bytes(16), 1 << 20)
    engine.start(1)
    with network.listener(host) as listener:
        engine.heartbeat(network.join_address(host, listener.getsockname()[1]), bytes(16), 0.02)
        streams = []
        for _ in range(2):  # it comes back
            streams.append(listener.accept()[0])
            assert len(streams[-1].recv(16)) == 16
            streams[-1].sendall(bytes(1))
            for state in (BEATING, UNREACHABLE):
                eventually(lambda state=state: engine.heartbeat_state() == state, f"it is in state {state}", 10)
    for stream in streams:
        stream.close()
    engine.close()


def join(name: str, **settings: str) -> str:
    tl.init(name, timeout=20, **settings)
    return next(peer.address for peer in tl.peers() if peer.name == name)


def send(data: bytes, to: str) -> None:
    tl.send(data, to)


def receive(source: str) -> object:
    return tl.recv(source)


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=needs_ipv6)])
def test_two_endpoints_that_share_no_socket(
    coordinator: Callable[..., str], spawn: Callable[..., Peer], run_dir: Path, host: str
) -> None:
    """Each has a run-time directory of its own, and no unix socket of it is there for the other or the coordinator."""
    at = coordinator(f"{host}:0")
    peers = {}
    for name in "ab":
        base = run_dir.parent / name
        base.mkdir()
        peers[name] = spawn(XDG_RUNTIME_DIR=str(base), TENSORLINK_COORDINATOR=at, TENSORLINK_CONTROL="grpc", **TOKEN)
        near, far = peers[name].call(join, name).split(",")
        assert near.startswith(f"unix:{base}/") and far.startswith(f"{host}:")
        os.unlink(near.removeprefix("unix:"))
    for source, to in (("a", "b"), ("b", "a")):
        peers[source].call(send, source.encode(), to)
        assert peers[to].call(receive, source) == source.encode()
    with pytest.raises(NameInUseError):
        tl.init("a", coordinator=at, token="secret", timeout=20)
    for settings in ({"coordinator": at, "token": "wrong"}, {"coordinator": at}):
        with pytest.raises(AuthenticationError):
            tl.init("c", timeout=20, **settings)  # type: ignore[arg-type]
    for peer in peers.values():
        peer.call(tl.shutdown)
