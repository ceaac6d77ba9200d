"""A coordinator behind a name that moves, one that is cut off, and two at once: peers on hosts of their own."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorlink as tl
from tensorlink.control import list_peers, serve
from tests.hosts import Host, Network, networks
from tests.peer import DEADLINE_S, Peer, eventually, kept, nursery, say

__all__ = ["networks", "nursery"]

LEASE_S = 0.8
TOKEN = "a secret of the tests"
PORT = 4000
NAME = f"coordinator.tensorlink.svc:{PORT}"
REPLACED = "it was replaced by a newer process of its name"
SOON_S = LEASE_S + 4.0
"""A lease, what a look-up and a dead address cost, and as much again for a busy machine."""


class Place:
    """Hosts 0 and 1 are for coordinators, behind a name that peers on 2 and 3 look up."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.hosts = network.hosts
        self._peers: list[Peer] = []
        self._lent: list[Host] = []

    def coordinator(self, host: int, *, clock_s: float = 0.0) -> Peer:
        """Another one; its clock is that much ahead."""
        started = self._spawn(host, TENSORLINK_LEASE_S=str(LEASE_S))
        started.start(_coordinate, f"0.0.0.0:{PORT}", clock_s)
        started.hear()
        return started

    def name(self, *coordinators: int) -> None:
        """What the name stands for from now on."""
        for host in self.hosts[2:]:
            host.peer.call(_call_it, [self.hosts[number].ip for number in coordinators])

    def peer(self, host: int, name: str, **environment: str) -> Peer:
        started = self._spawn(host, TENSORLINK_COORDINATOR=NAME, **environment)
        started.call(tl.init, name)
        return started

    def members(self, host: int) -> dict[str, int]:
        """As the coordinator on this host has them."""
        return dict(self.hosts[host].peer.call(_members))

    @contextlib.contextmanager
    def cut(self, one: int, other: int, *, one_way: bool = False) -> Iterator[None]:
        """Nothing passes between these two hosts meanwhile, or nothing from the one to the other."""
        ends = [(self.hosts[one], self.hosts[other].ip), (self.hosts[other], self.hosts[one].ip)][: 1 if one_way else 2]
        for change in ("add", "del"):
            for host, ip in ends:
                subprocess.run(host.command("ip", "route", change, "blackhole", f"{ip}/32"), check=True)
            if change == "add":
                yield

    def _spawn(self, host: int, **environment: str) -> Peer:
        self._peers.append(self.hosts[host].spawn(TENSORLINK_TOKEN=TOKEN, **environment))
        return self._peers[-1]

    def close(self) -> None:
        for peer in self._peers:
            peer.close()


@pytest.fixture(scope="module")
def network(networks: Callable[[int], Network]) -> Network:
    return networks(4)


@pytest.fixture
def place(network: Network) -> Iterator[Place]:
    made = Place(network)
    yield made
    made.close()


# What the processes do


def _coordinate(listen: str, clock_s: float) -> None:
    right = time.time_ns
    time.time_ns = lambda: right() + int(clock_s * 1e9)
    serve(tl.Settings.load(), listen, say)


def _call_it(addresses: list[str]) -> None:
    """The libraries of this host read the file for each look-up, as they would ask a server."""
    file = Path("/tmp/hosts")
    mounted = file.exists()
    file.write_text("".join(f"{address} {NAME.partition(':')[0]}\n" for address in addresses))
    if not mounted:
        subprocess.run(["mount", "--bind", file, "/etc/hosts"], check=True)


def _members() -> list[tuple[str, int]]:
    settings = tl.Settings(coordinator=f"127.0.0.1:{PORT}", token=TOKEN)
    return [(peer.name, peer.incarnation) for peer in list_peers(settings, 10)]


def me() -> tuple[str, int]:
    return tl.current().name, tl.current().id.incarnation


def known() -> dict[str, int]:
    return {peer.name: peer.incarnation for peer in tl.peers()}


def knows(expected: dict[str, int], timeout: float = SOON_S) -> None:
    eventually(lambda: known() == expected, f"{expected} are known, not {known()}", timeout)


def watch() -> None:
    for hook in ("peer_up", "peer_down", "peer_restart"):
        tl.on(hook, lambda peer, *why, hook=hook: kept.setdefault("hooks", []).append((hook, peer.name, *why)))


def hears(*hook: str) -> None:
    eventually(lambda: hook in [heard[:2] for heard in kept.get("hooks", [])], f"{hook} is heard", SOON_S)


def closed() -> bool:
    try:
        return tl.current().closed
    except tl.ClosedError:
        return True


def is_closed() -> None:
    eventually(closed, "it has closed")


