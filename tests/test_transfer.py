"""Operations in flight: awaited, waited for, cancelled, dropped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorlink as tl
from tests.joined import Pair, pair
from tests.peer import DEADLINE_S, Peer, kept, nursery, say, spawn

__all__ = ["nursery", "pair", "spawn"]

MIB = 1 << 20


# What the children do


def put_and_keep(nbytes: int, fill: int) -> tl.TensorRef:
    kept["ref"] = tl.put(np.full(nbytes, fill, np.uint8))
    ref: tl.TensorRef = kept["ref"]
    return ref


def release_kept() -> None:
    kept.pop("ref").release()


def send_in_tasks(to: str, tag: str, count: int) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(*(tl.isend(np.full(20_000, i, np.uint8), to, tag=f"{tag}{i}") for i in range(count)))

    asyncio.run(all_of_them())


def drop_everything(owner: tl.TensorRef) -> None:
    """Leaves transfers of every kind unfinished and unreferenced."""
    tl.irecv(tag="never")
    tl.irecv("a", tag="never", out=np.empty(5))
    tl.isend(np.ones(8 * MIB, np.uint8), "nobody", timeout=DEADLINE_S)
    tl.iget(owner, out=np.empty(owner.nbytes, np.uint8))
    kept["view"] = tl.get(owner)
    kept["pending"] = tl.irecv("a", tag="never")
    gc.collect()


def leave_a_waiting_thread() -> None:
    thread = threading.Thread(target=lambda: (say("waits"), tl.recv(tag="never", timeout=None)), daemon=True)
    thread.start()


# Waiting


def test_receives_get_messages_in_the_order_of_posting(pair: Pair) -> None:
    a, b = pair
    posted = [a.irecv("b" if i % 2 else None, tag="order") for i in range(20)]
    for i in range(20):
        b.call(tl.send, i, "a", tag="order")
    assert [one.wait(DEADLINE_S) for one in posted] == list(range(20))


def test_every_waiter_gets_the_same_result(pair: Pair) -> None:
    a, b = pair
    receiving = a.irecv("b", tag="same")
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(receiving.wait(DEADLINE_S))) for _ in range(4)]
    for thread in threads:
        thread.start()
    b.call(tl.send, np.arange(100_000), "a", tag="same")
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(results) == 4
    assert all(result is results[0] for result in results)
    assert receiving.done()
    assert receiving.result() is results[0]


def test_a_wait_that_is_over_leaves_the_transfer_going(pair: Pair) -> None:
    a, b = pair
    receiving = a.irecv("b", tag="slow")
    with pytest.raises(tl.TransferTimeoutError):
        receiving.wait(0.05)
    with pytest.raises(tl.TransferTimeoutError):
        receiving.result()
    b.call(tl.send, 1, "a", tag="slow")
    assert receiving.wait(DEADLINE_S) == 1


def test_wait_for_all_and_for_any(pair: Pair) -> None:
    a, b = pair
    one, two = a.irecv("b", tag="one"), a.irecv("b", tag="two")
    with pytest.raises(tl.TransferTimeoutError):
        tl.wait([one, two], timeout=0.05)
    b.call(tl.send, 1, "a", tag="one")
    assert tl.wait([one, two], timeout=DEADLINE_S, any=True) == [one]
    b.call(tl.send, 2, "a", tag="two")
    assert tl.wait([one, two], timeout=DEADLINE_S) == [one, two]
    assert tl.wait([], timeout=0) == []


def test_a_failed_transfer_counts_as_ended(pair: Pair) -> None:
    a, _ = pair
    failed, waiting = a.irecv("b", tag="x", timeout=0.05), a.irecv("b", tag="never")
    assert tl.wait([waiting, failed], timeout=DEADLINE_S, any=True) == [failed]
    with pytest.raises(tl.TransferTimeoutError):
        failed.result()
    waiting.cancel()


def test_iget_into_out(pair: Pair) -> None:
    a, b = pair
    ref = b.call(put_and_keep, 4 * MIB, 3)
    out = np.zeros(4 * MIB, np.uint8)
    assert a.iget(ref, out=out).wait(DEADLINE_S) is out
    assert (out == 3).all()
    assert (a.iget(ref).wait(DEADLINE_S) == 3).all()
    b.call(release_kept)
    with pytest.raises(tl.StaleRefError):
        a.iget(ref).wait(DEADLINE_S)


def test_path_names_the_transport(pair: Pair) -> None:
    a, b = pair
    ref = b.call(put_and_keep, 4 * MIB, 3)
    a.get(ref)
    transfer = a.iget(ref)
    transfer.wait(DEADLINE_S)
    assert transfer.path == os.environ.get("TENSORLINK_TRANSPORTS", "shm")
    b.call(release_kept)


# Cancelling


def test_a_cancelled_receive_takes_nothing(pair: Pair) -> None:
    a, b = pair
    first, second = a.irecv("b", tag="cancel"), a.irecv("b", tag="cancel")
    assert first.cancel()
    assert first.done()
    with pytest.raises(tl.TransferCancelledError):
        first.result()
    b.call(tl.send, "kept", "a", tag="cancel")
    assert second.wait(DEADLINE_S) == "kept"
    assert not second.cancel()
    assert second.result() == "kept"


def test_cancelling_one_whose_message_has_come_gives_the_message_to_the_next(pair: Pair) -> None:
    a, b = pair
    first = a.irecv("b", tag="come")
    for i in range(3):
        b.call(tl.send, i, "a", tag="come")
    first.cancel()
    assert [a.recv("b", tag="come", timeout=DEADLINE_S) for _ in range(3)] == [0, 1, 2]


def test_a_cancelled_send_is_not_delivered(pair: Pair) -> None:
    a, _ = pair
    sending = a.isend(1, "nobody", timeout=DEADLINE_S)
    assert sending.cancel()
    with pytest.raises(tl.TransferCancelledError):
        sending.wait(DEADLINE_S)


@pytest.mark.parametrize("end", ["cancel", "timeout"])
def test_after_its_end_a_transfer_writes_no_more(pair: Pair, end: str) -> None:
    a, b = pair
    ref = b.call(put_and_keep, 256 * MIB, 3)
    for attempt in range(4):
        out = np.zeros(256 * MIB, np.uint8)
        transfer = a.iget(ref, out=out, timeout=0.005 * attempt if end == "timeout" else DEADLINE_S)
        if end == "cancel":
            transfer.cancel()
        else:
            with contextlib.suppress(tl.TransferTimeoutError):
                transfer.wait(DEADLINE_S)
        before = out[:: MIB // 4].copy()
        a.get(ref, out=np.empty(256 * MIB, np.uint8))  # as long as the transfer would have gone on
        assert (out[:: MIB // 4] == before).all()
    b.call(release_kept)


def test_a_cancelled_receive_with_out_writes_no_more_and_takes_nothing(pair: Pair) -> None:
    a, b = pair
    b.call(send_large, "a")
    out = np.zeros(64 * MIB, np.uint8)
    receiving = a.irecv("b", tag="large", out=out)
    thread = threading.Thread(target=lambda: _quietly(receiving.wait))
    thread.start()
    cancelled = receiving.cancel()
    before = out[::4096].copy()
    thread.join(DEADLINE_S)
    assert (out[::4096] == before).all()
    if cancelled:
        assert (a.recv("b", tag="large", timeout=DEADLINE_S) == 5).all()
    else:
        assert (out == 5).all()


def send_large(to: str) -> None:
    tl.send(np.full(64 * MIB, 5, np.uint8), to, tag="large")


def _quietly(wait: Callable[[], Any]) -> None:
    with contextlib.suppress(tl.TransferCancelledError):
        wait()


# asyncio


def test_a_hundred_receives_gathered(pair: Pair) -> None:
    a, b = pair
    b.start(send_in_tasks, "a", "g", 100)

    async def gather() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*(a.irecv("b", tag=f"g{i}") for i in range(100))), DEADLINE_S)

    for i, got in enumerate(asyncio.run(gather())):
        assert (got == i).all()
    b.finish()


def test_loops_of_several_threads(pair: Pair) -> None:
    a, b = pair
    got: dict[int, list[Any]] = {}

    def run(loop_number: int) -> None:
        async def receive() -> None:
            tasks = [a.irecv("b", tag=f"loop{loop_number}{i}") for i in range(10)]
            got[loop_number] = await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)

        asyncio.run(receive())

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for loop_number in reversed(range(4)):
        b.call(send_in_tasks, "a", f"loop{loop_number}", 10)
    for thread in threads:
        thread.join(DEADLINE_S)
    for loop_number in range(4):
        assert [int(one[0]) for one in got[loop_number]] == list(range(10))


def test_a_task_whose_wait_is_cut_short_takes_nothing(pair: Pair) -> None:
    a, b = pair

    async def cut_short() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(a.irecv("b", tag="cut"), 0.05)

    asyncio.run(cut_short())
    b.call(tl.send, "whole", "a", tag="cut")
    assert a.recv("b", tag="cut", timeout=DEADLINE_S) == "whole"


def test_awaiting_gives_results_and_errors(pair: Pair) -> None:
    a, b = pair
    ref = b.call(put_and_keep, MIB, 4)

    async def everything() -> None:
        await a.isend("hi", "b", tag="await")
        assert (await a.iget(ref))[0] == 4
        out = np.zeros(MIB, np.uint8)
        assert (await a.iget(ref, out=out)) is out
        with pytest.raises(tl.TransferTimeoutError):
            await a.irecv("b", tag="await", timeout=0.05)
        with pytest.raises(tl.PeerUnknownError):
            await a.isend(1, "nobody", timeout=0.05)
        with pytest.raises(tl.LayoutMismatchError):
            await a.iget(ref, out=np.zeros(3))

    asyncio.run(asyncio.wait_for(everything(), DEADLINE_S))
    assert b.call(tl.recv, "a", tag="await") == "hi"
    b.call(release_kept)


def test_a_loop_goes_on_while_it_waits(pair: Pair) -> None:
    a, b = pair

    async def both() -> int:
        receiving = asyncio.ensure_future(a.irecv("b", tag="tick"))
        turns = 0
        while turns < 10:
            await asyncio.sleep(0)
            turns += 1
        assert not receiving.done()
        b.start(tl.send, "now", "a", tag="tick")
        assert await asyncio.wait_for(receiving, DEADLINE_S) == "now"
        return turns

    assert asyncio.run(both()) == 10
    b.finish()


# Being dropped


def test_transfers_dropped_while_pending_harm_nobody(spawn: Callable[..., Peer]) -> None:
    child = spawn()
    with tl.init("a") as a:
        child.call(tl.init, "dropper")
        child.call(drop_everything, a.put(np.ones(4 * MIB, np.uint8)))
        child.call(leave_a_waiting_thread)
        assert child.hear() == "waits"
        assert child.exit() == 0
        a.send(1, "a")
        assert a.recv() == 1
