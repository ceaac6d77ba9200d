"""A peer that says nothing: who connects to it waits no longer than a deadline or a cancel allows, whoever else waits for it."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import tensorlink as tl
from tensorlink import _core
from tensorlink.testing.faults import Relay
from tensorlink.testing.pairs import Side
from tensorlink.transports.tcp import TcpAddress
from tensorlink.types import PeerId
from tests.peer import DEADLINE_S, Peer, eventually, kept, nursery, spawn

__all__ = ["nursery", "spawn"]

pytestmark = pytest.mark.chaos

GRACE_S = 2.0  # a second, and as much again for a busy machine
SILENT = {"TENSORLINK_TOKEN": "a secret of the tests", "TENSORLINK_LEASE_S": "30"}  # it stays a member meanwhile


def own(nbytes: int) -> tl.TensorRef:
    kept["own"] = tl.put(np.ones(nbytes, np.uint8))
    return kept["own"]


def publish() -> None:
    kept["publisher"] = tl.WeightPublisher("policy", {"w": np.ones(9, np.float32)})
    kept["publisher"].publish()


def with_a_silent_owner(spawn: Callable[..., Peer], transport: str, then: Callable[[tl.Endpoint, Peer], None]) -> None:
    peer = spawn(TENSORLINK_TRANSPORTS=transport, **SILENT)
    peer.call(tl.init, "b")
    with tl.init("a", transports=transport, token=SILENT["TENSORLINK_TOKEN"], lease_s=30) as link:
        try:
            then(link, peer)
        finally:
            peer.signal(signal.SIGCONT)
        peer.call(tl.shutdown)


def cancels_in_time(link: tl.Endpoint, ref: tl.TensorRef) -> None:
    out = np.zeros(ref.nbytes, np.uint8)
    transfer = link.iget(ref, out=out, timeout=DEADLINE_S)
    try:
        transfer.wait(0.1)
    except tl.TransferTimeoutError:
        began = time.monotonic()
        assert transfer.cancel()
        assert time.monotonic() - began < GRACE_S
        landed = np.count_nonzero(out)
        assert not landed or link.settings.transports == "shm"  # this process copies, from memory that it has mapped
        assert np.count_nonzero(out) == landed
    else:
        assert out.all()  # its memory was mapped here already


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_cancel_waits_for_no_silent_owner(spawn: Callable[..., Peer], transport: str) -> None:
    def then(link: tl.Endpoint, peer: Peer) -> None:
        ref = peer.call(own, 100_000)
        peer.signal(signal.SIGSTOP)
        cancels_in_time(link, ref)  # while it connects
        peer.signal(signal.SIGCONT)
        assert link.get(ref).all()
        ref = peer.call(own, 40 << 20)  # perhaps in memory that isn't mapped here yet
        peer.signal(signal.SIGSTOP)
        cancels_in_time(link, ref)

    with_a_silent_owner(spawn, transport, then)


def test_who_waits_for_another_thread_to_connect_has_a_deadline_too(spawn: Callable[..., Peer]) -> None:
    def then(link: tl.Endpoint, peer: Peer) -> None:
        ref = peer.call(own, 1000)
        peer.signal(signal.SIGSTOP)
        slow = link.iget(ref, out=np.zeros(1000, np.uint8), timeout=DEADLINE_S)
        began = time.monotonic()
        ended = threading.Barrier(3)

        def send() -> None:
            with pytest.raises(tl.TransferTimeoutError):
                link.send(1, "b", timeout=0.2)
            ended.wait(DEADLINE_S)

        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
        ended.wait(DEADLINE_S)
        assert time.monotonic() - began < 0.2 + GRACE_S
        for thread in threads:
            thread.join()
        assert slow.cancel()

    with_a_silent_owner(spawn, "tcp", then)


@contextlib.contextmanager
def a_port_that_says_nothing() -> Iterator[tuple[Side, Callable[..., None]]]:
    """A side, and how it connects there, until a stop."""
    near = Side("tcp", "near", 1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        there = TcpAddress("127.0.0.1", mute.getsockname()[1], "00" * 16).encode()
        yield near, lambda stop=None: near.transport.connect(PeerId("far", 1), there, None, DEADLINE_S, stop)
    near.shutdown()


def test_ctrl_c_while_it_connects() -> None:
    with a_port_that_says_nothing() as (_, connect):
        began = time.monotonic()
        timer = threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            connect()
        timer.join()
        assert time.monotonic() - began < GRACE_S


def test_its_engine_is_closed_while_it_connects() -> None:
    with a_port_that_says_nothing() as (near, connect):
        began = time.monotonic()
        timer = threading.Timer(0.1, near.engine.close)
        timer.start()
        with pytest.raises(tl.ClosedError):
            connect()
        timer.join()
        assert time.monotonic() - began < GRACE_S


def test_a_cancel_while_it_connects() -> None:
    with a_port_that_says_nothing() as (_, connect):
        stop, began = _core.Stop(), time.monotonic()
        timer = threading.Timer(0.1, stop.set)
        timer.start()
        with pytest.raises(tl.TransferCancelledError):
            connect(stop)
        timer.join()
        assert time.monotonic() - began < GRACE_S


def test_who_may_be_cancelled_has_all_its_time_for_a_slow_handshake() -> None:
    """It takes longer than a cancel would."""
    both = {"transports": "tcp", "token": SILENT["TENSORLINK_TOKEN"]}
    with tl.init("owner", **both) as owner, tl.init("reader", **both) as reader:
        transport = owner._links.transports["tcp"]
        address = TcpAddress.decode(transport.address())
        with Relay("127.0.0.1", address.port) as relay:
            told = dataclasses.replace(address, port=relay.port).encode()
            transport.address = lambda: told  # type: ignore[method-assign]
            relay.delay(0.3)
            assert reader.iget(owner.put(np.ones(10, np.uint8)), timeout=DEADLINE_S).wait(DEADLINE_S).all()
            relay.heal()


def test_a_shutdown_ends_what_waits_for_a_silent_owner(spawn: Callable[..., Peer]) -> None:
    def then(link: tl.Endpoint, peer: Peer) -> None:
        ref = peer.call(own, 1000)
        peer.signal(signal.SIGSTOP)
        ends: queue.SimpleQueue[tuple[BaseException | None, float]] = queue.SimpleQueue()

        def read() -> None:
            try:
                link.get(ref, timeout=DEADLINE_S)
            except tl.TensorLinkError as error:
                ends.put((error, time.monotonic()))

        threads = [threading.Thread(target=read) for _ in range(3)]  # one connects, two wait for it
        for thread in threads:
            thread.start()
        eventually(lambda: link._links._dialling, "it connects")
        began = time.monotonic()
        link.shutdown()
        for _ in threads:
            error, at = ends.get(timeout=DEADLINE_S)
            assert isinstance(error, tl.ClosedError) and at - began < GRACE_S
        for thread in threads:
            thread.join()

    with_a_silent_owner(spawn, "tcp", then)


def test_a_pull_from_a_silent_publisher_ends_at_its_deadline(spawn: Callable[..., Peer]) -> None:
    def then(link: tl.Endpoint, peer: Peer) -> None:
        peer.call(publish)
        peer.signal(signal.SIGSTOP)
        subscriber = tl.WeightSubscriber("policy", {"w": np.zeros(9, np.float32)}, endpoint=link)
        began = time.monotonic()
        with pytest.raises(tl.TransferTimeoutError):
            subscriber.pull(timeout=0.2)
        assert time.monotonic() - began < 0.2 + GRACE_S
        pull = subscriber.ipull(timeout=None)
        with pytest.raises(tl.TransferTimeoutError):
            pull.wait(0.1)
        began = time.monotonic()
        assert pull.cancel()
        assert time.monotonic() - began < GRACE_S

    with_a_silent_owner(spawn, "tcp", then)
