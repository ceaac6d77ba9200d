"""Copies between arbitrary layouts: gathered when packed, scattered when filled, viewed and copied in place."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlink import _core

DTYPES = ["u1", "f2", "f4", "i8", "c16", "G"]


@st.composite
def views(draw: st.DrawFn, *, writable: bool = False) -> np.ndarray[Any, Any]:
    """An array that is some view of another: permuted, sliced, reversed, expanded, from a random offset."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=5))
    steps = [draw(st.sampled_from([1, 1, 2, 3, -1, -2])) for _ in shape]
    base_shape = [max(1, n) * abs(s) + draw(st.integers(0, 2)) for n, s in zip(shape, steps, strict=True)]
    nbytes = int(np.prod(base_shape, dtype=np.int64)) * dtype.itemsize
    raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, nbytes, dtype=np.uint8)
    base = raw.view(dtype).reshape(base_shape)
    index = tuple(slice(None, None, step) for step in steps)
    view = base[(*index, ...)][(*(slice(0, n) for n in shape), ...)]
    view = view.transpose(draw(st.permutations(range(view.ndim))))
    if not writable and draw(st.booleans()):
        view = np.broadcast_to(view, (3, *view.shape)).transpose(draw(st.permutations(range(view.ndim + 1))))
    return view


@settings(deadline=None)
@given(views())
def test_gather(array: np.ndarray[Any, Any]) -> None:
    packed = _core.pack(array)
    got = _core.unpack(packed.meta, packed.to_bytes())
    assert got.dtype is array.dtype and got.shape == array.shape and got.tobytes() == array.tobytes()


@settings(deadline=None)
@given(views(writable=True))
def test_scatter(out: np.ndarray[Any, Any]) -> None:
    sent = np.random.default_rng(0).integers(0, 256, out.nbytes, dtype=np.uint8).view(out.dtype).reshape(out.shape)
    packed = _core.pack(sent)
    assert _core.fill(packed.meta, packed.to_bytes(), out) is out
    assert out.tobytes() == sent.tobytes()


@settings(deadline=None)
@given(views(writable=True))
def test_scatter_touches_nothing_else(out: np.ndarray[Any, Any]) -> None:
    base = out
    while isinstance(base.base, np.ndarray):
        base = base.base
    before = base.copy()
    restored = out.copy()
    packed = _core.pack(np.zeros(out.shape, out.dtype))
    _core.fill(packed.meta, packed.to_bytes(), out)
    out[...] = restored
    assert base.tobytes() == before.tobytes()


def root(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@settings(deadline=None)
@given(views(), st.booleans(), st.sampled_from([None, "torch"]))
def test_in_place(array: np.ndarray[Any, Any], copy: bool, like: str | None) -> None:
    if like == "torch" and array.dtype.char == "G":
        return
    block = root(array)
    packed = _core.pack({"x": array})
    meta = packed.meta_in_place([(1, 1), (block.ctypes.data, block.nbytes)])
    overlapping = array.size and 0 in [s for n, s in zip(array.shape, array.strides, strict=True) if n > 1]
    if meta is None:
        assert overlapping  # then it is packed instead
        return
    extents_meta = packed.meta_in_place([(block.ctypes.data, block.nbytes)])
    buffer = (ctypes.c_char * block.nbytes).from_address(block.ctypes.data) if block.nbytes else b""
    got = _core.unpack(extents_meta, buffer, copy=copy, like=like)["x"]
    if like == "torch":
        assert got.dtype == torch.from_numpy(np.zeros(1, array.dtype)).dtype
        got = got.numpy()
    assert got.shape == array.shape and got.tobytes() == array.tobytes()
    if not copy and array.size and like is None:
        assert got.ctypes.data == array.ctypes.data and not got.flags.writeable


def test_in_place_needs_every_tensor_in_an_extent() -> None:
    pool, stranger = np.arange(100.0), np.arange(3.0)
    extents = [(pool.ctypes.data, pool.nbytes)]
    assert _core.pack([pool[3:9], stranger]).meta_in_place(extents) is None
    assert _core.pack([pool[3:9], pool[::-1], pool[:0]]).meta_in_place(extents) is not None
    assert _core.pack(pool).meta_in_place([(pool.ctypes.data, pool.nbytes - 1)]) is None
    assert _core.pack(pool).meta_in_place([(pool.ctypes.data + 8, pool.nbytes)]) is None


@pytest.mark.parametrize("shape", [(2048, 1024), (1024, 2048), (3, 1024, 700), (700, 5, 600)])
@pytest.mark.parametrize("dtype", ["u1", "f4", "c16"])
def test_large_transposes(shape: tuple[int, ...], dtype: str) -> None:
    """Beyond the sizes from which copies are tiled and divided among threads."""
    array = np.random.default_rng(1).integers(0, 256, np.prod(shape) * np.dtype(dtype).itemsize, dtype=np.uint8)
    array = array.view(dtype).reshape(shape).T
    packed = _core.pack(array)
    payload = packed.to_bytes()
    assert payload == array.tobytes()
    out = np.zeros(array.shape[::-1], dtype).T
    _core.fill(packed.meta, payload, out)
    assert out.tobytes() == payload


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3_000_000) | st.integers(4_190_000, 9_000_000), st.integers(0, 70), st.integers(0, 70))
def test_copies_of_any_size_and_alignment(nbytes: int, source_at: int, target_at: int) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + source_at, dtype=np.uint8)[source_at:]
    target = np.zeros(nbytes + target_at + 64, np.uint8)
    _core.pack(source).copy_to(target.ctypes.data + target_at)
    assert np.array_equal(target[target_at : target_at + nbytes], source)
    assert not target[:target_at].any() and not target[target_at + nbytes :].any()
