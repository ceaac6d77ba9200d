"""Hosts to test with: network namespaces on a switch, each with files, a boot id and a run-time directory of its own.

A `Network` has one process that holds all namespaces open, so they go with it, also when it is killed. Processes of one
host share memory and meet in its directory; those of two have nothing but the network between them. (They share
process numbers, which real hosts don't.) It takes root and `ip`, `tc` and `nsenter`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.peer import DEADLINE_S, ROOT, Nursery, Peer, nursery

__all__ = ["Host", "Network", "hosts", "networks", "nursery"]

CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 0x1000, 0x2000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1
RUNTIME_DIR = "/tmp/run"
SUBNET, SUBNET6 = "10.77.0.{}", "fd00:77::{:x}"
SHORTEST_BURST, BURST_S, LATENCY_MS = 256 << 10, 0.002, 50

_libc = ctypes.CDLL(None, use_errno=True)


class Host:
    """One host of a network. `peer` is its first process."""

    def __init__(self, network: Network, number: int, namespaces: Sequence[int]) -> None:
        self.ip, self.ip6 = SUBNET.format(number), SUBNET6.format(number)
        self._network, self._port = network, f"port{number}"
        self._net, self._mnt = self.namespaces = [f"/proc/{network.pid}/fd/{fd}" for fd in namespaces]
        self.peer = self.spawn()

    def spawn(self, **environment: str) -> Peer:
        """Another process of this host, with these environment variables. It ends with the network at the latest."""
        peer = self._network.start(**{"XDG_RUNTIME_DIR": RUNTIME_DIR, "TMPDIR": "/tmp", **environment})
        peer.call(_enter, *self.namespaces)
        return peer

    def command(self, *command: str) -> list[str]:
        """What to give to `subprocess` so that the command runs in this host, in the root of the repository."""
        environment = ["env", f"--chdir={ROOT}", f"XDG_RUNTIME_DIR={RUNTIME_DIR}", "TMPDIR=/tmp"]
        return ["nsenter", f"--net={self._net}", f"--mount={self._mnt}", *environment, *command]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread makes meanwhile, and threads that it starts, are on this host. Files are not."""
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(self._net, os.O_RDONLY)
        try:
            _setns(there)
            yield
        finally:
            _setns(here)
            os.close(here)
            os.close(there)

    def limit(self, bits_per_s: float | None) -> None:
        """Bounds what passes over its link, each way; None lifts it. Bursts of 256 KiB or 2 ms pass at once."""
        shape = "noqueue"
        if bits_per_s is not None:
            burst = max(SHORTEST_BURST, int(bits_per_s / 8 * BURST_S))
            shape = f"tbf rate {int(bits_per_s)}bit burst {burst} latency {LATENCY_MS}ms"
        for where, device in ((self._net, "eth0"), (self._network.switch, self._port)):
            _run("nsenter", f"--net={where}", "tc", "qdisc", "replace", "dev", device, "root", *shape.split())

    def down(self) -> None:
        """Pulls its cable: it loses its carrier, the others hear nothing from it any more."""
        _run("nsenter", f"--net={self._network.switch}", "ip", "link", "set", self._port, "down")

    def up(self) -> None:
        _run("nsenter", f"--net={self._network.switch}", "ip", "link", "set", self._port, "up")

    def sent_bytes(self) -> int:
        """By all its processes, to other hosts, with all headers; what the limit has dropped doesn't count."""
        return self._network.counters(self._port)[0]

    def received_bytes(self) -> int:
        return self._network.counters(self._port)[8]

    def congestion_control(self, name: str) -> None:
        """Of connections made from now on, and over those that this host sends: "cubic", "reno" or "bbr".

        A property of its routes, since a namespace may not choose the default among what the machine restricts.
        """
        route = f"dev eth0 proto kernel congctl {name}"
        _ip(f"route replace {SUBNET.format(0)}/24 {route} scope link src {self.ip}", inside=self._net)
        _ip(f"route replace {SUBNET6.format(0)}/64 {route} metric 256", inside=self._net)