def hooks() -> list[Any]:
    return list(kept.get("hooks", []))


class Talk:
    """Calls to another peer, one after the other, on a thread of its own."""

    def __init__(self, to: str) -> None:
        self.calls = 0
        self._go_on, self._failed = True, list[BaseException]()
        self._thread = threading.Thread(target=self._run, args=(to,), daemon=True)
        self._thread.start()

    def _run(self, to: str) -> None:
        try:
            while self._go_on:
                tl.send(self.calls, to, tag="call")
                assert tl.recv(to, tag="answer", timeout=DEADLINE_S) == self.calls
                self.calls += 1
        except BaseException as error:
            self._failed.append(error)

    def end(self) -> int:
        self._go_on = False
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive() and not self._failed, self._failed
        return self.calls


def talk(to: str) -> None:
    kept[f"talk {to}"] = Talk(to)


def calls(to: str) -> int:
    return int(kept[f"talk {to}"].calls)


def end_talk(to: str) -> int:
    return int(kept[f"talk {to}"].end())


def echo(source: str) -> None:
    """Sends back what comes, from now on."""

    def run() -> None:
        with contextlib.suppress(tl.TensorLinkError):
            while True:
                tl.send(tl.recv(source, tag="call", timeout=None), source, tag="answer")

    threading.Thread(target=run, daemon=True).start()


def pair(place: Place, hosts: tuple[int, int] = (2, 3)) -> tuple[Peer, Peer, dict[str, int]]:
    """Two peers on two hosts that talk to each other, and their incarnations."""
    a, b = place.peer(hosts[0], "a"), place.peer(hosts[1], "b")
    ids = dict([a.call(me), b.call(me)])
    for one in (a, b):
        one.call(knows, ids)
        one.call(watch)
    b.call(echo, "a")
    a.call(talk, "b")
    eventually(lambda: a.call(calls, "b") > 10, "they talk")
    return a, b, ids


def talks_on(a: Peer, to: str = "b") -> None:
    before = a.call(calls, to)
    eventually(lambda: a.call(calls, to) > before + 10, "they talk on")


def finish(*peers: Peer) -> None:
    for peer in peers:
        peer.call(tl.shutdown)


# Tests


@pytest.mark.parametrize("end", ["killed", "vanished"])
def test_a_coordinator_comes_back_at_another_address_of_its_name(place: Place, end: str) -> None:
    place.name(0)
    first = place.coordinator(0)
    a, b, ids = pair(place)
    if end == "killed":
        first.kill()
    else:
        place.hosts[0].down()
    place.name(0, 1)  # the old address is still told for a while
    place.coordinator(1)
    ended = time.monotonic()
    eventually(lambda: place.members(1) == ids, "both have joined again, as who they were", SOON_S)
    print(end, "rejoined after", time.monotonic() - ended)
    c = place.peer(2, "c")
    c.call(knows, ids | dict([c.call(me)]))
    talks_on(a)
    assert a.call(end_talk, "b") > 20
    assert a.call(hooks) == b.call(hooks) == [("peer_up", "c")]
    finish(a, b, c)
    place.hosts[0].up()


@pytest.mark.parametrize(("size", "restarts"), [(3, 8), pytest.param(8, 20, marks=pytest.mark.soak)])
def test_a_storm_of_restarts_costs_nobody_a_transfer(place: Place, size: int, restarts: int) -> None:
    place.name(0)
    coordinator = place.coordinator(0)
    peers = {f"p{number}": place.peer(2 + number % 2, f"p{number}") for number in range(size)}
    ids = dict(peer.call(me) for peer in peers.values())
    ring = [(peers[f"p{number}"], f"p{(number + 1) % size}") for number in range(size)]
    for peer in peers.values():
        peer.call(knows, ids)
        peer.call(watch)
    for peer, to in ring:
        peers[to].call(echo, peer.call(me)[0])
        peer.call(talk, to)
    with contextlib.ExitStack() as faults:
        for number in range(restarts):
            coordinator.kill()
            if number == 3:
                faults.enter_context(place.cut(0, 3, one_way=True))  # calls of host 3 get there, no answer comes back
            if number == 6:
                faults.close()
            place.name(number % 2)
            coordinator = place.coordinator(number % 2)
    eventually(lambda: place.members(1) == ids, "all have joined the last one", 2 * SOON_S)
    for peer, to in ring:
        peer.call(knows, ids)
        talks_on(peer, to)
        assert peer.call(end_talk, to) > 20
    assert {name: peer.call(hooks) for name, peer in peers.items()} == {name: [] for name in peers}
    finish(*peers.values())


