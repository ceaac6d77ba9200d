"""Who keeps what alive: views hold their memory, copies don't, nothing leaks, and forked children copy on their own."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from tensorlink import _core


class Buffer(np.ndarray[Any, Any]):
    """An array that can be weakly referenced through its buffer."""


def payload_of(obj: Any) -> tuple[bytes, Buffer]:
    packed = _core.pack(obj)
    return packed.meta, np.frombuffer(bytearray(packed.to_bytes()), np.uint8).view(Buffer)


@pytest.mark.parametrize("obj", [torch.arange(5.0), np.arange(5.0)], ids=["torch", "numpy"])
def test_views_hold_their_memory(obj: Any) -> None:
    meta, payload = payload_of({"a": obj, "b": obj[1:3]})
    alive = weakref.ref(payload)
    got = _core.unpack(meta, payload, copy=False)
    del payload
    part = got["b"][1:]
    del got
    assert alive() is not None and part[0] == 2.0
    del part
    gc.collect()
    assert alive() is None


def test_the_last_of_many_views_holds_their_memory() -> None:
    meta, payload = payload_of([torch.full((3,), float(i)) for i in range(150)])
    alive = weakref.ref(payload)
    got = _core.unpack(meta, payload, copy=False)
    del payload
    assert [float(view[2]) for view in got] == list(range(150))
    while len(got) > 1:
        got.pop(len(got) // 2 - 1)
        assert alive() is not None and got[-1][1] == 149.0
    got.clear()
    assert alive() is None


@pytest.mark.parametrize("obj", [torch.arange(5.0), np.arange(5.0)], ids=["torch", "numpy"])
def test_copies_hold_nothing(obj: Any) -> None:
    meta, payload = payload_of(obj)
    alive = weakref.ref(payload)
    got = _core.unpack(meta, payload, copy=True)
    del payload
    assert alive() is None and got[4] == 4.0


def test_a_failed_build_releases_its_views() -> None:
    meta, payload = payload_of([np.arange(5.0), torch.arange(5.0), np.ones(1, "G")])
    alive = weakref.ref(payload)
    with pytest.raises(TypeError):
        _core.unpack(meta, payload, copy=False, like="torch")
    del payload
    assert alive() is None


def test_views_dropped_on_another_thread() -> None:
    meta, payload = payload_of([torch.arange(5.0)] + [torch.ones(3) for _ in range(200)])
    alive = weakref.ref(payload)
    box = [_core.unpack(meta, payload, copy=False)]
    del payload
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join(10)
    assert alive() is None


def test_packed_keeps_tensors() -> None:
    packed = _core.pack([torch.full((1000,), 3.0), bytearray(b"abc")])
    gc.collect()
    junk = [torch.zeros(1000) for _ in range(50)]
    got = _core.unpack(packed.meta, packed.to_bytes())
    assert got[0].tolist() == [3.0] * 1000 and got[1].tolist() == [97, 98, 99] and len(junk) == 50


def test_nothing_leaks() -> None:
    tensor, array, key = torch.arange(6.0), np.arange(6.0), "a key of its own"
    tree = {key: [tensor, array, tensor.conj()], ("t", 1): (bytearray(b"xx"), 2**80), "f": array[::2]}
    out = {"f": np.zeros(3)}

    def once() -> None:
        packed = _core.pack(tree)
        payload = packed.to_bytes()
        _core.unpack(packed.meta, payload)
        _core.unpack(packed.meta, payload, copy=False)
        _core.describe(packed.meta)
        small = _core.pack({"f": array[::2]})
        _core.fill(small.meta, small.to_bytes(), out)
        for bad in ([tensor, object()], {key: {1: {2}}}):
            with pytest.raises(TypeError):
                _core.pack(bad)
        with pytest.raises(ValueError):
            _core.unpack(packed.meta, payload, like="no such")

    def counts() -> list[int]:
        watched: list[Any] = [
            tensor,
            array,
            key,
            None,
            np.dtype("f8"),
            torch.float32,
            out["f"],
            torch.Tensor,
            np.ndarray,
        ]
        return [sys.getrefcount(x) for x in watched]

    for _ in range(50):
        once()
    gc.collect()
    before, blocks = counts(), sys.getallocatedblocks()
    for _ in range(10_000):
        once()
    gc.collect()
    assert max(abs(a - b) for a, b in zip(counts(), before, strict=True)) < 20
    assert sys.getallocatedblocks() - blocks < 2000


def test_the_collector_stays_as_it_was() -> None:
    meta, payload = payload_of([np.ones(1) for _ in range(1000)])
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            _core.unpack(meta, payload, copy=False)
            assert gc.isenabled() == enabled
            with pytest.raises(ValueError):
                _core.unpack(meta, payload, like="x")
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_large_copies_after_fork() -> None:
    """The child has none of its parent's helper threads and must neither wait for them nor crash."""
    source = np.random.default_rng(0).integers(0, 256, 16 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    packed = _core.pack(source)
    packed.copy_to(target.ctypes.data)
    pid = os.fork()
    if pid == 0:
        target[:] = 0
        packed.copy_to(target.ctypes.data)
        os._exit(0 if np.array_equal(source, target) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    target[:] = 0
    packed.copy_to(target.ctypes.data)
    assert np.array_equal(source, target)


def test_many_small_tensors_are_copied_by_threads() -> None:
    sizes = [1, 100, 255, 256, 257, 1023, 1024, 1025, 0, 2_000_000, 3, 40_000]
    tree = [np.random.default_rng(i).random(size, np.float32) for i in range(100) for size in sizes[: 9 if i else None]]
    meta, payload = payload_of(tree)
    out = [np.zeros_like(array) for array in tree]
    _core.fill(meta, payload, out)
    copied = _core.unpack(meta, payload, copy=True)
    assert payload.nbytes > 8 << 20
    for sent, filled, built in zip(tree, out, copied, strict=True):
        assert np.array_equal(sent, filled) and np.array_equal(sent, built)


def test_large_copies_from_many_threads() -> None:
    sources = [np.full(8 << 20, i, np.uint8) for i in range(4)]
    targets = [np.zeros_like(s) for s in sources]

    def copy(i: int) -> None:
        packed = _core.pack(sources[i])
        for _ in range(5):
            targets[i][:] = 99
            packed.copy_to(targets[i].ctypes.data)

    threads = [threading.Thread(target=copy, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(np.array_equal(s, t) for s, t in zip(sources, targets, strict=True))
