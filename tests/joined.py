"""Fixtures of tests that need a peer: `pair` and `join`. Import them with `nursery` and `spawn`, which they use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import tensorlink as tl
from tests.peer import Nursery, Peer

Pair = tuple[tl.Endpoint, Peer]


@pytest.fixture(scope="module")
def pair(nursery: Nursery) -> Iterator[Pair]:
    """An endpoint `a` of this process, and a child that is the peer `b`."""
    child = nursery.start()
    with tl.init("a") as a:
        child.call(tl.init, "b")
        yield a, child
        child.call(tl.shutdown)
    child.close()


@pytest.fixture
def join(spawn: Callable[..., Peer]) -> Callable[..., Peer]:
    """Starts a child that joins under a name, in the run-time directory of the test."""

    def start(name: str, **environment: str) -> Peer:
        peer = spawn(**environment)
        peer.call(tl.init, name)
        return peer

    return start
