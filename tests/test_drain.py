"""Leaving in peace: what was begun ends, nothing new begins, others look elsewhere, and a timeout cuts nothing off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorlink as tl
from tests.peer import DEADLINE_S, eventually

MIB = 1 << 20
REMOTE: dict[str, Any] = {"transports": "tcp", "token": "a secret of the tests"}


class Call:
    """A call on a thread of its own: `end` joins it and gives what it returned or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._outcome: Any = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._outcome = self._call()
        except Exception as error:
            self._outcome = error

    def end(self) -> Any:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        return self._outcome


def begin_something(endpoint: tl.Endpoint) -> Call:
    """A send to somebody who hasn't joined yet: it is in flight until `somebody` joins."""
    before = len(endpoint._work)
    call = Call(lambda: endpoint.send("late", "somebody", timeout=DEADLINE_S))
    eventually(lambda: len(endpoint._work) > before, "it has begun")
    return call


def test_a_drained_endpoint_takes_no_new_work_and_shuts_down_at_once() -> None:
    with tl.init("b") as b, tl.init("a") as a:
        downs: list[str] = []
        b.on("peer_down", lambda peer, reason: downs.append(f"{peer.name}: {reason}"))
        ref = a.put(np.ones(MIB, np.uint8))
        view = b.get(ref)
        a.drain()
        a.drain()
        calls: list[Callable[[], Any]] = [
            lambda: a.send(1, "b"),
            lambda: a.isend(1, "b"),
            lambda: a.recv(timeout=None),
            lambda: a.irecv(),
            lambda: a.put(1),
            lambda: a.get(ref),
            lambda: a.iget(ref),
            lambda: a.empty(1, np.uint8),
            lambda: tl.WeightPublisher("w", {}, endpoint=a),
        ]
        for call in calls:
            with pytest.raises(tl.ClosedError, match=r"draining.*takes no new work.*init"):
                call()
        a.release(ref)
        assert a.stats()["pool"]["handles"] == 0
        eventually(lambda: downs == ["a: it left"], "b was told")
        began = time.monotonic()
        a.shutdown()
        assert time.monotonic() - began < 3  # it would wait 5 s for what others don't take
        with pytest.raises(tl.ClosedError, match="shut down"):
            a.drain()
        assert view.sum() == MIB


def test_tl_drain_is_the_current_endpoints() -> None:
    endpoint = tl.init("a")
    tl.drain(timeout=5)
    assert tl.current() is endpoint
    assert tl.stats()["queued"] == 0
    with pytest.raises(tl.ClosedError, match="draining"):
        tl.send(1, "a")
    tl.shutdown()
    with pytest.raises(tl.ClosedError, match="init"):
        tl.drain()


def test_a_timeout_cuts_nothing_off_and_a_second_drain_waits_for_the_rest() -> None:
    with tl.init("b") as b, tl.init("a") as a:
        begun = begin_something(a)
        with pytest.raises(tl.TransferTimeoutError, match="a is still busy: 1 operations have not ended"):
            a.drain(timeout=0.05)
        assert begun.thread.is_alive()
        eventually(lambda: [peer.leaving for peer in b.peers()] == [True, False], "others know")
        waiting = Call(lambda: a.drain(timeout=DEADLINE_S))
        with tl.init("somebody") as somebody:
            assert somebody.recv("a", timeout=DEADLINE_S) == "late"
        assert begun.end() is None
        assert waiting.end() is None
        eventually(lambda: [peer.name for peer in b.peers()] == ["b"], "it has left")


def test_transfers_that_were_begun_go_on() -> None:
    with tl.init("a") as a:
        sending = a.isend("x", "somebody", timeout=DEADLINE_S)
        draining = Call(lambda: a.drain(timeout=DEADLINE_S))
        with tl.init("somebody") as somebody:
            assert somebody.recv("a", timeout=DEADLINE_S) == "x"
        sending.wait(DEADLINE_S)
        assert draining.end() is None


