"""Fixtures of tests that need a peer: `pair` and `join`. Import them with `nursery` and `spawn`, which they use.

A module whose pair has an environment of its own makes its `pair` of `joined`, and imports `let_go`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import pytest

import tensorlink as tl
from tests.peer import Nursery, Peer

Pair = tuple[tl.Endpoint, Peer]


@contextlib.contextmanager
def joined(nursery: Nursery, environment: Mapping[str, str]) -> Iterator[Pair]:
    """An endpoint `a` of this process, and a child that is the peer `b`, both with these environment variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        child = nursery.start()
        with tl.init("a") as a:
            child.call(tl.init, "b")
            yield a, child
            child.call(tl.shutdown)
        child.close()


@pytest.fixture(scope="module")
def pair(nursery: Nursery) -> Iterator[Pair]:
    """An endpoint `a` of this process, and a child that is the peer `b`."""
    with joined(nursery, {}) as both:
        yield both


@pytest.fixture(autouse=True)
def let_go(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    request.node.funcargs.pop("pair", None)  # pytest would keep it beyond the module's check for leaks


@pytest.fixture
def join(spawn: Callable[..., Peer]) -> Callable[..., Peer]:
    """Starts a child that joins under a name, in the run-time directory of the test."""

    def start(name: str, **environment: str) -> Peer:
        peer = spawn(**environment)
        peer.call(tl.init, name)
        return peer

    return start
