"""Objects that are offered before all their bytes are in the pool: readers on other hosts follow the copy."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

import tensorlink as tl
from tensorlink import _core
from tensorlink.transports.base import View
from tests.peer import eventually

NUMBERS = np.arange(3 << 20, dtype=np.uint32).reshape(3, -1)
TREE = {"whole": NUMBERS, "columns": NUMBERS[:, ::3], "empty": NUMBERS[:0], "name": "x" * 40_000}


@contextmanager
def ends(transport: str) -> Iterator[tuple[tl.Endpoint, tl.Endpoint]]:
    """An owner and a reader."""
    with (
        tl.init("owner", transports=transport, token="for this test") as owner,
        tl.init("reader", transports=transport, token="for this test") as reader,
    ):
        yield owner, reader


def claimed(owner: tl.Endpoint) -> _core.Stored:
    stored = owner._engine.store(_core.pack(TREE), 1, 0.0, 0, 16 << 10, 5.0, False, True)
    assert stored is not None
    return stored


def view(reader: tl.Endpoint, stored: _core.Stored) -> View:
    return reader._links.to_name("owner", 10.0).connection.open(stored.descriptor, 10.0)


def read(reader: tl.Endpoint, stored: _core.Stored) -> None:
    got = view(reader, stored).unpack(stored.meta, "numpy", False, None, 10.0)
    assert all(np.array_equal(got[name], TREE[name]) for name in TREE)


def is_being_read(owner: tl.Endpoint) -> bool:
    return "reader" in owner._engine.usage()["holders"]


def test_a_reader_on_another_host_follows_the_copy() -> None:
    with ends("tcp") as (owner, reader), ThreadPoolExecutor(1) as pool:
        stored = claimed(owner)
        reading = pool.submit(read, reader, stored)
        eventually(lambda: is_being_read(owner), "the reader has begun")
        assert not reading.done()
        stored.fill()
        reading.result(20)
        stored.fill()  # once is enough
        owner._engine.release(stored.claim)


@pytest.mark.shm
def test_on_the_same_host_nothing_is_there_before_all_is() -> None:
    with ends("shm") as (owner, reader):
        stored = claimed(owner)
        with pytest.raises(tl.StaleRefError):
            view(reader, stored)
        stored.fill()
        read(reader, stored)
        owner._engine.release(stored.claim)


def test_what_is_never_filled_ends_the_read_with_an_error() -> None:
    with ends("tcp") as (owner, reader), ThreadPoolExecutor(1) as pool:
        stored = claimed(owner)
        it, meta = view(reader, stored), stored.meta
        reading = pool.submit(it.unpack, meta, "numpy", False, None, 10.0)
        eventually(lambda: is_being_read(owner), "the reader has begun")
        owner._engine.release(stored.claim)
        del stored
        with pytest.raises(tl.TensorLinkError):
            reading.result(20)


@pytest.mark.parametrize("like", ["numpy", "torch"])
def test_large_messages_between_hosts(like: str) -> None:
    with ends("tcp") as (owner, reader), ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(reader.recv, "owner", like=like)
        owner.send(TREE, "reader")
        got = receiving.result(20)
        assert got["name"] == TREE["name"]
        assert all(np.array_equal(got[name], TREE[name]) for name in ("whole", "columns", "empty"))