def test_a_receive_is_not_waited_for_and_ends_with_the_shutdown() -> None:
    a = tl.init("a")
    posted = a.irecv(tag="never")
    blocked = Call(lambda: a.recv(tag="never", timeout=None))
    a.drain(timeout=DEADLINE_S)
    assert not posted.done()
    a.shutdown()
    assert isinstance(blocked.end(), tl.ClosedError)
    with pytest.raises(tl.ClosedError):
        posted.wait()


def test_a_shutdown_ends_a_drain() -> None:
    a = tl.init("a")
    begun = begin_something(a)
    draining = Call(lambda: a.drain(timeout=DEADLINE_S))
    eventually(lambda: a._draining, "it drains")
    a.shutdown()
    assert isinstance(draining.end(), tl.ClosedError)
    assert isinstance(begun.end(), tl.TensorLinkError)


def test_a_reader_on_another_host_is_waited_for() -> None:
    size = 8 * MIB
    with tl.init("b", **REMOTE) as b, tl.init("a", max_bytes_per_s=40 * MIB, **REMOTE) as a:
        ref = a.put(np.full(size, 7, np.uint8))
        reading = Call(lambda: b.get(ref, timeout=DEADLINE_S))
        eventually(lambda: a.stats()["served_bytes"] > 0, "it reads")
        a.drain(timeout=DEADLINE_S)
        assert (reading.end() == 7).all()


def test_subscribers_find_the_next_publisher_before_the_last_one_has_gone() -> None:
    into, state = {"w": np.zeros(MIB, np.uint8)}, {"w": np.full(MIB, 1, np.uint8)}
    with tl.init("s") as s, tl.init("b") as b, tl.init("a") as a:
        old = tl.WeightPublisher("w", state, endpoint=a)
        old.publish()
        subscriber = tl.WeightSubscriber("w", into, endpoint=s)
        subscriber.pull()
        begun = begin_something(a)
        draining = Call(lambda: a.drain(timeout=DEADLINE_S))
        eventually(lambda: any(peer.leaving for peer in b.peers()), "others know")
        with pytest.raises(tl.ClosedError, match="draining"):
            old.publish()
        state["w"][:] = 2
        assert (subscriber.pull(), subscriber.publisher) == (1, a.id), "nobody else publishes yet"
        with tl.WeightPublisher("w", state, endpoint=b) as new:  # the name is free already
            new.publish()
            for each in (subscriber, tl.WeightSubscriber("w", into, endpoint=s)):
                into["w"][:] = 0
                assert each.pull(timeout=DEADLINE_S) == 1
                assert each.publisher == b.id
                assert (into["w"] == 2).all()
            with tl.init("somebody"):
                assert begun.end() is None
            assert draining.end() is None


def test_who_leaves_passes_nothing_on_any_more() -> None:
    size = MIB
    state = {"w": np.full(size, 3, np.uint8)}

    def pull(endpoint: tl.Endpoint) -> tl.WeightSubscriber:
        into = {"w": np.zeros(size, np.uint8)}
        subscriber = tl.WeightSubscriber("w", into, endpoint=endpoint)
        subscriber.pull(timeout=DEADLINE_S)
        assert (into["w"] == 3).all()
        return subscriber

    with tl.init("p", **REMOTE) as p, tl.init("relay", **REMOTE) as relay:
        publisher = tl.WeightPublisher("w", state, endpoint=p)
        publisher.publish()
        passing_on = pull(relay)
        with tl.init("first", **REMOTE) as first:
            pull(first)
            eventually(lambda: relay.stats()["served_bytes"] >= size, "it came from the relay")
        begun = begin_something(relay)
        draining = Call(lambda: relay.drain(timeout=DEADLINE_S))
        eventually(lambda: any(peer.leaving for peer in p.peers()), "the publisher knows")
        before = relay.stats()["served_bytes"]
        with tl.init("second", **REMOTE) as second:
            pull(second)
        assert relay.stats()["served_bytes"] == before
        with tl.init("somebody", **REMOTE):
            assert begun.end() is None
        assert draining.end() is None
        passing_on.close()
