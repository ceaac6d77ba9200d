"""`put`, `get` and tensors in the pool: who may read what, for how long, and what forged handles are worth."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import statistics
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tensorlink as tl
from tests.joined import Pair, join, pair
from tests.peer import DEADLINE_S, Peer, eventually, kept, nursery, say, spawn

__all__ = ["join", "nursery", "pair", "spawn"]

MIB = 1 << 20


# What the children do


def put_and_keep(obj: Any, **how: Any) -> tl.TensorRef:
    ref = tl.put(obj, **how)
    kept.setdefault("refs", []).append(ref)
    return ref


def sum_of(ref: tl.TensorRef) -> float:
    return float(tl.get(ref).sum())


def hold(ref: tl.TensorRef) -> float:
    kept["view"] = tl.get(ref)
    return float(kept["view"].sum())


def sum_of_held() -> float:
    return float(kept["view"].sum())


def drop_held() -> None:
    kept.clear()
    gc.collect()


def write_to_held(value: int) -> None:
    kept["view"][:] = value


def watch_held(fill: int) -> bool:
    """Looks at the held view until a message comes; whether it was right all the time."""
    right = True
    say("watching")
    while right:
        right = bool((kept["view"] == fill).all())
        try:
            tl.recv(tag="stop watching", timeout=0)
        except tl.TransferTimeoutError:
            continue
        return right
    return False


def pool_used() -> int:
    used: int = tl.stats()["pool"]["used_bytes"]
    return used


# Reading


@pytest.mark.parametrize("size", [0, 1, 1000, 100_000, 20 * MIB])
def test_what_was_put_is_read_elsewhere_and_here(pair: Pair, size: int) -> None:
    a, b = pair
    for obj in (np.ones(size, np.uint8), torch.ones(size, dtype=torch.uint8)):
        with a.put(obj) as ref:
            assert (ref.shape, ref.dtype, ref.nbytes, ref.owner) == ((size,), "uint8", size, a.id)
            assert len(ref.to_bytes()) < 1024
            assert tl.TensorRef.from_bytes(ref.to_bytes()) == ref
            assert b.call(sum_of, ref) == size
            assert float(a.get(ref).sum()) == size


def test_a_put_is_a_snapshot(pair: Pair) -> None:
    a, b = pair
    array = np.ones(MIB, np.uint8)
    with a.put(array) as ref:
        array[:] = 5
        assert b.call(sum_of, ref) == MIB


def test_a_tree_with_aliases_and_every_kind_of_leaf(pair: Pair) -> None:
    a, b = pair
    shared = torch.arange(5.0)
    tree = {"a": shared, "b": [shared, None, True, 3, 2.5, "t", b"b"], "c": (np.ones((2, 0)), np.ones(()))}
    ref = b.call(put_and_keep, tree)
    got = a.get(ref)
    assert got["a"] is got["b"][0] or got["a"].data_ptr() == got["b"][0].data_ptr()
    assert got["b"][1:] == [None, True, 3, 2.5, "t", b"b"]
    assert got["c"][0].shape == (2, 0)
    assert got["c"][1].shape == ()
    with pytest.raises(TypeError):
        _ = ref.shape


@pytest.mark.parametrize("count", [100, 3000])
def test_a_tree_whose_description_lies_in_the_pool_is_mapped_too(pair: Pair, count: int) -> None:
    """Its tensors lie behind the description, and readers of torch tensors map whole pages."""
    a, b = pair
    tree = [torch.full((64, 8), float(i)) for i in range(count)]
    ref = b.call(put_and_keep, tree)
    got = a.get(ref)
    assert all(torch.equal(one, other) for one, other in zip(got, tree, strict=True))
    got[0].fill_(-1)
    assert float(a.get(ref)[0].sum()) == 0.0
    b.call(drop_held)


def test_get_into_out(pair: Pair) -> None:
    a, b = pair
    ref = b.call(put_and_keep, {"x": np.arange(100_000), "y": torch.ones(3)})
    out = {"x": torch.zeros(100_000, dtype=torch.int64), "y": np.zeros(3, np.float32)}
    got = a.get(ref, out=out)
    assert got["x"] is out["x"]
    assert out["x"].sum() == sum(range(100_000))
    assert out["y"].tolist() == [1, 1, 1]
    wrong = {"x": np.full(100_000, 7, np.float32), "z": np.zeros(3)}
    with pytest.raises(tl.LayoutMismatchError, match="x"):
        a.get(ref, out=wrong)
    assert (wrong["x"] == 7).all()


def test_a_numpy_view_is_read_only(pair: Pair) -> None:
    a, b = pair
    view = a.get(b.call(put_and_keep, np.ones(MIB, np.uint8)))
    assert not view.flags.writeable
    with pytest.raises(ValueError):
        view[0] = 1
    with pytest.raises(ValueError):
        view.flags.writeable = True


def test_what_a_reader_writes_is_its_own(pair: Pair) -> None:
    a, b = pair
    with a.put(torch.ones(4 * MIB, dtype=torch.uint8)) as ref:
        b.call(hold, ref)
        mine, other = a.get(ref), a.get(ref)
        b.call(write_to_held, 7)
        mine[:] = 9
        assert int(other.sum()) == 4 * MIB
        assert int(a.get(ref).sum()) == 4 * MIB
        assert b.call(sum_of_held) == 7 * 4 * MIB
        assert b.call(sum_of, ref) == 4 * MIB
        b.call(drop_held)
        del mine, other


def test_pages_that_a_reader_wrote_do_not_show_in_a_later_block(join: Callable[..., Peer]) -> None:
    with tl.init("a", pool_bytes=8 * MIB) as a:
        b = join("b")
        for fill in range(1, 8):  # there is room for one of them only, so all lie in the same memory
            with a.put(torch.full((6 * MIB,), fill, dtype=torch.uint8)) as ref:
                assert b.call(hold, ref) == fill * 6 * MIB
                b.call(write_to_held, 200)
                b.call(drop_held)
            eventually(lambda: a.stats()["pool"]["used_bytes"] == 0, "the block came back")


# Handles


def test_a_released_handle_is_stale_and_views_of_it_stay(pair: Pair) -> None:
    a, b = pair
    ref = b.call(put_and_keep, np.full(MIB, 3, np.uint8))
    view = a.get(ref)
    b.call(release_last)
    with pytest.raises(tl.StaleRefError):
        a.get(ref)
    for _ in range(20):
        b.call(tl.send, np.zeros(MIB, np.uint8), "b", tag="churn")
        b.call(recv_and_drop, "churn")
    assert (view == 3).all()


def release_last() -> None:
    kept["refs"].pop().release()


def recv_and_drop(tag: str) -> None:
    tl.recv(tag=tag)


def test_only_the_owner_releases(pair: Pair) -> None:
    a, b = pair
    ref = b.call(put_and_keep, 1)
    for attempt in (ref.release, lambda: a.release(ref)):
        with pytest.raises(tl.StaleRefError):
            attempt()
    own = a.put(1)
    a.release(tl.TensorRef.from_bytes(own.to_bytes()))
    own.release()
    with pytest.raises(tl.StaleRefError):
        a.get(own)


def test_reads_are_counted(pair: Pair) -> None:
    a, b = pair
    ref = a.put(np.ones(MIB, np.uint8), reads=2)
    assert b.call(hold, ref) == MIB
    with pytest.raises(tl.LayoutMismatchError):  # what fails is no read
        a.get(ref, out=np.zeros(3))
    assert float(a.get(ref).sum()) == MIB
    with pytest.raises(tl.StaleRefError):
        eventually(lambda: a.get(ref) is None, "two reads ended it", 10)
    assert b.call(sum_of_held) == MIB
    b.call(drop_held)


def test_a_handle_lives_for_its_ttl(pair: Pair) -> None:
    a, b = pair
    before = a.stats()["pool"]["handles"]
    ref = a.put(np.ones(MIB, np.uint8), ttl=0.3)
    assert b.call(sum_of, ref) == MIB
    eventually(lambda: a.stats()["pool"]["handles"] == before, "it expired")
    with pytest.raises(tl.StaleRefError):
        b.call(sum_of, ref)


def test_senseless_lives_are_refused(pair: Pair) -> None:
    a, _ = pair
    for how in ({"reads": 0}, {"reads": -1}, {"ttl": 0}, {"ttl": -1}, {"ttl": float("nan")}):
        with pytest.raises(ValueError):
            a.put(1, **how)


@pytest.mark.shm
def test_pool_tensors_are_shared_where_they_lie(pair: Pair) -> None:
    a, b = pair
    for like in ("numpy", "torch"):
        tensor = a.empty(2 * MIB, np.uint8, like=like)
        tensor[:] = 1
        used = a.stats()["pool"]["used_bytes"]
        with a.put({"x": tensor, "part": tensor[MIB:]}, copy=False) as ref:
            assert a.stats()["pool"]["used_bytes"] == used
            view = a.get(ref, like="numpy")
            tensor[0] = 9  # not allowed, but it shows that the memory is the same
            assert view["x"][0] == 9
            assert b.call(first_of, ref) == 9
        del tensor, view, ref
        eventually(lambda used=used: gc.collect() or a.stats()["pool"]["used_bytes"] <= used - 2 * MIB, "it came back")


def first_of(ref: tl.TensorRef) -> int:
    return int(tl.get(ref)["x"][0])


def test_a_pool_tensor_outlives_its_handle_and_a_handle_its_tensor(pair: Pair) -> None:
    a, b = pair
    tensor = a.empty(MIB, torch.uint8)
    tensor[:] = 1
    with a.put(tensor, copy=False):
        pass
    assert int(tensor.sum()) == MIB
    ref = a.put(tensor, copy=False)
    del tensor
    gc.collect()
    assert b.call(sum_of, ref) == MIB
    ref.release()


def test_ordinary_memory_can_be_put_without_a_copy_too(pair: Pair) -> None:
    a, b = pair
    array = np.ones(MIB, np.uint8)
    with a.put(array, copy=False) as ref:
        assert b.call(sum_of, ref) == MIB


# Forged and stale handles


def test_bytes_that_are_no_handle(pair: Pair) -> None:
    a, _ = pair
    good = a.put(np.ones(MIB, np.uint8)).to_bytes()
    chance = random.Random(7)
    for _ in range(300):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            ref = tl.TensorRef.from_bytes(bytes(data[: chance.choice([len(data), chance.randrange(len(data))])]))
            if ref.owner == a.id:  # others may point to hosts that are not there
                a.get(ref, timeout=1)
        except (tl.TensorLinkError, TypeError):
            continue
    for _ in range(300):
        with pytest.raises(tl.CorruptTransferError):
            tl.TensorRef.from_bytes(chance.randbytes(chance.randrange(200)))
            raise tl.CorruptTransferError("random bytes may be a handle once in a while")


def _descriptor(like: bytes, segment: int, offset: int, nbytes: int) -> bytes:
    """As `like`, whose one extent (segment, offset, bytes) stands at its end, with another extent."""
    changed = bytearray(like)
    changed[-24:] = struct.pack("<QQQ", segment, offset, nbytes)
    return bytes(changed)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, 2**64 - 1),
        (2**64 - 4096, MIB),
        (2**63, MIB),
        (0, 2**40),
        (1 << 40, MIB),
        (64 * MIB, 4096),
        (4096 * 3 + 1, MIB),
    ],
)
def test_a_handle_that_reaches_outside_is_refused(pair: Pair, offset: int, nbytes: int) -> None:
    a, b = pair
    ref = b.call(put_and_keep, torch.ones(MIB, dtype=torch.uint8))
    a.get(ref)
    for good in ref.descriptors.values():
        forged = _descriptor(good, struct.unpack("<Q", good[-24:-16])[0], offset, nbytes)
        with pytest.raises(tl.TensorLinkError):
            a.get(dataclasses.replace(ref, descriptors=dict.fromkeys(ref.descriptors, forged)), timeout=1)
    assert float(a.get(ref).sum()) == MIB


def test_a_handle_with_another_id_or_segment_is_refused(pair: Pair) -> None:
    a, b = pair
    ref = b.call(put_and_keep, np.ones(MIB, np.uint8))
    for other in (ref.id + 1, ref.id ^ (1 << 20), 1, 2**64 - 1):
        with pytest.raises((tl.StaleRefError, tl.CorruptTransferError)):
            a.get(dataclasses.replace(ref, id=other), timeout=1)
    forged = _descriptor(next(iter(ref.descriptors.values())), 9999, 0, MIB)
    started = time.monotonic()
    with pytest.raises((tl.StaleRefError, tl.CorruptTransferError)):
        a.get(dataclasses.replace(ref, descriptors=dict.fromkeys(ref.descriptors, forged)), timeout=10)
    assert time.monotonic() - started < 5


def test_meta_that_lies_about_lengths_is_refused(pair: Pair) -> None:
    a, b = pair
    ref = b.call(put_and_keep, {"x": np.ones(MIB, np.uint8), "y": [1, "text", torch.ones(70_000)]})
    chance = random.Random(5)
    for _ in range(500):
        meta = bytearray(ref.meta)
        meta[chance.randrange(len(meta))] = chance.randrange(256)
        try:
            got = a.get(dataclasses.replace(ref, meta=bytes(meta)), timeout=1)
        except (tl.TensorLinkError, TypeError):
            continue
        _touch(got)


def _touch(obj: Any) -> None:
    if isinstance(obj, dict):
        for value in obj.values():
            _touch(value)
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            _touch(value)
    elif isinstance(obj, (np.ndarray, torch.Tensor)) and obj.dtype in (np.uint8, torch.float32):
        obj.sum()


def test_a_dead_owner_and_its_successor(join: Callable[..., Peer]) -> None:
    with tl.init("a") as a:
        owner = join("owner")
        ref = owner.call(put_and_keep, np.full(MIB, 1, np.uint8))
        unread = owner.call(put_and_keep, np.full(MIB, 1, np.uint8))
        view = a.get(ref)
        owner.kill()
        for stale in (ref, unread):
            with pytest.raises(tl.PeerLostError):
                while True:  # until the news of its death is here
                    a.get(stale, timeout=5)
        successor = join("owner")
        eventually(lambda: "owner" in [peer.name for peer in a.peers()], "it is back")
        for stale in (ref, unread):
            with pytest.raises(tl.PeerRestartedError):
                a.get(stale, timeout=5)
        assert a.get(successor.call(put_and_keep, np.full(MIB, 2, np.uint8)))[0] == 2
        assert (view == 1).all()


# The pool


@pytest.mark.shm
def test_a_full_pool_names_who_holds_it(join: Callable[..., Peer]) -> None:
    with tl.init("a", pool_bytes=32 * MIB, timeout=4) as a:
        reader = join("slow-reader")
        with a.put(np.ones(20 * MIB, np.uint8)) as ref:
            reader.call(hold, ref)
        with pytest.raises(
            tl.PoolExhaustedError, match=rf"slow-reader \(pid {reader.pid}\) holds 1 views of 20,971,520"
        ):
            a.put(np.ones(20 * MIB, np.uint8))
        with pytest.raises(tl.PoolExhaustedError):
            a.empty(20 * MIB, np.uint8)
        with pytest.raises(tl.PoolExhaustedError):
            a.put(np.ones(33 * MIB, np.uint8))
        reader.call(drop_held)
        a.put(np.ones(20 * MIB, np.uint8)).release()


@pytest.mark.shm
def test_a_killed_reader_gives_back_what_it_held(join: Callable[..., Peer]) -> None:
    with tl.init("a") as a:
        base = a.stats()["pool"]["used_bytes"]
        reader = join("reader")
        with a.put(np.ones(20 * MIB, np.uint8)) as ref:
            reader.call(hold, ref)
        a.send(np.ones(10 * MIB, np.uint8), "reader")  # never received
        assert a.stats()["pool"]["used_bytes"] >= base + 30 * MIB
        reader.kill()
        eventually(lambda: a.stats()["pool"]["used_bytes"] == base, "all came back")


def test_what_nobody_ever_read_comes_back_after_its_ttl(pair: Pair) -> None:
    a, _ = pair
    gc.collect()
    base = eventually(lambda: a.stats()["pool"]["used_bytes"] + 1, "") - 1
    a.put(np.ones(MIB, np.uint8), ttl=0.1)
    eventually(lambda: a.stats()["pool"]["used_bytes"] <= base, "it came back")


def test_a_reader_stopped_for_three_leases_wakes_to_the_right_bytes(join: Callable[..., Peer]) -> None:
    with tl.init("a", lease_s=1.0, pool_bytes=64 * MIB) as a:
        reader = join("reader", TENSORLINK_LEASE_S="1")
        with a.put(np.full(8 * MIB, 77, np.uint8)) as ref:
            reader.call(hold, ref)
            reader.start(watch_held, 77)
            assert reader.hear() == "watching"
            reader.signal(signal.SIGSTOP)
        until = time.monotonic() + 3.0
        rounds = 0
        while time.monotonic() < until:
            a.put(np.full(8 * MIB, rounds % 70, np.uint8)).release()
            rounds += 1
        assert rounds > 8
        reader.signal(signal.SIGCONT)
        eventually(lambda: "reader" in [peer.name for peer in a.peers()], "it is back")
        a.send(1, "reader", tag="stop watching", timeout=DEADLINE_S)
        assert reader.finish() is True
        assert reader.call(sum_of_held) == 77 * 8 * MIB
        reader.call(drop_held)
        eventually(lambda: a.stats()["pool"]["used_bytes"] == 0, "the block came back")


@pytest.mark.shm
@pytest.mark.big
def test_a_get_takes_as_long_for_2_gib_as_for_1_mib(join: Callable[..., Peer]) -> None:
    with tl.init("a", pool_bytes=3 << 30) as a:
        b = join("b")
        refs = {}
        for nbytes in (MIB, 2 << 30):
            tensor = a.empty(nbytes, torch.uint8)
            tensor[-1] = 5
            refs[nbytes] = a.put(tensor, copy=False)
        small, large = (b.call(median_get_s, refs[nbytes]) for nbytes in (MIB, 2 << 30))
        assert large < 20 * small


def median_get_s(ref: tl.TensorRef) -> float:
    times = []
    for _ in range(200):
        started = time.perf_counter()
        view = tl.get(ref)
        times.append(time.perf_counter() - started)
        assert view[-1] == 5 or view.numel() == MIB
        del view
    return statistics.median(times)


def test_a_forked_child_that_ends_takes_no_view_with_it(join: Callable[..., Peer]) -> None:
    with tl.init("a") as a:
        b = join("b")
        with a.put(np.full(8 * MIB, 3, np.uint8)) as ref:
            b.call(hold, ref)
        b.call(fork_and_end)
        for fill in range(10):
            a.put(np.full(8 * MIB, 100 + fill, np.uint8)).release()
        assert b.call(sum_of_held) == 3 * 8 * MIB
        b.call(drop_held)
        eventually(lambda: a.stats()["pool"]["used_bytes"] == 0, "the block came back")


def fork_and_end() -> None:
    pid = os.fork()
    if pid == 0:
        kept.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
