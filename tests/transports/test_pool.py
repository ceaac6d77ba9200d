"""What is particular to transports over the engine's pool."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorlink.errors import CorruptTransferError, PoolExhaustedError, StaleRefError
from tensorlink.testing import OneProcess, Pair, eventually
from tensorlink.testing.pairs import buffer_of, digest, pattern
from tensorlink.transports.pool import Address

MIB = 1 << 20


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = OneProcess("shm").pair(pool_bytes=64 * MIB)
    yield made
    made.close()


@given(
    st.text(max_size=20),
    st.integers(0, 1 << 40),
    st.text("abc/", min_size=1, max_size=100),
    st.binary(min_size=16, max_size=16),
)
def test_addresses_survive_the_way(host: str, pid: int, path: str, key: bytes) -> None:
    address = Address(host, pid, path, key.hex())
    assert Address.decode(address.encode()) == address


@pytest.mark.parametrize("field", ["host", "pid", "path", "key"])
@pytest.mark.parametrize("value", [None, [], {}, "", "\ud800", "a\0b", "x" * 200, -1.5, True])
def test_addresses_with_a_bad_field_are_corrupt(field: str, value: object) -> None:
    good = {"host": "h", "pid": 1, "path": "/tmp/x", "key": "00" * 16}
    assert Address.decode(json.dumps(good).encode()).pid == 1
    if field == "host" and isinstance(value, str):
        return  # any text names a host
    with pytest.raises(CorruptTransferError):
        Address.decode(json.dumps({**good, field: value}).encode())


def used(pair: Pair) -> int:
    return int(pair.far.engine.usage()["used_bytes"])


def test_memory_of_the_pool_is_exposed_where_it_lies(pair: Pair) -> None:
    block = pair.far.engine.empty(40 * MIB, 1.0)  # a copy would not fit
    block[:] = pattern(1, 40 * MIB)
    part = block[MIB : 39 * MIB]
    descriptors = pair.far.connection.expose([buffer_of(block), buffer_of(part)])
    assert used(pair) == 40 * MIB
    assert pair.near.fetch(descriptors, [40 * MIB, 38 * MIB]) == [digest(block), digest(part)]


def test_an_exposure_keeps_memory_of_the_pool(pair: Pair) -> None:
    block = pair.far.engine.empty(40 * MIB, 1.0)
    block[:] = 5
    descriptors = pair.far.connection.expose([buffer_of(block)])
    del block
    gc.collect()
    assert not pair.far.room(40 * MIB)
    target = np.zeros(40 * MIB, np.uint8)
    pair.near.connection.fetch([(descriptors[0], buffer_of(target))]).wait(20)
    assert (target == 5).all()
    pair.far.connection.retract(descriptors)
    eventually(lambda: pair.far.room(40 * MIB), "the memory was free")


def test_a_full_pool_exposes_all_or_none(pair: Pair) -> None:
    memory = np.zeros(24 * MIB, np.uint8)
    with pytest.raises(PoolExhaustedError) as caught:
        pair.far.connection.expose([buffer_of(memory)] * 3)
    assert caught.value.phase == "expose"
    assert used(pair) == 0


@pytest.mark.parametrize("end", ["close", "abort"])
def test_the_end_of_a_connection_frees_what_it_exposed(pair: Pair, end: str) -> None:
    pair.far.expose(1, [MIB, MIB])
    getattr(pair.far, end)()
    assert used(pair) == 0


def test_a_failed_fetch_keeps_no_hold(pair: Pair) -> None:
    good, stale = pair.far.expose(1, [40 * MIB])[0], pair.far.expose(2, [MIB])[0]
    pair.far.retract([stale])
    target = np.zeros(40 * MIB, np.uint8)
    fetch = pair.near.connection.fetch([(good, buffer_of(target)), (stale, buffer_of(target))])
    with pytest.raises(StaleRefError):
        fetch.wait(10)
    assert not target.any(), "all are held before a byte moves"
    pair.far.retract([good])
    eventually(lambda: pair.far.room(40 * MIB), "the memory was free, though the fetch and its error are still here", 2)
