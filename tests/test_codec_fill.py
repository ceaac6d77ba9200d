"""`out=`: what fits is filled in place by value, what doesn't is named before a byte moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tensorlink import _core
from tensorlink.errors import CorruptTransferError, LayoutMismatchError


def fill(sent: Any, out: Any) -> Any:
    packed = _core.pack(sent)
    return _core.fill(packed.meta, packed.to_bytes(), out)


def test_tree() -> None:
    sent = {"step": 7, "w": torch.arange(6.0).reshape(2, 3), "b": [np.ones(4, "f2"), None], "note": "x"}
    out = {"note": "?", "b": [torch.zeros(4, dtype=torch.float16), 3], "w": np.zeros((3, 2), "f4").T, "extra": 1}
    got = fill(sent, out)
    assert got["w"] is out["w"] and got["b"][0] is out["b"][0]
    assert got["step"] == 7 and got["note"] == "x" and got["b"][1] is None and "extra" not in got
    assert np.array_equal(out["w"], sent["w"]) and out["b"][0].tolist() == [1.0] * 4


def test_one_tensor_is_returned_itself() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert fill(torch.ones(3), parameter) is parameter and parameter.tolist() == [1.0] * 3
    data = bytearray(3)
    assert fill(np.arange(3, dtype="u1"), data) is data and data == b"\0\1\2"


def test_tied_tensors() -> None:
    x = torch.ones(2)
    out = [torch.zeros(2), torch.zeros(2)]
    fill([x, x], out)
    assert out[0].tolist() == out[1].tolist() == [1.0, 1.0]
    one = torch.zeros(2)
    got = fill([x, x], [one, one])
    assert got[0] is one and got[1] is one and one.tolist() == [1.0, 1.0]
    with pytest.raises(LayoutMismatchError, match=r"obj\[1\] shares"):
        fill([torch.ones(2), torch.ones(2)], [one, one])


def test_differences_are_listed_and_nothing_is_written() -> None:
    sent = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4), "d": [torch.ones(1)], "e": 5}
    out = {"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.float64), "c": torch.zeros(2, 2), "f": torch.zeros(1)}
    with pytest.raises(LayoutMismatchError) as caught:
        fill(sent, out)
    text = str(caught.value)
    assert "obj['b']: float32(3,) arrived, out has float64(3,)" in text
    assert "obj['c']: float32(4,) arrived, out has float32(2, 2)" in text
    assert "obj['d'][0]: missing in out" in text and "obj['f']: only in out" in text and "'e'" not in text
    assert not out["a"].any()


def test_many_differences_are_counted() -> None:
    with pytest.raises(LayoutMismatchError, match=r"and 20 more") as caught:
        fill([torch.ones(1)] + [np.ones(i) for i in range(2, 31)], [])
    assert str(caught.value).count("missing") == 10


def test_what_cannot_be_filled() -> None:
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    for out in [
        read_only,
        np.zeros(3, ">f8"),
        np.broadcast_to(np.zeros(1), 3),
        torch.zeros(1, dtype=torch.float64).expand(3),
    ]:
        with pytest.raises(LayoutMismatchError, match="obj"):
            fill(np.ones(3), out)
    with pytest.raises(LayoutMismatchError, match="obj"):
        fill(torch.ones(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64).conj())
    with pytest.raises(LayoutMismatchError, match="obj"):
        fill(np.float32(1), np.float32(1))
    with pytest.raises(LayoutMismatchError, match="obj"):
        fill(np.ones(2, "u1"), memoryview(b"ab"))


def test_requires_grad() -> None:
    out = torch.zeros(3, requires_grad=True)
    fill(torch.ones(3), out)
    assert out.tolist() == [1.0] * 3 and out.requires_grad


def test_short_payload_writes_nothing() -> None:
    out = [np.zeros(4), np.zeros(4)]
    packed = _core.pack([np.ones(4), np.ones(4)])
    with pytest.raises(CorruptTransferError):
        _core.fill(packed.meta, packed.to_bytes()[:-1], out)
    assert not out[0].any() and not out[1].any()


def test_large() -> None:
    """Several pieces, contiguous and not."""
    sent = np.random.default_rng(0).random((2500, 1500))
    for out in [np.zeros((2500, 1500)), np.zeros((1500, 2500)).T, np.zeros((2500, 1600))[:, 100:]]:
        fill(sent, out)
        assert np.array_equal(out, sent)
