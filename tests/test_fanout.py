"""Weights for subscribers on several hosts: the publisher sends them about once, whatever happens to who passes them on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import tensorlink as tl
from tensorlink.control.coordinator import Coordinator
from tests.hosts import Host, Network, networks
from tests.peer import eventually, kept, nursery

__all__ = ["networks", "nursery"]

MIB = 1 << 20
SIZE = 8 * MIB
SUBSCRIBERS = 4
SLOW = 200_000_000  # bits per second: SIZE takes a third of a second

Team = tuple[Host, list[Host]]


# What the processes do


def coordinate(ip: str) -> str:
    """Runs a coordinator on a thread; its address."""
    started: list[str] = []
    ready = threading.Event()

    async def serve() -> None:
        coordinator = Coordinator(token="secret", lease_s=2.0)
        started.append(f"{ip}:{await coordinator.listen_tcp(ip, 0)}")
        ready.set()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    assert ready.wait(30)
    return started[0]


def join(name: str, coordinator: str) -> None:
    os.environ.update(TENSORLINK_TOKEN="secret", TENSORLINK_COORDINATOR=coordinator)
    kept["endpoint"] = tl.init(name)


def weights(version: int) -> np.ndarray:
    return np.random.default_rng(version).integers(0, 256, SIZE, dtype=np.uint8)


def publish(version: int) -> None:
    state = kept.setdefault("state", {"w": np.empty(SIZE, np.uint8)})
    state["w"][:] = weights(version)
    if "publisher" not in kept:
        kept["publisher"] = tl.WeightPublisher("policy", state)
    kept["publisher"].publish(version)


def pull(version: int) -> float:
    """Seconds; checks all bytes."""
    into = kept.setdefault("into", {"w": np.empty(SIZE, np.uint8)})
    if "subscriber" not in kept:
        kept["subscriber"] = tl.WeightSubscriber("policy", into)
    start = time.perf_counter()
    assert kept["subscriber"].pull(version, timeout=30) == version
    seconds = time.perf_counter() - start
    assert (into["w"] == weights(version)).all()
    return seconds


def coordinator() -> str:
    return os.environ["TENSORLINK_COORDINATOR"]


@pytest.fixture
def team(networks: Callable[[int], Network]) -> Team:
    """A publisher, and subscribers behind slow links, each on a host of its own."""
    publisher, *subscribers = networks(1 + SUBSCRIBERS).hosts
    address = publisher.spawn().call(coordinate, publisher.ip)
    publisher.peer.call(join, "trainer", address)
    publisher.peer.call(publish, 1)
    for number, host in enumerate(subscribers):
        host.peer.call(join, f"worker-{number}", address)
        host.peer.call(pull, 1)
        host.limit(SLOW)
    return publisher, subscribers


def begin(team: Team, version: int) -> None:
    publisher, subscribers = team
    publisher.peer.call(publish, version)
    for host in subscribers:
        host.peer.start(pull, version)


def test_the_publisher_sends_a_version_about_once(team: Team) -> None:
    publisher, subscribers = team
    for version in (2, 3):
        before = publisher.sent_bytes()
        begin(team, version)
        for host in subscribers:
            host.peer.finish()
        assert publisher.sent_bytes() - before < 1.5 * SIZE
    before = publisher.sent_bytes()
    late = subscribers[0].spawn()
    late.call(join, "late", publisher.peer.call(coordinator))
    late.call(pull, 3)
    assert publisher.sent_bytes() - before < 0.5 * SIZE, "one who comes late gets it from another subscriber"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_who_passes_it_on_dies_in_the_middle(team: Team, end: signal.Signals) -> None:
    """The others get all of it, from where they were, and the publisher sends little more than it would have."""
    publisher, subscribers = team
    before = {host: host.sent_bytes() for host in (publisher, *subscribers)}
    begin(team, 2)

    def passing_on() -> Host | None:
        return next((host for host in subscribers if host.sent_bytes() - before[host] > MIB), None)

    first = eventually(passing_on, "somebody passes it on")
    first.peer.signal(end)
    for host in subscribers:
        if host is not first:
            host.peer.finish()
    assert publisher.sent_bytes() - before[publisher] < 3.5 * SIZE
