"""Processes killed at random points under traffic: survivors get a typed error or go on, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import tensorlink as tl
from tests import leaks
from tests.peer import DEADLINE_S, Peer, eventually, nursery, say, spawn

__all__ = ["nursery", "spawn"]

pytestmark = pytest.mark.chaos

LEASE_S = 2.0
KIB = 1 << 10
SERVING = ("tensorlink-peer-", "native event_engine", "native grpc", "native resolver", "native lifeguard")
SIZES = (8, 3_000, 100 * KIB, 2_000 * KIB)
Join = Callable[[str], Peer]


@pytest.fixture
def join(spawn: Callable[..., Peer]) -> Join:
    """Starts a child that joins under a name, in the run-time directory of the test."""

    def start(name: str) -> Peer:
        peer = spawn(TENSORLINK_LEASE_S=str(LEASE_S))
        peer.call(tl.init, name)
        return peer

    return start


def open_hub() -> tl.Endpoint:
    """The survivor. No fixture: pytest would keep it, and with it its descriptors, until after the check for leaks."""
    return tl.init("hub", lease_s=LEASE_S)


# What the children do, until they are killed


def pattern(number: int) -> np.ndarray[Any, Any]:
    return np.full(SIZES[number % len(SIZES)], number % 251, np.uint8)


def send_for_ever(to: str) -> None:
    say("going")
    for number in range(1 << 60):
        tl.send((number, pattern(number)), to, tag="numbers", timeout=DEADLINE_S)


def receive_for_ever(source: str) -> None:
    say("going")
    while True:
        tl.recv(source, tag="numbers", timeout=None)


def own_for_ever(to: str) -> None:
    say("going")
    for number in range(1 << 60):
        ref = tl.put(pattern(number))
        tl.send((number, ref), to, tag="refs", timeout=DEADLINE_S)
        if number % 3 == 0:
            ref.release()


def read_for_ever(source: str) -> None:
    views = []
    say("going")
    while True:
        number, ref = tl.recv(source, tag="refs", timeout=None)
        views = [*views[-5:], tl.get(ref)]
        assert (views[-1] == number % 251).all()


ROLES: dict[str, Callable[[str], None]] = {
    "sender": send_for_ever,
    "receiver": receive_for_ever,
    "owner": own_for_ever,
    "reader": read_for_ever,
}


# What the survivor does meanwhile


@dataclass
class Traffic:
    """The hub's side of one victim's traffic, in a thread; ends with the error that the victim's death gives it."""

    hub: tl.Endpoint
    victim: str
    role: str
    failures: list[str] = field(default_factory=list)
    ended_after: float = 0.0
    end: BaseException | None = None
    refs: list[tl.TensorRef] = field(default_factory=list)

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            getattr(self, f"with_{self.role}")()
        except BaseException as error:
            self.end = error
        self.ended_after = time.monotonic()
        for ref in self.refs:
            ref.release()
        self.refs.clear()

    def with_sender(self) -> None:
        expected = 0
        while True:
            number, array = self.hub.recv(self.victim, tag="numbers", timeout=DEADLINE_S)
            if number != expected or array.size != pattern(number).size or not (array == number % 251).all():
                self.failures.append(f"{number} for {expected}")
            expected = number + 1

    def with_receiver(self) -> None:
        for number in range(1 << 60):
            self.hub.send((number, pattern(number)), self.victim, tag="numbers", timeout=DEADLINE_S)

    def with_owner(self) -> None:
        view = None
        while True:
            number, ref = self.hub.recv(self.victim, tag="refs", timeout=DEADLINE_S)
            try:
                view = self.hub.get(ref, timeout=DEADLINE_S)
            except tl.StaleRefError:
                continue
            if not (view == number % 251).all():
                self.failures.append(f"a wrong view of {number}")

    def with_reader(self) -> None:
        for number in range(1 << 60):
            ref = self.hub.put(pattern(number), ttl=30)
            self.refs.append(ref)
            self.hub.send((number, ref), self.victim, tag="refs", timeout=DEADLINE_S)
            if len(self.refs) > 8:
                self.refs.pop(0).release()