def test_of_several_coordinators_with_one_name_all_take_the_same(place: Place) -> None:
    place.name(1, 0)
    first = place.coordinator(0)
    place.coordinator(1)
    peers = [place.peer(host, name) for host, name in ((2, "a"), (3, "b"), (2, "c"))]
    ids = dict(peer.call(me) for peer in peers)
    for peer in peers:
        peer.call(knows, ids)  # calls and heartbeats too: none is down after its lease
    assert place.members(0) == ids and place.members(1) == {}
    first.kill()
    eventually(lambda: place.members(1) == ids, "all have gone over", SOON_S)
    for peer in peers:
        peer.call(knows, ids)
    finish(*peers)


def test_two_coordinators_at_once_become_one_membership_when_one_goes(place: Place) -> None:
    place.name(0)
    first = place.coordinator(0)
    place.coordinator(1)
    a, older = place.peer(2, "a"), place.peer(3, "twice")
    place.name(1)
    b, newer = place.peer(3, "b"), place.peer(2, "twice")
    old, ids = dict([a.call(me), older.call(me)]), dict([b.call(me), newer.call(me)])
    assert place.members(0) == old and place.members(1) == ids
    assert old["twice"] < ids["twice"]
    for peer in (a, b):
        peer.call(watch)
    first.kill()
    ids["a"] = old["a"]
    eventually(lambda: place.members(1) == ids, "all are in one", SOON_S)
    for peer in (a, b, newer):
        peer.call(knows, ids)
    assert a.call(hooks) == [("peer_up", "b"), ("peer_down", "twice", REPLACED), ("peer_restart", "twice")]
    assert b.call(hooks) == [("peer_up", "a")]
    older.call(is_closed)
    a.call(tl.send, "hello", "twice")
    assert newer.call(tl.recv, "a") == "hello"
    finish(a, b, newer)


def test_a_coordinator_that_is_cut_off_from_all_harms_nobody(place: Place) -> None:
    place.name(0)
    place.coordinator(0)
    a, b, ids = pair(place)
    place.hosts[0].down()
    cut = time.monotonic()
    eventually(lambda: time.monotonic() - cut > 3 * LEASE_S, "three leases have passed")
    talks_on(a)
    place.hosts[0].up()
    healed = time.monotonic()
    c = place.peer(2, "c")
    for one in (a, b, c):
        one.call(knows, ids | dict([c.call(me)]), 2 * SOON_S)
    assert place.members(0) == ids | dict([c.call(me)])
    assert time.monotonic() - healed < 2 * SOON_S
    talks_on(a)
    assert a.call(end_talk, "b") > 20
    assert a.call(hooks) == b.call(hooks) == [("peer_up", "c")]
    finish(a, b, c)


def test_who_is_cut_off_from_the_coordinator_is_down_for_others_and_comes_back(place: Place) -> None:
    place.name(0)
    place.coordinator(0)
    a, b, _ = pair(place, hosts=(3, 3))
    far = place.peer(2, "far")
    far.call(watch)
    ids = dict(peer.call(me) for peer in (a, b, far))
    for peer in (a, b, far):
        peer.call(knows, ids)
    with place.cut(3, 0):
        for name in ("a", "b"):
            far.call(hears, "peer_down", name)
        talks_on(a)  # those on one side go on
        assert a.call(end_talk, "b") > 20
        assert a.call(known) == ids and a.call(hooks) == [("peer_up", "far")]
    for peer in (a, b, far):
        peer.call(knows, ids, 2 * SOON_S)
    assert place.members(0) == ids
    far.call(tl.send, "hello", "b")
    assert b.call(tl.recv, "far") == "hello"
    assert sorted(hook for hook, *_ in far.call(hooks)) == ["peer_down"] * 2 + ["peer_up"] * 2
    finish(a, b, far)


def test_the_clock_of_the_coordinator_steps_back(place: Place) -> None:
    place.name(0)
    first = place.coordinator(0)
    a, b = place.peer(2, "a"), place.peer(3, "b")
    ids = dict([a.call(me), b.call(me)])
    for one in (a, b):
        one.call(knows, ids)
    a.call(watch)
    first.kill()
    b.kill()
    place.coordinator(0, clock_s=-3600.0)
    again = place.peer(3, "b")  # maybe before anybody has told the coordinator of its predecessor
    _, incarnation = again.call(me)
    assert incarnation > ids["b"]
    a.call(knows, {"a": ids["a"], "b": incarnation})
    a.call(tl.send, "hello", "b")
    assert again.call(tl.recv, "a") == "hello"
    assert [name for _, name, *_ in a.call(hooks)] == ["b", "b"]
    finish(a, again)
