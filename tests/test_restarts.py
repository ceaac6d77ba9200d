"""A peer that is restarted again and again under constant traffic: nobody else does anything about it, and nothing goes wrong."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorlink as tl
from tests.peer import DEADLINE_S, Peer, eventually, kept, nursery, spawn

__all__ = ["nursery", "spawn"]

pytestmark = pytest.mark.chaos

KIB = 1 << 10
SIZES = (8, 3_000, 100 * KIB, 600 * KIB)
WEIGHTS = 512 * KIB
OTHERS = ("x", "y", "z")
WAIT_S = 20.0
"""Nothing takes as long, unless it is stuck: a worker is back within a second."""
LOST = (tl.PeerLostError, tl.StaleRefError)
"""What may become of something that was begun with an incarnation that has ended."""


def pattern(number: int) -> np.ndarray[Any, Any]:
    return np.full(SIZES[number % len(SIZES)], number % 251, np.uint8)


def fits(number: int, array: np.ndarray[Any, Any]) -> bool:
    return array.size == SIZES[number % len(SIZES)] and bool((array == number % 251).all())


# The one that is restarted


def work() -> int:
    """Joins, tells everybody, and from then on answers jobs and publishes, on a thread; the incarnation."""
    me = tl.init("worker")
    for other in OTHERS:
        me.send(me.id.incarnation, other, tag="hello", timeout=WAIT_S)
    threading.Thread(target=_answer, args=(me,), daemon=True).start()
    return me.id.incarnation


def _answer(me: tl.Endpoint) -> None:
    with contextlib.suppress(tl.ClosedError):
        answer_for_ever(me)


def answer_for_ever(me: tl.Endpoint) -> None:
    state = {"w": np.zeros(WEIGHTS, np.uint8)}
    publisher = tl.WeightPublisher("policy", state)
    for version in range(1, 1 << 60):
        state["w"][:] = version % 251
        publisher.publish(version)
        for _ in range(6):
            sender, number, array = me.recv(tag="job", timeout=None)
            assert fits(number, array)
            me.send((number, array, me.put(pattern(number), ttl=10)), sender, tag="reply", timeout=WAIT_S)


# Those that stay


@dataclass
class Traffic:
    """One peer's jobs for the worker and pulls of its weights, on a thread, until it is told to stop."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    greeted: list[int] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            into = {"w": np.zeros(WEIGHTS, np.uint8)}
            subscriber = tl.WeightSubscriber("policy", into)
            greeting = tl.irecv(tag="hello")
            for number in range(1 << 60):
                if self.stop.is_set():
                    return
                self._try("jobs", lambda number=number: self._job(number))
                if number % 4 == 0:
                    self._try("pulls", lambda: self._pull(subscriber, into["w"]))
                while greeting.done():
                    self.greeted.append(greeting.result())
                    greeting = tl.irecv(tag="hello")
        except BaseException as error:
            self.wrong.append(f"{type(error).__name__}: {error}")

    def _try(self, what: str, act: Callable[[], None]) -> None:
        try:
            act()
            self.counts[what] += 1
        except LOST as error:
            self.counts[type(error).__name__] += 1

    def _job(self, number: int) -> None:
        # Posted first: so it ends if the worker does, whichever incarnation then gets the job.
        reply = tl.irecv("worker", tag="reply", timeout=WAIT_S)
        tl.send((self.name, number, pattern(number)), "worker", tag="job", timeout=WAIT_S)
        answered, array, ref = reply.wait()
        if answered > number or not fits(answered, array):
            self.wrong.append(f"an answer to {answered} for {number}")
        if not fits(answered, tl.get(ref, timeout=WAIT_S)):
            self.wrong.append(f"a handle of {answered}")

    def _pull(self, subscriber: tl.WeightSubscriber, weights: np.ndarray[Any, Any]) -> None:
        version = subscriber.pull(timeout=WAIT_S)
        if not (weights == version % 251).all():
            self.wrong.append(f"version {version} is torn")


def begin(name: str) -> None:
    tl.init(name)
    kept["traffic"] = Traffic(name)
    kept["thread"] = threading.Thread(target=kept["traffic"].run)
    kept["thread"].start()


def look() -> tuple[dict[str, int], list[str], list[int]]:
    traffic: Traffic = kept["traffic"]
    return dict(traffic.counts), traffic.wrong, traffic.greeted


def end() -> None:
    kept["traffic"].stop.set()
    kept["thread"].join(DEADLINE_S)
    assert not kept["thread"].is_alive()


def has() -> dict[str, int]:
    """Descriptors, threads and KiB of memory of this process, and what its pool holds, in the middle of its traffic."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "KiB": resident,
        "pool": tl.stats()["pool"]["used_bytes"] // KIB,
    }


class Supervised:
    """The worker, restarted by `again`; meanwhile `others` send it jobs."""

    def __init__(self, spawn: Callable[..., Peer], environment: dict[str, str], seed: int) -> None:
        self._start = lambda: spawn(TENSORLINK_LEASE_S="2", **environment)
        self._chance = random.Random(seed)
        self.others = [self._start() for _ in OTHERS]
        for name, other in zip(OTHERS, self.others, strict=True):
            other.call(begin, name)
        self.worker = self._start()
        self.incarnations = [self.worker.call(work)]

    def again(self) -> None:
        time.sleep(self._chance.random() * 0.15)  # the random point
        if self._chance.random() < 0.3:
            self.worker.exit()
        else:
            self.worker.kill()
        self.worker.close()
        self.worker = self._start()
        self.incarnations.append(self.worker.call(work))
        for other in self.others:
            assert other.call(look)[1] == []

    def served(self) -> None:
        """Returns when everybody has had an answer of the worker as it is now."""
        before = [other.call(look)[0].get("jobs", 0) for other in self.others]
        for other, jobs in zip(self.others, before, strict=True):
            eventually(lambda other=other, jobs=jobs: other.call(look)[0].get("jobs", 0) > jobs + 4, "it goes on")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_restarts_under_traffic(spawn: Callable[..., Peer], transport: str) -> None:
    restart_many(spawn, transport, 8)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_hundreds_of_restarts_under_traffic(spawn: Callable[..., Peer], transport: str) -> None:
    restart_many(spawn, transport, 200)


def restart_many(spawn: Callable[..., Peer], transport: str, count: int) -> None:
    environment = {"TENSORLINK_TRANSPORTS": transport, "TENSORLINK_TOKEN": "a secret of the tests"}
    team = Supervised(spawn, environment, count)
    for _ in range(max(3, count // 4)):  # until the pools and the heaps have what they need
        team.again()
    team.served()
    before = [other.call(has) for other in team.others]
    for _ in range(count):
        team.again()
    team.served()
    for other in team.others:
        other.call(end)
    after = [other.call(has) for other in team.others]
    for other, was, now in zip(team.others, before, after, strict=True):
        counts, wrong, greeted = other.call(look)
        print(counts, was, now)
        assert wrong == []
        assert counts["jobs"] > count and counts["pulls"] > 0
        assert set(greeted) <= set(team.incarnations) and greeted == sorted(greeted)
        assert now["fds"] <= was["fds"] + 6 and now["threads"] <= was["threads"] + 3, (was, now)
        assert now["KiB"] <= was["KiB"] + 8 * KIB + 16 * count, (was, now)
        assert now["pool"] <= was["pool"] + 4 * KIB, (was, now)
        other.call(tl.shutdown)
