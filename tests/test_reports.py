"""The smallest tests of failures that users of other transports have met."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorlink as tl
from tests.joined import Pair, join, pair
from tests.peer import DEADLINE_S, Peer, eventually, kept, nursery, spawn

__all__ = ["join", "nursery", "pair", "spawn"]

MIB = 1 << 20


# What the children do


def echo(count: int = 1) -> None:
    for _ in range(count):
        tl.send(tl.recv("a", tag="echo"), "a", tag="echo")


def read(ref: tl.TensorRef) -> Any:
    return tl.get(ref)


def put_and_keep(obj: Any, **how: Any) -> tl.TensorRef:
    ref = tl.put(obj, **how)
    kept.setdefault("refs", []).append(ref)
    return ref


def limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def limit_address_space(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE") + more)


def round_trip(pair: Pair, obj: Any) -> Any:
    """The object, sent to another process and back."""
    a, b = pair
    b.start(echo)
    a.send(obj, "b", tag="echo")
    got = a.recv("b", tag="echo", timeout=DEADLINE_S)
    b.finish()
    return got


# Shapes, dtypes and layouts


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 2), (1, 0), (0, 3, 4), ()])
def test_empty_and_0d_tensors_keep_their_shape(pair: Pair, shape: tuple[int, ...]) -> None:
    for made in (np.zeros(shape, np.float32), torch.zeros(shape)):
        got = round_trip(pair, {"x": made, "full": np.ones(3), "y": [made]})
        assert (got["x"].shape, got["x"].dtype) == (made.shape, made.dtype)
        assert got["y"][0].shape == made.shape
        assert got["full"].tolist() == [1, 1, 1]


BITS = [
    *(torch.bool, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
    *(torch.complex128, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.float64),
]


@pytest.mark.parametrize("dtype", BITS)
def test_every_bit_of_every_dtype_arrives(pair: Pair, dtype: torch.dtype) -> None:
    raw = torch.arange(256, dtype=torch.uint8).repeat(16)
    sent = (raw % 2 if dtype == torch.bool else raw).view(dtype)
    got = round_trip(pair, sent)
    assert got.dtype is dtype
    assert torch.equal(got.view(torch.uint8), sent.view(torch.uint8))  # NaN payloads and -0.0 too


def test_lazy_conjugates_and_negatives_arrive_as_values(pair: Pair) -> None:
    x = torch.complex(torch.arange(5.0), torch.arange(5.0))
    got = round_trip(pair, [x.conj(), x.conj().imag, x.conj().t()])
    assert torch.equal(got[0], torch.conj_physical(x))
    assert torch.equal(got[1], -x.imag)


BASE = np.arange(600 * 40, dtype=np.float32).reshape(600, 40)
STRIDED: dict[str, Callable[[], Any]] = {
    "transposed": lambda: torch.from_numpy(BASE).t(),
    "every second column": lambda: torch.from_numpy(BASE)[:, ::2],
    "inner columns": lambda: torch.from_numpy(BASE)[..., 1:-1],
    "expanded": lambda: torch.arange(40.0).expand(600, 40),
    "overlapping": lambda: torch.arange(50.0).as_strided((40, 10), (1, 1)),
    "channels last": lambda: torch.from_numpy(BASE).reshape(2, 3, 40, 100).to(memory_format=torch.channels_last),
    "orthogonal factor": lambda: torch.linalg.qr(torch.from_numpy(BASE[:40]) + torch.eye(40))[0],
    "fortran order": lambda: np.asfortranarray(BASE),
    "backwards": lambda: BASE[::-1],
    "every third, backwards": lambda: BASE[1:, ::-3],
    "stepped": lambda: np.linspace(0, 1, 20_001)[::2],
    "one column": lambda: BASE[:, 3],
}
WAYS = ("send", "send into out", "put", "put in place", "get into out", "get into strided out")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", list(STRIDED))
def test_every_layout_through_every_entry(pair: Pair, kind: str, way: str) -> None:
    a, b = pair
    sent = STRIDED[kind]()
    expected = np.ascontiguousarray(np.asarray(sent))
    out = np.zeros(expected.shape, expected.dtype)
    if way.startswith("send"):
        a.send(sent, "a", tag="layout")
        got = a.recv("a", tag="layout", out=out if "out" in way else None)
    elif way == "put in place":
        with a.put(sent, copy=False) as ref:
            got = b.call(read, ref)
    else:
        with a.put(sent) as ref:
            if "strided" in way:
                out = np.zeros(expected.shape[::-1], expected.dtype).T
            got = a.get(ref, out=out) if "out" in way else b.call(read, ref)
    assert np.array_equal(np.asarray(got), expected)


def test_sizes_around_every_threshold(pair: Pair) -> None:
    a, b = pair
    edges = (1, 4096, 32 << 10, 64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB)
    sizes = [0, *(edge + delta for edge in edges for delta in (-70, -1, 0, 1))]
    sizes = [size for size in sizes if size >= 0]
    b.start(echo, len(sizes))
    for size in sizes:
        sent = np.arange(size, dtype=np.uint8)
        a.send(sent, "a", tag="self")  # sender and receiver are one thread
        assert np.array_equal(a.recv("a", tag="self", timeout=DEADLINE_S), sent)
        a.send(sent, "b", tag="echo")
        assert np.array_equal(a.recv("b", tag="echo", timeout=DEADLINE_S), sent)
    b.finish()


@pytest.mark.big
def test_the_last_page_of_more_than_4_gib(join: Callable[..., Peer]) -> None:
    nbytes = 2**32 + 4096
    with tl.init("a", pool_bytes=nbytes + (64 << 20)) as a:
        b = join("b")
        tensor = a.empty(nbytes, np.int8, like="numpy")
        tensor[-4096:] = 5
        with a.put(tensor, copy=False) as ref:
            assert ref.nbytes == nbytes
            assert b.call(last_page, ref) == (nbytes, 5 * 4096)
        del tensor


def last_page(ref: tl.TensorRef) -> tuple[int, int]:
    got = tl.get(ref)
    return got.size, int(got[-4096:].sum())


# Memory that is used again


def test_another_buffer_at_the_same_address(pair: Pair) -> None:
    with mmap.mmap(-1, 4 * MIB) as memory:
        for i, nbytes in enumerate((16, 5_000, 100_000, 4 * MIB, 16)):
            array = np.frombuffer(memory, np.uint8, nbytes)
            array[:] = i + 1
            got = round_trip(pair, array)
            assert got.size == nbytes
            assert (got == i + 1).all()
            del array
    tensor = torch.ones(4)
    assert round_trip(pair, tensor).numel() == 4
    tensor.resize_(100_000).fill_(2)
    assert float(round_trip(pair, tensor).sum()) == 200_000


def test_a_name_published_again_with_another_layout(pair: Pair) -> None:
    a, b = pair
    for i in range(1, 101):
        sent = np.full((i % 7 + 1, i * 37), i, (np.float32, np.int64, np.uint8)[i % 3])
        with a.put(sent) as ref:
            got = b.call(read, ref)
            assert (got.shape, got.dtype) == (sent.shape, sent.dtype)
            assert (got == i).all()


def test_handles_that_share_a_tensor_end_one_by_one(pair: Pair) -> None:
    a, b = pair
    one, two, three = (a.empty(MIB, np.uint8, like="numpy") for _ in range(3))
    for i, array in enumerate((one, two, three)):
        array[:] = i + 1
    first, second = a.put([one, two], copy=False), a.put([two, three], copy=False)
    again = a.put(two, copy=False)
    first.release()
    first.release()
    assert [int(array[0]) for array in b.call(read, second)] == [2, 3]
    second.release()
    assert b.call(read, again).sum() == 2 * MIB
    again.release()


def test_rounds_of_putting_and_releasing_do_not_slow_down(pair: Pair) -> None:
    a, _ = pair
    storage = a.empty(1000 * 1024, np.uint8, like="numpy")
    views = [storage[i * 1024 : (i + 1) * 1024] for i in range(1000)]
    times = []
    for _ in range(40):
        started = time.process_time()
        refs = [a.put(view, copy=False) for view in views]
        for ref in refs:
            ref.release()
        times.append(time.process_time() - started)
    assert min(times[-10:]) < 5 * min(times[1:11])


def test_many_tensors_are_one_handle(pair: Pair) -> None:
    a, b = pair
    few = {f"layer.{i}": np.full(16, i % 100, np.float32) for i in range(1_000)}
    many = {f"layer.{i}": np.full(16, i % 100, np.float32) for i in range(18_867)}
    seconds = []
    for tree in (few, few, many):
        started = time.process_time()
        with a.put(tree) as ref:
            assert len(ref.to_bytes()) < 1024
            seconds.append(time.process_time() - started)
            assert len(b.call(names_of, ref)) == len(tree)
    assert seconds[2] < 10 * 18.867 * max(seconds[1], 0.001)


def names_of(ref: tl.TensorRef) -> list[str]:
    return list(tl.get(ref))


def test_deleting_in_a_collected_callback_does_not_deadlock(pair: Pair) -> None:
    a, b = pair
    freed = 0

    class Releases:
        def __init__(self, ref: tl.TensorRef) -> None:
            self.ref = ref
            self.me = self  # only the collector finds it

        def __del__(self) -> None:
            nonlocal freed
            self.ref.release()
            freed += 1

    gc.collect()
    for i in range(1_000):
        Releases(a.put(np.full(70_000, i % 251, np.uint8)))
        if i % 10 == 0:
            gc.collect(0)
    gc.collect()
    assert freed == 1_000
    assert b.call(tl.peers) is not None


# Limits of the process


def test_thousands_of_small_tensors_with_few_descriptors(join: Callable[..., Peer]) -> None:
    with tl.init("a") as a:
        b = join("b")
        b.call(limit, resource.RLIMIT_NOFILE, 256)
        b.start(keep_messages, 5_000)
        for i in range(5_000):
            a.send(np.full(100, i % 100, np.uint8), "b", timeout=DEADLINE_S)
        assert b.finish() == sum(i % 100 * 100 for i in range(5_000))
        refs = [a.put(np.ones(100_000, np.uint8)) for _ in range(300)]
        assert b.call(keep_views, refs) == 300 * 100_000


def keep_messages(count: int) -> int:
    kept["messages"] = [tl.recv("a", timeout=DEADLINE_S) for _ in range(count)]
    return sum(int(array.sum()) for array in kept["messages"])


def keep_views(refs: list[tl.TensorRef]) -> int:
    kept["views"] = [tl.get(ref) for ref in refs]
    return sum(int(view.sum()) for view in kept["views"])


def test_too_few_descriptors_to_join_is_said(spawn: Callable[..., Peer]) -> None:
    with tl.init("a") as a:
        child = spawn()
        child.call(limit, resource.RLIMIT_NOFILE, 8)
        with pytest.raises((tl.TensorLinkError, OSError)):
            child.call(tl.init, "b")
        child.call(limit, resource.RLIMIT_NOFILE, 1024)
        child.call(tl.init, "b")
        a.send(1, "b", timeout=DEADLINE_S)
        assert child.call(tl.recv) == 1


def test_a_reader_without_address_space_harms_nobody(join: Callable[..., Peer]) -> None:
    with tl.init("a") as a:
        poor, rich = join("poor"), join("rich")
        ref = a.put(torch.ones(256 * MIB, dtype=torch.uint8))
        small = a.put(np.ones(10, np.uint8))
        poor.call(read, small)
        poor.call(limit_address_space, 64 * MIB)
        with pytest.raises((tl.TensorLinkError, MemoryError)):
            poor.call(touch, ref)
        assert rich.call(touch, ref) == 256 * MIB
        assert poor.call(read, small).sum() == 10
        assert a.get(ref)[-1] == 1


def touch(ref: tl.TensorRef) -> int:
    return int(tl.get(ref).sum())


def test_no_memory_for_the_pool_is_an_error_and_no_signal(join: Callable[..., Peer]) -> None:
    with tl.init("a") as a:
        b = join("b")
        b.call(limit, resource.RLIMIT_FSIZE, MIB)
        with pytest.raises((tl.TensorLinkError, MemoryError, OSError)):
            b.call(put_and_keep, np.ones(8 * MIB, np.uint8))
        b.call(limit, resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
        assert a.get(b.call(put_and_keep, np.ones(8 * MIB, np.uint8))).sum() == 8 * MIB


def test_nothing_is_kept_in_dev_shm(pair: Pair) -> None:
    a, _ = pair
    view = round_trip(pair, np.ones(8 * MIB, np.uint8))
    assert "/dev/shm" not in Path("/proc/self/maps").read_text()
    assert not [link for link in _open_files() if link.startswith("/dev/shm")]
    del view
    assert a.stats()["pool"]["budget_bytes"] > 0


def _open_files() -> list[str]:
    return [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]


def test_many_readers_connect_at_once() -> None:
    with tl.init("a") as a:
        ref = a.put(np.ones(MIB, np.uint8))
        readers = [tl.init(f"reader {i}") for i in range(24)]
        together = threading.Barrier(len(readers))
        sums: list[int] = []

        def get(reader: tl.Endpoint) -> None:
            together.wait()
            sums.append(int(reader.get(ref, timeout=DEADLINE_S).sum()))

        threads = [threading.Thread(target=get, args=(reader,)) for reader in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        for reader in readers:
            reader.shutdown()
        assert sums == [MIB] * len(readers)


# Where processes meet


@pytest.mark.parametrize("length", [60, 90, 107, 108, 200])
def test_a_long_temporary_directory(spawn: Callable[..., Peer], tmp_path: Path, length: int) -> None:
    folders = []
    for letter in "xy":
        folder = tmp_path
        while len(str(folder)) < length:
            folder /= letter * max(1, min(40, length - len(str(folder)) - 1))
        folder.mkdir(parents=True, exist_ok=True)
        folders.append(str(folder))
    a, b = (spawn(TMPDIR=folder) for folder in folders)  # the two ends need not agree on it
    for peer, name in ((a, "a"), (b, "b")):
        peer.call(tl.init, name)
    b.call(tl.send, "hello", "a")
    assert a.call(tl.recv, "b") == "hello"


def test_a_long_run_time_directory_works_or_is_named(spawn: Callable[..., Peer], tmp_path: Path) -> None:
    folder = tmp_path / ("r" * 60) / ("s" * 60)
    folder.mkdir(parents=True, mode=0o700)
    a, b = spawn(XDG_RUNTIME_DIR=str(folder)), spawn(XDG_RUNTIME_DIR=str(folder))
    a.call(tl.init, "a")
    b.call(tl.init, "b")
    b.call(tl.send, "hello", "a")
    assert a.call(tl.recv, "b") == "hello"


def test_what_another_run_left_behind_stops_nobody(spawn: Callable[..., Peer], runtime_dir: Path) -> None:
    first = spawn()
    first.call(tl.init, "a")
    first.kill()
    left = [path for path in runtime_dir.rglob("*") if path.is_socket()]
    assert left
    for path in left:  # a socket that nobody serves stands where one will be wanted
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
    second = spawn()
    second.call(tl.init, "a")
    second.call(tl.send, 1, "a")
    assert second.call(tl.recv) == 1


def test_an_owner_that_is_gone_before_the_first_read(join: Callable[..., Peer]) -> None:
    with tl.init("a") as a:
        for leave in (Peer.kill, Peer.exit):
            owner = join("owner")
            ref = owner.call(put_and_keep, np.ones(MIB, np.uint8))
            leave(owner)
            with pytest.raises(tl.PeerLostError):
                a.get(ref, timeout=10)


def test_an_owner_restarted_again_and_again(join: Callable[..., Peer]) -> None:
    with tl.init("a") as a:
        views = []
        for i in range(8):
            owner = join("owner")
            views.append(a.get(owner.call(put_and_keep, np.full(MIB, i, np.uint8)), timeout=DEADLINE_S))
            owner.kill()
        assert [int(view[-1]) for view in views] == list(range(8))


def test_the_first_transfer_after_a_pause(join: Callable[..., Peer]) -> None:
    with tl.init("a", lease_s=0.5) as a:
        b = join("b", TENSORLINK_LEASE_S="0.5")
        for i in range(2):
            a.send(np.full(MIB, i, np.uint8), "b")
            assert b.call(tl.recv, "a")[0] == i
            with pytest.raises(tl.TransferTimeoutError):
                a.recv(tag="never", timeout=1.5)  # three leases without traffic


def test_a_sender_that_never_sends_leaves_the_buffer_alone(pair: Pair) -> None:
    a, _ = pair
    out = np.full(1000, 7.0)
    with pytest.raises(tl.TransferTimeoutError):
        a.recv("b", tag="nothing", out=out, timeout=0.05)
    assert (out == 7).all()


@pytest.mark.shm
def test_what_a_reader_opened_twice_comes_back_once_it_is_killed(join: Callable[..., Peer]) -> None:
    with tl.init("a") as a:
        unread, read_twice = a.put(np.ones(MIB, np.uint8)), a.put(np.ones(MIB, np.uint8))
        b = join("b")
        b.call(keep_views, [read_twice, read_twice])
        unread.release()
        read_twice.release()
        assert a.stats()["pool"]["used_bytes"] == MIB
        b.kill()
        eventually(lambda: a.stats()["pool"]["used_bytes"] == 0, "all came back")
