"""Transfers between hosts that are given up while bytes arrive: by asyncio, by Ctrl-C, or because nobody holds them any more."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tensorlink as tl
from tests.peer import eventually

MIB = 1 << 20
NBYTES = 32 * MIB
RATE = 16 * MIB
Array = np.ndarray[Any, np.dtype[np.uint8]]


@contextlib.contextmanager
def ends() -> Iterator[tuple[tl.Endpoint, tl.Endpoint]]:
    """An owner that is slow to send, and a reader."""
    with (
        tl.init("owner", transports="tcp", token="for this test", max_bytes_per_s=RATE) as owner,
        tl.init("reader", transports="tcp", token="for this test") as reader,
    ):
        yield owner, reader


def nothing_lands_any_more(out: Array, owner: tl.Endpoint, reader: tl.Endpoint) -> None:
    """For as long as 4 MiB take, which would be as many bytes of another transfer."""
    assert not out.all(), "it had not ended"
    seen = out.copy()
    reader.get(owner.put(np.ones(4 * MIB, np.uint8)), out=np.empty(4 * MIB, np.uint8))
    assert np.array_equal(out, seen)


async def cut_in_the_middle(awaitable: Awaitable[Any], out: Array, how: str) -> None:
    async def wait() -> Any:
        return await awaitable

    task = asyncio.ensure_future(awaitable) if how == "future" else asyncio.create_task(wait())
    while not out[MIB]:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("how", ["future", "task"])
def test_cancelling_a_task_is_a_fence_for_the_read_that_it_awaits(how: str) -> None:
    with ends() as (owner, reader):
        out = np.zeros(NBYTES, np.uint8)
        transfer = reader.iget(owner.put(np.ones(NBYTES, np.uint8)), out=out)
        asyncio.run(cut_in_the_middle(transfer, out, how))
        assert transfer.done()
        nothing_lands_any_more(out, owner, reader)


@pytest.mark.parametrize("into", ["out", "nothing"])
def test_a_receive_that_was_cut_in_the_middle_consumed_nothing(into: str) -> None:
    with ends() as (owner, reader):
        owner.send(np.full(NBYTES, 7, np.uint8), "reader")
        owner.send("second", "reader")
        out = np.zeros(NBYTES, np.uint8) if into == "out" else None

        async def cut() -> None:
            task = asyncio.ensure_future(reader.irecv("owner", out=out))
            while "reader" not in owner._engine.usage()["holders"]:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cut())
        if out is not None:
            nothing_lands_any_more(out, owner, reader)
        assert bool((reader.recv("owner") == 7).all())
        assert reader.recv("owner") == "second"


def test_a_pull_that_was_cut_in_the_middle_leaves_into_as_it_was() -> None:
    with ends() as (owner, reader):
        state = {"w": np.zeros(NBYTES, np.uint8)}
        publisher = tl.WeightPublisher("policy", {"w": np.ones(NBYTES, np.uint8)}, endpoint=owner)
        publisher.publish()
        subscriber = tl.WeightSubscriber("policy", state, endpoint=reader)

        async def cut() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(subscriber.ipull(), 0.5)

        asyncio.run(cut())
        nothing_lands_any_more(state["w"], owner, reader)
        assert not state["w"].any() and subscriber.version is None
        assert subscriber.pull() == 1 and state["w"].all()


def test_ctrl_c_ends_a_read_whose_bytes_keep_coming() -> None:
    """The signal comes to another thread, as it were between two waits: none is interrupted."""
    with ends() as (owner, reader):
        out = np.zeros(2 * NBYTES, np.uint8)
        ref = owner.put(np.ones(2 * NBYTES, np.uint8))
        interrupted: list[float] = []

        def interrupt() -> None:
            eventually(lambda: out[MIB], "bytes arrive")
            interrupted.append(time.monotonic())
            signal.raise_signal(signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            reader.get(ref, out=out)
        assert time.monotonic() - interrupted[0] < 3  # a second by the contract, and time for a busy machine
        thread.join()
        nothing_lands_any_more(out, owner, reader)


def test_a_read_that_nobody_can_ask_for_is_cancelled() -> None:
    with ends() as (owner, reader):
        out = np.zeros(NBYTES, np.uint8)
        transfers = [reader.iget(owner.put(np.ones(NBYTES, np.uint8)), out=out)]
        eventually(lambda: out[MIB], "bytes arrive")
        transfers.clear()
        nothing_lands_any_more(out, owner, reader)


def test_a_send_goes_on_though_nobody_asks_for_it() -> None:
    with ends() as (owner, _):
        sent: list[Callable[..., Any]] = [owner.isend(np.full(MIB, 3, np.uint8), "late").wait]
        sent.clear()
        with tl.init("late", transports="tcp", token="for this test") as late:
            assert bool((late.recv("owner") == 3).all())
