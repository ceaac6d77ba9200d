"""Hosts are apart: nothing but the network is between them, and it can be slow or cut."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tensorlink.control.runtime_dir import host_identity, runtime_dir
from tests.hosts import Host, Network, hosts, networks
from tests.peer import DEADLINE_S, Nursery, kept, nursery

__all__ = ["hosts", "networks", "nursery"]

MIB = 1 << 20


@pytest.fixture(scope="module")
def network(networks: Callable[[int], Network]) -> Network:
    return networks(2)


# What the processes do


def listen(ip: str) -> int:
    kept["listener"] = socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)
    kept["listener"].settimeout(DEADLINE_S)
    return int(kept["listener"].getsockname()[1])


def connect(ip: str, port: int) -> None:
    kept["connection"] = socket.create_connection((ip, port), DEADLINE_S)


def accept() -> None:
    kept["connection"] = kept["listener"].accept()[0]
    kept["connection"].settimeout(DEADLINE_S)
    kept.pop("listener").close()


def send(data: bytes) -> None:
    kept["connection"].sendall(data)


def receive(nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        data += kept["connection"].recv(nbytes - len(data)) or b"the end"
    return bytes(data)


def comes_within(seconds: float) -> bool:
    return bool(select.select([kept["connection"]], [], [], seconds)[0])


def congestion_control() -> str:
    name: bytes = kept["connection"].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0").decode()


def hang_up() -> None:
    kept.pop("connection").close()


def place_things(text: str) -> None:
    for path in (Path("/tmp/file"), runtime_dir() / "file", Path("/dev/shm/file")):
        path.write_text(text)


def things() -> list[str]:
    return [
        path.read_text() for path in (Path("/tmp/file"), runtime_dir() / "file", Path("/dev/shm/file")) if path.exists()
    ]


def devices() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def join_up(one: Host, other: Host, ip: str) -> None:
    port = other.peer.call(listen, ip)
    one.peer.call(connect, ip, port)
    other.peer.call(accept)


# Tests


@pytest.mark.parametrize("kind", ["ip", "ip6"])
def test_hosts_talk(network: Network, kind: str) -> None:
    one, other = network.hosts
    before = one.sent_bytes(), other.received_bytes()
    join_up(one, other, getattr(other, kind))
    one.peer.call(send, b"ping" * 1000)
    assert other.peer.call(receive, 4000) == b"ping" * 1000
    other.peer.call(send, b"pong")
    assert one.peer.call(receive, 4) == b"pong"
    for host in (one, other):
        host.peer.call(hang_up)
    assert one.sent_bytes() - before[0] >= 4000
    assert other.received_bytes() - before[1] >= 4000


def test_processes_of_a_host_share_what_hosts_do_not(network: Network) -> None:
    one, other = network.hosts
    sibling = one.spawn()
    assert sibling.call(host_identity) == one.peer.call(host_identity)
    assert len({host_identity(), one.peer.call(host_identity), other.peer.call(host_identity)}) == 3
    one.peer.call(place_things, "mine")
    assert sibling.call(things) == ["mine"] * 3
    assert other.peer.call(things) == []
    port = one.peer.call(listen, "127.0.0.1")
    with pytest.raises(ConnectionRefusedError):
        other.peer.call(connect, "127.0.0.1", port)
    sibling.call(connect, "127.0.0.1", port)
    one.peer.call(accept)
    assert sibling.call(devices) == ["eth0", "lo"]
    for peer in (one.peer, sibling):
        peer.call(hang_up)


def test_a_host_outlives_its_processes(hosts: Callable[[int], list[Host]]) -> None:
    (host,) = hosts(1)
    identity = host.peer.call(host_identity)
    host.peer.kill()
    assert host.spawn().call(host_identity) == identity


def test_a_command_runs_in_a_host(network: Network) -> None:
    host = network.hosts[1]
    code = "import socket; from tensorlink.control.runtime_dir import *; print(host_identity(), runtime_dir())"
    command = host.command(sys.executable, "-c", code)
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout.split()
    assert said == [host.peer.call(host_identity), str(host.peer.call(runtime_dir))]


def test_a_limit_shows(network: Network) -> None:
    one, other = network.hosts
    one.limit(100e6)
    join_up(one, other, other.ip)
    for source, sink in ((one, other), (other, one)):
        begin = time.monotonic()
        source.peer.start(send, bytes(4 * MIB))
        sink.peer.call(receive, 4 * MIB)
        assert time.monotonic() - begin > 0.2  # 0.34 s less a burst
        source.peer.finish()
    one.limit(None)
    begin = time.monotonic()
    one.peer.start(send, bytes(96 * MIB))
    other.peer.call(receive, 96 * MIB)
    assert time.monotonic() - begin < 7.5  # 8 s if it were limited, and far less otherwise, on a busy machine too
    one.peer.finish()
    for host in (one, other):
        host.peer.call(hang_up)


@pytest.mark.parametrize("kind", ["ip", "ip6"])
def test_a_cut_link_passes_nothing_until_it_is_up(network: Network, kind: str) -> None:
    one, other = network.hosts
    join_up(one, other, getattr(other, kind))
    one.down()
    one.peer.call(send, b"late")
    assert not other.peer.call(comes_within, 0.3)
    one.up()
    assert other.peer.call(receive, 4) == b"late"
    for host in (one, other):
        host.peer.call(hang_up)


@pytest.mark.parametrize("kind", ["ip", "ip6"])
def test_congestion_control(network: Network, kind: str) -> None:
    one, other = network.hosts
    one.congestion_control("reno")
    join_up(one, other, getattr(other, kind))
    assert one.peer.call(congestion_control) == "reno"
    for host in (one, other):
        host.peer.call(hang_up)


def outside() -> list[str]:
    links = subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    return [links.stdout, Path("/proc/mounts").read_text(), *things()]


def held() -> set[int]:
    """The namespaces of all processes."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/*"):
        with suppress(OSError):  # it has ended
            found.add(path.stat().st_ino)
    return found


def test_nothing_is_left(nursery: Nursery, hosts: Callable[[int], list[Host]]) -> None:
    hosts(0)  # skips where it isn't allowed
    before = outside()
    network = Network(nursery)
    host = network.host()
    host.peer.call(place_things, "mine")
    namespaces = [Path(path).stat().st_ino for path in (network.switch, *host.namespaces)]
    assert held().issuperset(namespaces)
    network.close()
    network.close()
    assert held().isdisjoint(namespaces)
    assert outside() == before
