"""What the doctor compares of this process and a peer: release, clock, MTU, large packets."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent import futures
from importlib.metadata import version
from pathlib import Path

import grpc
import pytest

import tensorlink as tl
from tensorlink.control import PeerClient, PeerServer, wire
from tensorlink.control import control_pb2 as pb
from tensorlink.control import control_pb2_grpc as pb_grpc
from tensorlink.doctor import pair, peer
from tensorlink.doctor.finding import Finding, worst
from tensorlink.errors import TransferTimeoutError
from tensorlink.settings import Settings
from tensorlink.types import PeerId
from tests.cluster import Cluster, cluster, networks
from tests.hosts import Host
from tests.peer import nursery

__all__ = ["cluster", "networks", "nursery"]

pytestmark = pytest.mark.usefixtures("nursery")

SECOND = 1_000_000


@pytest.mark.parametrize(
    "there, verdict, says", [("0.1.0", "ok", "0.1.0"), ("0.2.0", "warn", "0.2.0"), ("", "warn", "an older one")]
)
def test_release(there: str, verdict: str, says: str) -> None:
    found = pair.release("b", "0.1.0", there)
    assert found.verdict == verdict and found.reason.startswith(says)
    assert found.mend == (None if verdict == "ok" else "pip install tensorlink==0.1.0, where b runs")


def test_the_release_is_the_one_that_is_installed() -> None:
    assert tl.__version__ == version("tensorlink")


@pytest.mark.parametrize(
    "ahead, round_trip, verdict",
    [
        (0, 200, "ok"),
        (SECOND, 200, "ok"),
        (-3 * SECOND, 200, "warn"),
        (3 * SECOND, 200, "warn"),
        (3 * SECOND, 6 * SECOND, "ok"),  # a slow answer proves nothing
    ],
)
def test_clock(ahead: int, round_trip: int, verdict: str) -> None:
    sent = 1_800_000_000 * SECOND
    found = pair.clock("b", sent, sent + round_trip // 2 + ahead, sent + round_trip)
    assert found.verdict == verdict and bool(found.mend) == (verdict == "warn")
    assert ("behind" if ahead <= 0 else "ahead") in found.reason


def test_a_clock_that_is_not_told() -> None:
    assert pair.clock("b", SECOND, 0, SECOND).verdict == "note"


@pytest.mark.parametrize(
    "here, there, verdict, where",
    [
        (1500, 1500, "ok", ""),
        (9000, 1500, "warn", "mtu 9000, there"),
        (1500, 9000, "warn", "mtu 9000, here"),
        (1500, 0, "note", ""),
    ],
)
def test_mtu(here: int, there: int, verdict: str, where: str) -> None:
    found = pair.mtu("b", here, there)
    assert found.verdict == verdict and where in (found.mend or "")


def test_large_packets() -> None:
    def lost() -> None:
        raise TransferTimeoutError("no answer from b before the deadline")

    assert pair.large_packets("b", lambda: None).verdict == "ok"
    found = pair.large_packets("b", lost)
    assert found.verdict == "fail" and found.mend and "mtu" in found.mend


class Old(pb_grpc.PeerServiceServicer):
    """A peer of a release that told nothing but who it is, and read nothing in a ping."""

    def Ping(self, request: pb.PingRequest, context: grpc.ServicerContext) -> pb.PingReply:
        return pb.PingReply(name="b", incarnation=9)


@pytest.fixture
def old(runtime_dir: Path) -> Iterator[PeerClient]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    pb_grpc.add_PeerServiceServicer_to_server(Old(), server)  # type: ignore[no-untyped-call]
    address = wire.unix_target(runtime_dir / "old.sock")
    server.add_insecure_port(address)
    server.start()
    client = PeerClient(address, peer="b", me=PeerId("a", 1))
    yield client
    client.close()
    server.stop(None).wait()


def test_a_peer_of_an_older_release(old: PeerClient) -> None:
    assert old.ping(10) == PeerId("b", 9)
    found = list(pair.compared(old, "b", "unix:/old", False, 10))
    assert [one.verdict for one in found] == ["warn", "note"]


def test_an_older_peer_reads_a_ping_of_ours() -> None:
    pb.Empty.FromString(pb.PingRequest(padding=b"1").SerializeToString())
    assert pb.PingReply.FromString(pb.Empty().SerializeToString()).release == ""


def test_what_comes_back(runtime_dir: Path) -> None:
    server = PeerServer(None, name="b", token="t", listen="127.0.0.1")  # type: ignore[arg-type]  # nothing but pings
    client = PeerClient(server.address.partition(",")[2], peer="b", me=PeerId("a", 1), token="t")
    try:
        told = client.about(10, 3 << 20)
        reply = client._call("Ping", pb.PingRequest(padding=bytes(3 << 20)), 10)
    finally:
        client.close()
        server.close()
    assert (told.release, told.mtu) == (tl.__version__, 65536) and len(reply.padding) == 64 << 10


def ways(name: str, timeout: float) -> list[Finding]:
    return list(peer.reached(name, Settings.load(), timeout))


def link(host: Host, *command: str) -> None:
    subprocess.run(host.command("ip", *command), check=True, capture_output=True)


def test_two_hosts(cluster: Cluster) -> None:
    there, here = cluster.peer(1, "b"), cluster.process(0)
    near, far = cluster.network.hosts

    def look(timeout: float = 10.0) -> dict[str, Finding]:
        return {one.check: one for one in here.call(ways, "b", timeout)}

    alike = look()
    assert worst(alike.values()) == "note", alike
    assert [alike[check].verdict for check in ("release of b", "clock of b", "MTU of b", "large packets to b")] == [
        "ok"
    ] * 4
    link(far, "link", "set", "eth0", "mtu", "1300")
    smaller = look()
    assert smaller["MTU of b"].verdict == "warn" and "1300 there and 1500 here" in smaller["MTU of b"].reason
    assert smaller["large packets to b"].verdict == "ok"  # TCP knows
    # Now it doesn't: b says that it takes 1500 bytes, and what is larger than 1300 is dropped on the way.
    link(far, "route", "replace", f"{near.ip}/32", "dev", "eth0", "advmss", "1460")
    link(near, "link", "set", "eth0", "gso_max_segs", "1")
    lossy = look(3.0)
    assert lossy["control of b"].verdict == "ok" and lossy["large packets to b"].verdict == "fail"
    there.close()
    here.close()