class Network:
    """A switch, and the hosts that are plugged into it.

    Raises:
        OSError: it isn't allowed here, or something that it takes is missing.
    """

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._peers: list[Peer] = []
        self.hosts: list[Host] = []
        self._holder = self.start()
        self.pid = self._holder.pid
        self.switch = f"/proc/{self.pid}/ns/net"
        try:
            self._holder.call(_make_switch)
        except BaseException:
            self.close()
            raise

    def start(self, **environment: str) -> Peer:
        self._peers.append(self._nursery.start(**environment))
        return self._peers[-1]

    def host(self) -> Host:
        """One more."""
        number = len(self.hosts) + 1
        self.hosts.append(Host(self, number, self._holder.call(_make_host, number)))
        return self.hosts[-1]

    def counters(self, device: str) -> list[int]:
        """A line of the switch's /proc/net/dev: from 0 what came in, from 8 what went out; bytes first."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        (values,) = (line.partition(":")[2] for line in lines if line.strip().startswith(f"{device}:"))
        return list(map(int, values.split()))

    def close(self) -> None:
        """Kills every process. Idempotent."""
        for peer in reversed(self._peers):
            peer.close()


@pytest.fixture(scope="module")
def networks(nursery: Nursery) -> Iterator[Callable[[int], Network]]:
    """`networks(2)` makes a network of two hosts, which lasts as long as the module. Skips where that isn't allowed."""
    with _networks(nursery) as make:
        yield make


@pytest.fixture
def hosts(nursery: Nursery) -> Iterator[Callable[[int], list[Host]]]:
    """`one, other = hosts(2)`: hosts that end with the test. Skips where that isn't allowed."""
    with _networks(nursery) as make:
        yield lambda size: make(size).hosts


@contextlib.contextmanager
def _networks(nursery: Nursery) -> Iterator[Callable[[int], Network]]:
    made: list[Network] = []

    def make(size: int) -> Network:
        if missing := [tool for tool in ("ip", "tc", "nsenter") if not shutil.which(tool)]:
            pytest.skip(f"no hosts without {missing}")
        try:
            network = Network(nursery)
        except OSError as error:
            pytest.skip(f"no hosts here: {error}")
        made.append(network)
        for _ in range(size):
            network.host()
        return network

    yield make
    for network in made:
        network.close()


# What the processes do


def _make_switch() -> None:
    _unshare(CLONE_NEWNET)
    _ip("link add switch type bridge mcast_snooping 0", "link set switch up")


def _make_host(number: int) -> tuple[int, int]:
    """Makes the namespaces and comes back. The caller keeps them alive, by these descriptors."""
    outside = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "mnt")]
    _unshare(CLONE_NEWNET | CLONE_NEWNS)
    try:
        _privatize()
        net, mnt = (os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "mnt"))
    finally:
        for fd in outside:
            _setns(fd)
            os.close(fd)
    name = f"/proc/{os.getpid()}/fd/{net}"
    port = f"port{number}"
    _ip(
        f"link add {port} type veth peer name eth0 netns {name}",
        f"link set {port} master switch up",
    )
    _ip(
        "link set lo up",
        "link set eth0 up",
        f"addr add {SUBNET.format(number)}/24 dev eth0",
        f"addr add {SUBNET6.format(number)}/64 dev eth0 nodad",
        inside=name,
    )
    return net, mnt


def _privatize() -> None:
    """Mounts what a host has for itself, as seen by its processes alone."""
    _mount("none", "/", flags=MS_REC | MS_PRIVATE)
    kept = [place for place in (ROOT, Path(sys.prefix)) if place.is_relative_to("/tmp")] + [Path("/sys/fs/cgroup")]
    opened = [os.open(place, os.O_PATH) for place in kept]
    for kind, folder in (("tmpfs", "/tmp"), ("tmpfs", "/dev/shm"), ("sysfs", "/sys")):  # the last for /sys/class/net
        _mount(kind, folder, kind=kind)
    for place, fd in zip(kept, opened, strict=True):
        place.mkdir(parents=True, exist_ok=True)
        _mount(f"/proc/self/fd/{fd}", str(place), flags=MS_BIND | MS_REC)
        os.close(fd)
    os.mkdir(RUNTIME_DIR, 0o700)
    identity = Path("/tmp/boot_id")
    identity.write_text(f"{uuid.uuid4()}\n")
    _mount(str(identity), "/proc/sys/kernel/random/boot_id", flags=MS_BIND)


def _enter(*namespaces: str) -> None:
    """Moves this process, which has one thread, into a host. It doesn't outlive the tests, whatever it waits for."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for fd in [os.open(path, os.O_RDONLY) for path in namespaces]:
        _setns(fd)
        os.close(fd)
    os.chdir(ROOT)


def _unshare(flags: int) -> None:
    if _libc.unshare(flags):
        raise _error("unshare")


def _setns(fd: int) -> None:
    if _libc.setns(fd, 0):
        raise _error("setns")


def _mount(source: str, target: str, *, kind: str = "none", flags: int = 0) -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None):
        raise _error(f"mount {target}")


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)


def _ip(*commands: str, inside: str = "/proc/self/ns/net") -> None:
    _run("nsenter", f"--net={inside}", "ip", "-batch", "-", input="\n".join(commands))


def _run(*command: str, input: str = "") -> None:
    done = subprocess.run(command, input=input, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()} {input}")
