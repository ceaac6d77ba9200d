"""Peers on several hosts: a network, a coordinator on its first host, and processes that find it.

Fixtures for test modules: `networks`, `nursery`, and `cluster`, which lasts as long as the module.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tensorlink as tl
from tensorlink.network import join_address
from tensorlink.testing.pairs import digest, pattern
from tests.hosts import Network, networks
from tests.peer import DEADLINE_S, Peer, kept, nursery, say

__all__ = ["Cluster", "cluster", "networks", "nursery"]

TOKEN = "a secret of the tests"
LEASE_S = 3.0


class Cluster:
    """`peer(1, "b")` is a process on the second host that has joined as `b`."""

    def __init__(self, network: Network, *, ipv6: bool = False) -> None:
        self.network, self._ipv6 = network, ipv6
        host = network.hosts[0]
        self._coordinator = host.spawn(TENSORLINK_TOKEN=TOKEN, TENSORLINK_LEASE_S=str(LEASE_S))
        self._coordinator.start(_coordinate, join_address(host.ip6 if ipv6 else host.ip, 0))
        self.coordinator: str = self._coordinator.hear()

    def peer(self, host: int, name: str, **environment: str) -> Peer:
        started = self.process(host, **environment)
        started.call(tl.init, name)
        return started

    def process(self, host: int, **environment: str) -> Peer:
        """One that hasn't joined."""
        found = {"TENSORLINK_TOKEN": TOKEN, "TENSORLINK_COORDINATOR": self.coordinator}
        return self.network.hosts[host].spawn(**found, **environment)

    def close(self) -> None:
        self._coordinator.close()


@pytest.fixture(scope="module")
def cluster(networks: Callable[[int], Network]) -> Iterator[Cluster]:
    """On two hosts."""
    made = Cluster(networks(2))
    yield made
    made.close()


def _coordinate(listen: str) -> None:
    from tensorlink.control import serve

    serve(tl.Settings.load(), listen, say)


# What its processes do


def send(seed: int, nbytes: int, to: str, tag: str = "", like: str = "numpy") -> None:
    tl.send(_made(seed, nbytes, like), to, tag=tag)


def send_each(messages: list[Any], to: str, tag: str = "") -> None:
    for message in messages:
        tl.send(message, to, tag=tag)


def receive(source: str | None, tag: str = "") -> str:
    """The digest of the next message."""
    return digest(np.asarray(tl.recv(source, tag=tag, timeout=DEADLINE_S)))


def receive_each(count: int, source: str | None, tag: str = "") -> list[Any]:
    return [tl.recv(source, tag=tag, timeout=DEADLINE_S) for _ in range(count)]


def put(seed: int, nbytes: int, like: str = "numpy", **how: Any) -> tl.TensorRef:
    ref = tl.put(_made(seed, nbytes, like), **how)
    kept.setdefault("refs", []).append(ref)
    return ref


def get(ref: tl.TensorRef, into: bool = False, **how: Any) -> str:
    """The digest of what it names."""
    if into:
        how["out"] = np.zeros(ref.nbytes, np.uint8)
    return digest(np.asarray(tl.get(ref, **how)))


def forget() -> None:
    """Drops all that it keeps."""
    if publisher := kept.pop("publisher", None):
        publisher.close()
    kept.clear()


def pool_bytes() -> int:
    gc.collect()
    return int(tl.stats()["pool"]["used_bytes"])


def _made(seed: int, nbytes: int, like: str) -> Any:
    if like == "numpy":
        return pattern(seed, nbytes)
    import torch

    return torch.from_numpy(pattern(seed, nbytes))
