"""Weights from one publisher to subscribers that are each in a host of its own, behind links of 1 Gbit/s."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import tensorlink as tl
from bench import across
from bench.measure import OURS, ROUNDS, Race
from tests.hosts import Network, networks
from tests.peer import Peer, kept, nursery

__all__ = ["networks", "nursery"]

NBYTES = 64 << 20
BITS_PER_S = 1e9
SUBSCRIBERS = (1, 2, 4, 8)
WIRE_MS = NBYTES * 8 / BITS_PER_S * 1e3
NAME = "fan-out"


class Fan:
    """The publisher and its subscribers; each has a process in a host."""

    def __init__(self, network: Network) -> None:
        self.host, *others = network.hosts
        for host in network.hosts:
            host.congestion_control(across.CONGESTION)
        joined = across.coordinated(self.host)
        self.publisher = self.host.spawn(**joined)
        self.publisher.call(join, "publisher")
        self.publisher.call(across.publish, weights, NAME)
        self.subscribers = [host.spawn(**joined) for host in others]
        for number, subscriber in enumerate(self.subscribers):
            subscriber.call(join, f"subscriber-{number}")
            subscriber.call(across.subscribe, weights, NAME)
            subscriber.call(across.pull)
        for host in network.hosts:
            host.limit(BITS_PER_S)
        self.version = 1
        self.copies: dict[str, list[float]] = {}

    def pulls_ms(self, count: int) -> float:
        """`count` subscribers wait for a version, and then it is published: until the slowest has it."""
        self.version += 1
        pulling = self.subscribers[:count]

        def move() -> float:
            for subscriber in pulling:
                subscriber.start(across.pull, self.version)
            self.publisher.call(across.publish, weights, NAME)
            return float(self.publisher.call(clock))

        return self._slowest_ms(f"pull, {count}", pulling, move)

    def direct_ms(self, count: int) -> float:
        """The same bytes, read by each from the publisher itself."""
        reading = self.subscribers[:count]
        ref = self.publisher.call(put)

        def move() -> float:
            for subscriber in reading:
                subscriber.start(get, ref)
            return float(self.publisher.call(clock))

        try:
            return self._slowest_ms(f"direct, {count}", reading, move)
        finally:
            self.publisher.call(drop)

    def _slowest_ms(self, name: str, peers: list[Peer], move: Callable[[], float]) -> float:
        before = self.host.sent_bytes()
        start = move()
        end = max(float(peer.finish(across.CALL_S)[1]) for peer in peers)
        self.copies.setdefault(name, []).append((self.host.sent_bytes() - before) / NBYTES)
        return (end - start) * 1e3


@pytest.fixture(scope="module")
def fan(networks: Callable[[int], Network]) -> Fan:
    return Fan(networks(1 + max(SUBSCRIBERS)))


def test_fan_out(fan: Fan, benchmark: BenchmarkFixture) -> None:
    race = Race(benchmark, "64 MiB of weights over 1 Gbit/s", "ms")
    names = {count: OURS if count == 4 else f"{count} subscriber{'s' * (count > 1)}" for count in SUBSCRIBERS}
    for count, name in names.items():
        race.enter(name, partial(fan.pulls_ms, count))
    race.enter("4 that read directly", lambda: fan.direct_ms(4))
    race.run(rounds=ROUNDS)
    race.limit(names[1], WIRE_MS, what="1 subscriber, to the wire's floor", target=None)
    for count in SUBSCRIBERS[1:]:
        target = 1.4 if count == 8 else None
        race.versus(names[1], ours=names[count], what=f"slowest of {count}, as a multiple", target=target, at_most=True)
    race.versus("4 that read directly", what="slowest of 4", target=3.5)
    for name, copies in fan.copies.items():
        race.figures[f"copies, {name}"] = copies
    for count in SUBSCRIBERS:
        figures = f"copies, pull, {count}"
        race.limit(figures, 1.5, what=f"copies that the publisher sends to {count}", unit="copies")


# What the processes do


def join(name: str) -> None:
    torch.set_num_threads(1)
    tl.init(name, pool_bytes=512 << 20)


def weights() -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.ones(NBYTES // 16 // 2, dtype=torch.bfloat16) for i in range(16)}


def clock() -> float:
    return time.perf_counter()


def put() -> tl.TensorRef:
    kept["ref"] = tl.put(weights())
    ref: tl.TensorRef = kept["ref"]
    return ref


def get(ref: tl.TensorRef) -> tuple[float, float]:
    start = clock()
    tl.get(ref)
    return start, clock()


def drop() -> None:
    kept.pop("ref").release()
