"""Checksums and authentication of the core, against the standard library and the definition."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorlink import _core

BYTES = st.binary(max_size=1500)


def crc_of(data: bytes, crc: int = 0) -> int:
    """By the core. The bytes lie at an address of their own, to the byte."""
    buffer = (ctypes.c_char * len(data)).from_buffer_copy(data)
    return _core.crc32c(ctypes.addressof(buffer), len(data), crc)


def bit_by_bit(data: bytes, crc: int = 0) -> int:
    """By the definition."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_check_value() -> None:
    assert crc_of(b"123456789") == bit_by_bit(b"123456789") == 0xE3069283
    assert _core.crc32c(0, 0) == 0


@given(BYTES, BYTES)
def test_parts_in_a_row_have_the_checksum_of_the_whole(first: bytes, second: bytes) -> None:
    whole = bit_by_bit(first + second)
    assert crc_of(first + second) == whole
    assert crc_of(second, crc_of(first)) == whole
    assert _core.crc32c_combine(crc_of(first), crc_of(second), len(second)) == whole


@given(BYTES, st.integers(min_value=0))
def test_every_bit_counts(data: bytes, at: int) -> None:
    if not data:
        return
    byte, bit = divmod(at % (8 * len(data)), 8)
    changed = bytearray(data)
    changed[byte] ^= 1 << bit
    assert crc_of(bytes(changed)) != crc_of(data)


def test_large_data_in_several_threads() -> None:
    data = hashlib.shake_128(b"payload").digest(300_000)
    pieces = [crc_of(data[at : at + 999]) for at in range(0, len(data), 999)]
    whole = pieces[0]
    for at, piece in zip(range(999, len(data), 999), pieces[1:], strict=True):
        whole = _core.crc32c_combine(whole, piece, len(data[at : at + 999]))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(crc_of(data))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [whole] * 4


@pytest.mark.parametrize("crc", [-1, 1 << 32])
def test_a_checksum_has_32_bits(crc: int) -> None:
    with pytest.raises(TypeError):
        _core.crc32c(0, 0, crc)


@given(st.binary(max_size=200), BYTES)
def test_hmac_is_that_of_the_standard_library(key: bytes, message: bytes) -> None:
    assert _core.hmac_sha256(key, message) == hmac.digest(key, message, hashlib.sha256)
