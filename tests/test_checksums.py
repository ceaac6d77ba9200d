"""Checksums of what is put, sent and published, and the limit on what one peer on another host gets."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

import tensorlink as tl

KIB = 1 << 10
SIZE = 256 * KIB


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[tl.Endpoint, tl.Endpoint]]:
    settings = {"transports": request.param, "token": "secret"}
    with tl.init("owner", **settings) as owner, tl.init("reader", **settings) as reader:
        yield owner, reader


def changed(owner: tl.Endpoint) -> tl.TensorRef:
    """A handle of memory whose owner broke its word: it has changed since it was put."""
    memory = owner.empty(SIZE, "uint8", like="numpy")
    memory[:] = 1
    ref = owner.put(memory, copy=False, checksum=True)
    memory[SIZE // 2] ^= 4
    return ref


def test_what_is_whole_arrives(pair: tuple[tl.Endpoint, tl.Endpoint]) -> None:
    owner, reader = pair
    tree = {f"layer.{i}": np.full(777, i, np.float32) for i in range(500)}  # its description lies in the pool
    for obj in (tree, np.arange(SIZE), np.arange(10), np.empty(0), {"nothing": None}):
        got = reader.get(owner.put(obj, checksum=True))
        np.testing.assert_equal(got, obj)
    out = np.zeros(SIZE, np.int64)
    reader.get(owner.put(np.arange(SIZE), checksum=True), out=out)
    assert (out == np.arange(SIZE)).all()


def test_what_was_changed_is_told(pair: tuple[tl.Endpoint, tl.Endpoint]) -> None:
    owner, reader = pair
    ref = changed(owner)
    with pytest.raises(tl.CorruptTransferError, match="checksum"):
        reader.get(ref)
    out = np.zeros(SIZE, np.uint8)
    with pytest.raises(tl.CorruptTransferError, match="checksum"):
        reader.get(ref, out=out)
    assert not out.any(), "nothing was written"


def test_with_the_setting_all_is_checked() -> None:
    with tl.init("owner", verify=True) as owner, tl.init("reader") as reader:
        memory = owner.empty(SIZE, "uint8", like="numpy")
        ref = owner.put(memory, copy=False)
        memory += 1
        with pytest.raises(tl.CorruptTransferError):
            reader.get(ref)
        owner.send(np.arange(SIZE), "reader")
        assert (reader.recv("owner") == np.arange(SIZE)).all()


def test_a_peer_gets_no_more_than_the_limit() -> None:
    """The limit is kept over time: after its first burst no more than that many bytes come in a second."""
    settings = {"transports": "tcp", "token": "secret"}
    with tl.init("owner", max_bytes_per_s=20_000_000, **settings) as owner, tl.init("reader", **settings) as reader:
        ref = owner.put(np.ones(8_000_000, np.uint8))
        reader.get(owner.put(np.ones(10)))
        start = time.monotonic()
        assert (reader.get(ref) == 1).all()
        assert time.monotonic() - start > 0.35
