"""Meta comes from peers: whatever its bytes, reading it gives an object or CorruptTransferError."""

from __future__ import annotations

import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlink import _core
from tensorlink.errors import CorruptTransferError

SHARED = torch.arange(4.0)
BASE = np.arange(24.0).reshape(4, 6)
VALID = [
    _core.pack(
        {"a": SHARED, "b": [np.ones((2, 3), "f2"), None, 2**90, -5, 1.5, "text"], ("k", 1): (SHARED, b"x", True)}
    ).meta,
    _core.pack(
        [np.ones(1, ml_dtypes.bfloat16), torch.empty(0, 5), {1: {2: {3: torch.tensor(1, dtype=torch.uint8)}}}]
    ).meta,
    _core.pack(BASE[::-1, ::2]).meta_in_place([(BASE.ctypes.data, BASE.nbytes)]),
]
PAYLOAD = np.zeros(512, np.uint8)


def read(meta: bytes) -> None:
    """Every reader of meta; each in turn may find it corrupt, and none may do anything worse."""
    for use in (
        lambda: _core.unpack(meta, PAYLOAD, copy=True),
        lambda: _core.unpack(meta, PAYLOAD, copy=False),
        lambda: _core.unpack(meta, PAYLOAD, copy=False, like="numpy"),
        lambda: _core.describe(meta),
        lambda: _core.fill(meta, PAYLOAD, {"a": torch.zeros(4)}),
    ):
        try:
            use()
        except (CorruptTransferError, ValueError, TypeError) as error:
            # Well-formed meta may describe what doesn't fit `out`, or a dtype that the framework lacks.
            assert isinstance(error, CorruptTransferError) or "out" in str(error) or "dtype" in str(error), repr(error)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    read(data)


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 255), st.integers(0, 5))
def test_random_nodes(data: bytes, frameworks: int, leaves: int) -> None:
    read(b"TL\1" + bytes([frameworks]) + struct.pack("<IQ", leaves, 512) + data)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(VALID),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.integers(0, 400),
    st.binary(max_size=12),
)
def test_mutations(meta: bytes, changes: list[tuple[int, int]], cut: int, insert: bytes) -> None:
    mutated = bytearray(meta)
    for at, value in changes:
        mutated[at % len(mutated)] = value
    at = cut % len(mutated)
    read(bytes(mutated))
    read(bytes(mutated[:at]))
    read(bytes(mutated[:at] + insert + mutated[at:]))
    read(bytes(mutated[:at] + insert + mutated[at + len(insert) :]))


@pytest.mark.parametrize("meta", VALID)
def test_every_truncation_and_every_byte(meta: bytes) -> None:
    for n in range(len(meta)):
        with pytest.raises(CorruptTransferError):
            _core.unpack(meta[:n], PAYLOAD)
        with pytest.raises(CorruptTransferError):
            _core.describe(meta[:n])
        for value in (0, 1, 9, 10, 0x7F, 0x80, 0xFF):
            read(meta[:n] + bytes([value]) + meta[n + 1 :])


def node(*parts: int | bytes, leaves: int = 0) -> bytes:
    body = b"".join(part if isinstance(part, bytes) else bytes([part]) for part in parts)
    return b"TL\1\3" + struct.pack("<IQ", leaves, 0) + body


NONE, TEXT, LIST, TUPLE, DICT, TENSOR, STRIDED, ALIAS = 0, 6, 9, 10, 11, 12, 13, 14
HUGE = b"\xff" * 9 + b"\x01"  # 2**64 - 1
LARGE = b"\xff" * 8 + b"\x7f"  # 2**63 - 1
HOSTILE: dict[str, bytes] = {
    "nothing": node(),
    "length": node(TEXT, HUGE),
    "count of a list": node(LIST, HUGE),
    "count of a tuple": node(TUPLE, LARGE, NONE),
    "count of a dict": node(DICT, HUGE),
    "bits": node(TEXT, b"\xff" * 10),
    "trailing": node(NONE, NONE),
    "deep": node(bytes([LIST, 1]) * 200_000, NONE),
    "deep tuples": node(bytes([TUPLE, 1]) * 200_000, NONE),
    "deep key": node(DICT, 1, bytes([TUPLE, 1]) * 200_000, NONE, NONE),
    "key twice": node(DICT, 2, NONE, NONE, NONE, NONE),
    "list as key": node(DICT, 1, LIST, 0, NONE),
    "utf-8": node(TEXT, 1, b"\xff"),
    "alias": node(ALIAS, 0, leaves=1),
    "alias of itself": node(LIST, 2, TENSOR, 0, 5, 0, 0, 0, ALIAS, 1, leaves=1),
    "dtype": node(TENSOR, 0, 200, 0, 0, 0, leaves=1),
    "framework": node(TENSOR, 9, 5, 0, 0, 0, leaves=1),
    "rank": node(TENSOR, 0, 5, 65, 0, 0, b"\0" * 65, leaves=1),
    "extent": node(TENSOR, 0, 5, 0, 1, 0, leaves=1),
    "offset": node(TENSOR, 0, 5, 0, 0, HUGE, leaves=1),
    "offset beyond": node(TENSOR, 0, 5, 0, 0, b"\x80\x04", leaves=1),
    "shape": node(TENSOR, 0, 5, 1, 0, 0, HUGE, leaves=1),
    "product": node(TENSOR, 0, 5, 3, 0, 0, LARGE, LARGE, 0, leaves=1),
    "size": node(TENSOR, 0, 5, 1, 0, 0, b"\x81\x04", leaves=1),
    "leaves": node(TENSOR, 0, 5, 0, 0, 0, leaves=0),
    "negative stride": node(STRIDED, 0, 5, 1, 0, 0, 4, 1, leaves=1),
    "huge stride": node(STRIDED, 0, 5, 1, 0, 0, 4, HUGE, leaves=1),
    "smallest stride": node(STRIDED, 0, 5, 2, 0, 0, 2, 2, HUGE, HUGE, leaves=1),
    "expanded": node(STRIDED, 0, 5, 1, 0, 0, b"\x80\x80\x80\x80\x10", 0, leaves=1),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("copy", [True, False])
def test_hostile(case: str, copy: bool) -> None:
    with pytest.raises(CorruptTransferError):
        _core.unpack(HOSTILE[case], PAYLOAD, copy=copy)


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in HOSTILE
        if c
        not in (
            "key twice",
            "utf-8",
            "extent",
            "offset",
            "offset beyond",
            "size",
            "negative stride",
            "huge stride",
            "smallest stride",
        )
    ],
)
def test_hostile_to_describe(case: str) -> None:
    """Without a payload all that can be checked is checked."""
    with pytest.raises(CorruptTransferError):
        _core.describe(HOSTILE[case])


def test_hostile_handle() -> None:
    meta: Any = node(8, 3, b"abc")
    with pytest.raises(CorruptTransferError):
        _core.unpack(meta, PAYLOAD)
