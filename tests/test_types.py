"""Values that travel: handles as bytes and pickles, and what their parser does with bytes that are none."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tensorlink.errors import CorruptTransferError, StaleRefError
from tensorlink.protocol import handle_pb2
from tensorlink.types import MAX_ITEMSIZE, MAX_NBYTES, MAX_NDIM, Layout, PeerId, PeerInfo, TensorRef

U64 = st.integers(1, 2**64 - 1)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
LAYOUTS = st.builds(
    Layout,
    shape=st.lists(st.integers(0, 200), max_size=7).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16", "bool", "complex128", "float8_e4m3fn"]),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
)
REFS = st.builds(
    TensorRef,
    id=U64,
    owner=st.builds(PeerId, TEXT, U64),
    address=TEXT,
    nbytes=st.integers(0, MAX_NBYTES),
    layout=st.none() | LAYOUTS,
    meta=st.binary(max_size=100),
    descriptors=st.dictionaries(TEXT, st.binary(max_size=64), min_size=1, max_size=4),
)
REF = TensorRef(
    id=2**64 - 1,
    owner=PeerId("trainer", 1_760_000_000_000_000),
    address="unix:/run/user/1000/tensorlink/default/1234.sock",
    nbytes=64,
    layout=Layout((4, 4), "float32", 4),
    meta=b"",
    descriptors={"shm": b"\x01" * 32},
)


@given(REFS)
def test_handle_roundtrip(ref: TensorRef) -> None:
    again = TensorRef.from_bytes(ref.to_bytes())
    assert again == ref
    assert hash(again) == hash(ref)
    assert again.to_bytes() == ref.to_bytes()
    assert pickle.loads(pickle.dumps(ref)) == ref


def test_handle_of_one_tensor_is_small() -> None:
    ref = TensorRef(
        id=2**64 - 1,
        owner=PeerId("n" * 100, 2**63),
        address="unix:" + "p" * 107 + ",[fe80::1234:5678:9abc:def0%interface-name-15]:65535",
        nbytes=MAX_NBYTES,
        layout=Layout((2**20,) * 8, "float8_e4m3fnuz", 1),
        meta=b"m" * 200,
        descriptors={f"transport{index}": b"d" * 64 for index in range(5)},
    )
    assert len(ref.to_bytes()) < 1024
    assert len(REF.to_bytes()) < 200


def test_handle_is_a_value() -> None:
    with pytest.raises(FrozenInstanceError):
        REF.id = 1  # type: ignore[misc]
    assert (REF.shape, REF.dtype, REF.nbytes) == ((4, 4), "float32", 64)
    assert "\\x01" not in repr(REF)


def test_handle_of_a_tree_has_no_shape() -> None:
    tree = replace(REF, layout=None)
    for name in ("shape", "dtype"):
        with pytest.raises(TypeError, match="tree"):
            getattr(tree, name)


def test_release_calls_the_owner_and_does_not_travel() -> None:
    released: list[TensorRef] = []
    ref = replace(REF, _release=released.append)
    assert ref == REF
    with ref as entered:
        assert entered is ref
    assert released == [ref]
    with pytest.raises(StaleRefError, match=r"endpoint\.release"):
        pickle.loads(pickle.dumps(ref)).release()


def parse(data: bytes) -> None:
    """Either a handle, which then writes itself again, or the one typed error."""
    try:
        ref = TensorRef.from_bytes(data)
    except CorruptTransferError:
        return
    assert TensorRef.from_bytes(ref.to_bytes()) == ref


@given(st.binary(max_size=300))
@example(b"")
def test_parser_takes_any_bytes(data: bytes) -> None:
    parse(data)


@given(REFS, st.data())
def test_parser_takes_damaged_handles(ref: TensorRef, data: st.DataObject) -> None:
    original = ref.to_bytes()
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    parse(bytes(damaged))
    parse(original[: data.draw(st.integers(0, len(original) - 1))])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_parser_takes_any_bytes_like(kind: type) -> None:
    assert TensorRef.from_bytes(kind(REF.to_bytes())) == REF


def forged(**changes: object) -> bytes:
    message = handle_pb2.Handle()
    message.ParseFromString(REF.to_bytes())
    for name, value in changes.items():
        if name in ("shape", "dtype", "itemsize"):
            message.layout.ClearField(name)
            if isinstance(value, list):
                message.layout.shape.extend(value)
            else:
                setattr(message.layout, name, value)
        elif value is None:
            message.ClearField(name)
        else:
            setattr(message, name, value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    "changes",
    [
        {"id": None},
        {"owner": None},
        {"descriptors": None},
        {"nbytes": 2**63},
        {"shape": [2**63]},
        {"shape": [2**32, 2**32]},
        {"shape": [0, 2**40, 2**40]},
        {"shape": [1] * (MAX_NDIM + 1)},
        {"itemsize": 0},
        {"itemsize": MAX_ITEMSIZE + 1},
        {"dtype": ""},
        {"dtype": "os.system('x')"},
    ],
    ids=str,
)
def test_forged_handle_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptTransferError):
        TensorRef.from_bytes(forged(**changes))


def test_handle_from_a_newer_version_is_read() -> None:
    assert TensorRef.from_bytes(REF.to_bytes() + b"\xfa\x7f\x03new") == REF


def test_layout_counts_bytes() -> None:
    assert Layout((), "float32", 4).nbytes == 4
    assert Layout((0, 7), "float32", 4).nbytes == 0
    assert Layout((3, 7), "bfloat16", 2).nbytes == 42


def test_peers_are_ordered_hashable_and_shown() -> None:
    assert PeerId("a", 1) < PeerId("a", 2) < PeerId("b", 1)
    assert str(PeerId("a", 1)) == "a#1"
    info = PeerInfo(PeerId("a", 1), "unix:/x", "host", 1, labels={"rack": "7"})
    assert (info.name, info.incarnation) == ("a", 1)
    assert len({info, replace(info, labels={"rack": "8"})}) == 2
