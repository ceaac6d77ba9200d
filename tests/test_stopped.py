"""A peer that is stopped for longer than its lease: others go on without it, and it joins again by itself, knowing of it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tensorlink as tl
from tests.peer import DEADLINE_S, Peer, eventually, kept, nursery, say, spawn

__all__ = ["nursery", "spawn"]

pytestmark = pytest.mark.chaos

MIB = 1 << 20
LEASE_S = 1.0


class Stage:
    """An endpoint here, and what it is told of the one that is stopped."""

    def __init__(self, spawn: Callable[..., Peer], transport: str) -> None:
        token = "a secret of the tests"
        self.start = lambda: spawn(
            TENSORLINK_TRANSPORTS=transport, TENSORLINK_TOKEN=token, TENSORLINK_LEASE_S=str(LEASE_S)
        )
        self.a = tl.init("a", transports=transport, token=token, lease_s=LEASE_S)
        self.hooks: list[str] = []
        for hook in ("peer_up", "peer_down", "peer_restart"):
            self.a.on(hook, lambda peer, *_, hook=hook: self.hooks.append(hook))
        self.stopped = self.start()
        self.stopped.call(tl.init, "b")
        self.heard("peer_up")

    def heard(self, *hooks: str) -> None:
        eventually(lambda: self.hooks == list(hooks), f"the hooks say {hooks}")


@contextlib.contextmanager
def staged(spawn: Callable[..., Peer], transport: str) -> Iterator[Stage]:
    """No fixture: pytest would keep the endpoint, and with it its descriptors, until after the check for leaks."""
    made = Stage(spawn, transport)
    with made.a:
        yield made


# What the stopped one does


def own(value: int) -> tl.TensorRef:
    kept["own"] = tl.put(np.full(MIB, value, np.uint8))
    return kept["own"]


def hold(ref: tl.TensorRef) -> None:
    kept["view"] = tl.get(ref)


def view_is(value: int) -> bool:
    return bool((kept["view"] == value).all())


def wait_for_messages() -> None:
    """Receives of each kind, on threads: says how each one ends."""
    ready = threading.Barrier(4)

    def receive(what: str, call: Callable[[], Any]) -> None:
        ready.wait()
        try:
            say((what, call()))
        except tl.TensorLinkError as error:
            say((what, f"{type(error).__name__}: {error}"))

    posted = tl.irecv("a", tag="never")
    calls: dict[str, Callable[[], Any]] = {
        "named": lambda: tl.recv("a", tag="never", timeout=None),
        "posted": posted.wait,
        "anyone": lambda: tl.recv(tag="any", timeout=None),
    }
    for what, call in calls.items():
        threading.Thread(target=receive, args=(what, call), daemon=True).start()
    ready.wait()


def try_to_send() -> str:
    try:
        tl.send(1, "a")
    except tl.TensorLinkError as error:
        return f"{type(error).__name__}: {error}"
    return "sent"


def stop(stage: Stage) -> tl.TensorRef:
    """Stops `b` for longer than its lease, while it waits and holds a view of 7s; a handle of 3s that it owns."""
    a, b = stage.a, stage.stopped
    ref: tl.TensorRef = b.call(own, 3)
    assert (a.get(ref) == 3).all()
    with a.put(np.full(MIB, 7, np.uint8)) as mine:
        b.call(hold, mine)
    b.call(wait_for_messages)
    b.signal(signal.SIGSTOP)
    stage.heard("peer_up", "peer_down")
    return ref


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_was_stopped_learns_of_it_and_joins_again(spawn: Callable[..., Peer], transport: str) -> None:
    with staged(spawn, transport) as stage:
        stop_and_go_on(stage)


def stop_and_go_on(stage: Stage) -> None:
    a, b = stage.a, stage.stopped
    ref = stop(stage)
    for call in (lambda: a.send(1, "b"), lambda: a.get(ref), lambda: a.recv("b", timeout=None)):
        with pytest.raises(tl.PeerLostError, match="b has gone"):  # at once, not at the deadline
            call()
    for fill in range(20):
        a.put(np.full(MIB, fill, np.uint8)).release()
    b.signal(signal.SIGCONT)
    stage.heard("peer_up", "peer_down", "peer_up")
    ends = dict(b.hear() for _ in range(2))
    assert sorted(ends) == ["named", "posted"]
    for end in ends.values():
        assert end.startswith("PeerLostError: this process was silent for longer than its lease"), end
    a.send("hello", "b", tag="any", timeout=DEADLINE_S)
    assert b.hear() == ("anyone", "hello")
    assert b.call(view_is, 7)
    assert (a.get(ref, timeout=DEADLINE_S) == 3).all()
    assert b.call(try_to_send) == "sent"
    assert a.recv("b", timeout=DEADLINE_S) == 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_was_replaced_while_it_was_stopped_closes(spawn: Callable[..., Peer], transport: str) -> None:
    with staged(spawn, transport) as stage:
        replace_the_stopped(stage)


def replace_the_stopped(stage: Stage) -> None:
    a, b = stage.a, stage.stopped
    ref = stop(stage)
    successor = stage.start()
    successor.call(tl.init, "b")
    stage.heard("peer_up", "peer_down", "peer_restart")
    b.signal(signal.SIGCONT)
    ends = dict(b.hear() for _ in range(3))
    assert sorted(ends) == ["anyone", "named", "posted"]
    assert all(end.startswith("ClosedError") for end in ends.values()), ends
    assert b.call(try_to_send).startswith("ClosedError")
    assert b.call(view_is, 7)
    with pytest.raises(tl.PeerRestartedError):
        a.get(ref)
    a.send("hello", "b", timeout=DEADLINE_S)
    assert successor.call(tl.recv, "a") == "hello"
    assert stage.hooks == ["peer_up", "peer_down", "peer_restart"]
