"""Trees through the codec: their scalars, keys, aliases, depth and errors."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tensorlink import _core
from tensorlink.types import Layout, PeerId, TensorRef

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**64), 2**64)
    | st.floats()
    | st.text()
    | st.binary()
    | st.text(st.characters())
)
keys = st.recursive(scalars, lambda inner: st.tuples(inner, inner), max_leaves=3)
arrays = hnp.arrays(st.sampled_from(["f4", "i8", "?", "c8"]), hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
trees = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=25,
)


def round_trip(obj: Any, *, copy: bool = True) -> Any:
    packed = _core.pack(obj)
    return _core.unpack(packed.meta, packed.to_bytes(), copy=copy)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype is b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(*k) and same(a[k[0]], b[k[1]]) for k in zip(a, b, strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes() or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(trees)
def test_any_tree(tree: Any) -> None:
    assert same(round_trip(tree), tree)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(trees)
def test_any_tree_as_views(tree: Any) -> None:
    assert same(round_trip(tree, copy=False), tree)


def test_surrogates() -> None:
    assert round_trip({"\udc80": "\ud800x"}) == {"\udc80": "\ud800x"}


def test_subclasses_travel_as_their_base() -> None:
    Pair = namedtuple("Pair", "a b")
    ordered = OrderedDict(a=1, b=2)
    ordered.move_to_end("a")
    got = round_trip([Pair(1, 2), ordered, defaultdict(list, x=[1]), torch.Size([2, 3]), np.str_("s")])
    assert got == [(1, 2), {"b": 2, "a": 1}, {"x": [1]}, (2, 3), "s"]
    assert [type(x) for x in got] == [tuple, dict, dict, tuple, str] and list(got[1]) == ["b", "a"]


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize("value", [Colour.RED, Number.ONE, object(), {1, 2}, 1j, print], ids=repr)
def test_refused_with_its_path(value: Any) -> None:
    with pytest.raises(TypeError, match=r"obj\['state'\]\[3\]\[\('a', 1\)\]"):
        _core.pack({"state": (0, 1, 2, {("a", 1): value})})


@pytest.mark.parametrize("key", [Colour.RED, frozenset(), (1, object())], ids=repr)
def test_keys_that_are_refused(key: Any) -> None:
    with pytest.raises(TypeError, match=r"obj\['state'\].* key"):
        _core.pack({"state": {key: 1}})


def nested(depth: int) -> list[Any]:
    tree: list[Any] = []
    for _ in range(depth - 1):
        tree = [tree]
    return tree


def test_depth() -> None:
    got, depth = round_trip(nested(1000)), 1
    while got:
        (got,), depth = got, depth + 1
    assert depth == 1000
    with pytest.raises(ValueError, match="1000 deep"):
        _core.pack(nested(1001))
    with pytest.raises(ValueError, match="1000 deep"):
        _core.pack(nested(100_000))
    key: tuple[Any, ...] = ()
    for _ in range(1100):
        key = (key,)
    with pytest.raises(ValueError, match="1000 deep"):
        _core.pack({key: 1})


def test_cycles() -> None:
    loop: dict[str, Any] = {"a": 1}
    loop["self"] = [loop]
    with pytest.raises(ValueError, match="contains itself"):
        _core.pack({"x": loop})


def test_one_tensor_at_two_places() -> None:
    x, y = torch.randn(4), np.arange(3)
    tree = {"a": x, "b": [x, y], "c": x.view(4), "d": x[:2], "e": y}
    packed = _core.pack(tree)
    assert packed.tensors == 3  # x, y and the view of another shape
    got = round_trip(tree)
    assert got["a"] is got["b"][0] and got["a"] is got["c"] and got["b"][1] is got["e"] and got["d"] is not got["a"]
    assert torch.equal(got["a"], x) and torch.equal(got["d"], x[:2])
    assert [row[4] for row in _core.describe(packed.meta)] == [None, 0, None, 0, None, 1]


def test_aliases_among_many() -> None:
    tensors = [torch.full((2,), float(i)) for i in range(300)]
    got = round_trip([*tensors, *reversed(tensors)])
    assert all(got[i] is got[599 - i] and got[i][0] == i for i in range(300))


def test_empty_tensors_arent_confused() -> None:
    empty = torch.empty(0, 3)
    got = round_trip([empty, torch.empty(2, 0), empty, np.empty((0,), "f2")])
    assert got[0].shape == (0, 3) and got[1].shape == (2, 0) and got[0] is got[2] and got[3].dtype == np.float16


def test_adapted_objects_are_aliased_too() -> None:
    data = bytearray(b"abc")
    got = round_trip([data, data])
    assert got[0] is got[1]


def test_handles() -> None:
    ref = TensorRef(7, PeerId("a", 3), "unix:x", 12, Layout((3,), "float32", 4), b"", {"shm": b"d"})
    got = round_trip({"ref": ref})["ref"]
    assert type(got) is TensorRef and got == ref


def test_describe() -> None:
    meta = _core.pack(
        {"layers": [torch.zeros(2, 3), {1: np.zeros(4, "u1"), (1, "x"): 5, "it's": torch.zeros(())}]}
    ).meta
    assert _core.describe(meta) == [
        ("obj['layers'][0]", (2, 3), "float32", 24, None),
        ("obj['layers'][1][1]", (4,), "uint8", 4, None),
        ("obj['layers'][1]['it\\'s']", (), "float32", 4, None),
    ]


def test_frameworks() -> None:
    assert _core.meta_frameworks(_core.pack([1]).meta) == 0
    assert _core.meta_frameworks(_core.pack([np.ones(1), torch.ones(1)]).meta) == 3
    assert _core.meta_frameworks(_core.pack(torch.ones(1)).meta, "numpy") == 1
    with pytest.raises(ValueError, match="like"):
        _core.meta_frameworks(_core.pack(torch.ones(1)).meta, "jax")


def test_changes_while_packing() -> None:
    tree: dict[Any, Any] = {}

    class Hostile:
        def __dlpack_device__(self) -> tuple[int, int]:
            tree.clear()
            return 1, 0

        def __dlpack__(self, **_: Any) -> Any:
            return np.ones(1).__dlpack__()

    tree.update({"a": Hostile(), "b": 2})
    with pytest.raises(RuntimeError, match="changed"):
        _core.pack(tree)