def kill_one(hub: tl.Endpoint, join: Join, role: str, chance: random.Random) -> None:
    victim = join("victim")
    victim.start(ROLES[role], "hub")
    assert victim.hear() == "going"
    traffic = Traffic(hub, "victim", role)
    traffic.start()
    traffic.thread.join(chance.random() * 0.15)  # the random point
    victim.kill()
    victim.close()
    killed = time.monotonic()
    traffic.thread.join(DEADLINE_S)
    assert not traffic.thread.is_alive()
    assert isinstance(traffic.end, tl.PeerLostError), traffic.end
    assert traffic.failures == []
    assert traffic.ended_after - killed < LEASE_S + 3.0  # the 3 s are for a machine that is busy
    with pytest.raises(tl.PeerLostError):  # a read may have told of the death before the stream has ended
        hub.recv("victim", tag="nothing", timeout=DEADLINE_S)
    drain(hub)


def drain(hub: tl.Endpoint) -> None:
    """Takes what dead senders had sent and nobody received."""
    for tag in ("numbers", "refs"):
        while True:
            try:
                hub.recv(tag=tag, timeout=0)
            except tl.TransferTimeoutError:
                break
            except tl.PeerLostError:  # its sender died before this was mapped; it is taken away
                continue


def settled(hub: tl.Endpoint, before: leaks.Snapshot, base: int) -> None:
    """Fails when the kills have left something in this process."""
    gc.collect()
    eventually(lambda: hub.stats()["pool"]["used_bytes"] <= base, "the pool is back at its base")
    left = leaks.settle(before, timeout=10.0)
    assert not left, "\n".join(left)


@pytest.mark.parametrize("role", list(ROLES))
def test_kills_at_random_points(join: Join, role: str) -> None:
    with open_hub() as hub:
        kill_many(hub, join, role)


def kill_many(hub: tl.Endpoint, join: Join, role: str) -> None:
    chance = random.Random(role)
    kill_one(hub, join, role, chance)  # the first one makes what then stays: segments, threads
    gc.collect()
    before, base = leaks.Snapshot.take(), hub.stats()["pool"]["used_bytes"]
    for _ in range(9):
        kill_one(hub, join, role, chance)
    settled(hub, _without_pool(before), base)


def _without_pool(before: leaks.Snapshot) -> leaks.Snapshot:
    """As it is, and with what came since and may stay: the pool's segments, kept warm, and threads that serve calls."""
    now = leaks.Snapshot.take()
    warm = {name: what for name, what in now.memory.items() if name.startswith("/memfd:tensorlink ")}
    serving = {tid: name for tid, name in now.threads.items() if name.startswith(SERVING)}
    segments = {number: what for number, what in now.fds.items() if what.startswith("/memfd:tensorlink ")}
    return leaks.Snapshot(
        before.children, {**before.threads, **serving}, {**before.fds, **segments}, {**before.memory, **warm}
    )


def coordinator_pids() -> list[int]:
    return [pid for pid, command in leaks.children().items() if "tensorlink.control.embedded" in command]


def test_the_coordinator_is_killed_again_and_again(join: Join) -> None:
    with open_hub() as hub:
        kill_coordinators(hub, join)


def kill_coordinators(hub: tl.Endpoint, join: Join) -> None:
    chance = random.Random(11)
    victim = join("victim")
    lost: list[str] = []
    hub.on("peer_down", lambda peer, reason: lost.append(f"{peer.name}: {reason}"))
    number = 0
    for _ in range(10):
        victim.start(echo, "hub", 100)
        killed = chance.randrange(100)
        for i in range(100):
            if i == killed:
                for pid in eventually(coordinator_pids, "there is a coordinator"):
                    os.kill(pid, signal.SIGKILL)
            hub.send(pattern(number), "victim", tag="echo", timeout=DEADLINE_S)
            assert (hub.recv("victim", tag="echo", timeout=DEADLINE_S) == number % 251).all()
            number += 1
        victim.finish()
    assert lost == []
    late = join("late")  # a newcomer is found through the new coordinator
    hub.send("hello", "late", timeout=DEADLINE_S)
    assert late.call(tl.recv, "hub") == "hello"


def echo(to: str, count: int) -> None:
    for _ in range(count):
        tl.send(tl.recv(to, tag="echo", timeout=DEADLINE_S), to, tag="echo", timeout=DEADLINE_S)
