"""Tensors through the codec: every dtype in every layout, bit for bit, and what is refused."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tensorlink import _core

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:the matrix subclass"),
]
EXTENDED = ["bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"]
EXTENDED += ["float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
NUMPY = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]
NUMPY += ["longdouble", "complex64", "complex128", "clongdouble", *EXTENDED]
TORCH = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]
TORCH += ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
TORCH += ["complex32", "complex64", "complex128"]

LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(2, 0, 1) if isinstance(x, np.ndarray) else x.permute(2, 0, 1),
    "sliced": lambda x: x[1:, ::2, 1:3],
    "offset": lambda x: x[2],
    "scalar": lambda x: x[1, 2, 3],
    "empty": lambda x: x[:, :0],
    "expanded": lambda x: np.broadcast_to(x[:1], (5, 4, 6)) if isinstance(x, np.ndarray) else x[:1].expand(5, 4, 6),
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name)) if name in EXTENDED else np.dtype(name)


def random_bytes(nbytes: int, name: str) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(7).integers(0, 256, nbytes, dtype=np.uint8)
    return values % 2 if name == "bool" else values


def numpy_array(name: str) -> np.ndarray[Any, Any]:
    dtype = numpy_dtype(name)
    return random_bytes(3 * 4 * 6 * dtype.itemsize, name).view(dtype).reshape(3, 4, 6)


def torch_tensor(name: str) -> torch.Tensor:
    dtype = getattr(torch, name)
    raw = torch.from_numpy(random_bytes(3 * 4 * 6 * dtype.itemsize, name).astype(np.uint8))
    return raw.view(dtype).reshape(3, 4, 6)


def bits(tensor: Any) -> bytes:
    if isinstance(tensor, torch.Tensor):
        dense = torch.empty(tensor.shape, dtype=tensor.dtype)
        dense.copy_(tensor) if not str(tensor.dtype).startswith("torch.float8") else None
        if str(tensor.dtype).startswith("torch.float8"):
            dense = tensor.view(torch.uint8).contiguous()
        return bytes(dense.reshape(-1).view(torch.uint8).numpy())
    return np.ascontiguousarray(tensor).tobytes()


def round_trip(obj: Any, *, copy: bool = True, like: str | None = None) -> Any:
    packed = _core.pack(obj)
    payload = np.frombuffer(bytearray(packed.to_bytes()), np.uint8) if packed.nbytes else bytearray()
    return _core.unpack(packed.meta, payload, like=like, copy=copy)


@pytest.fixture(params=["exchange api", "attributes"])
def torch_path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways to reach torch: its C exchange API, and what a version without it offers."""
    _core.torch_by_attributes(request.param == "attributes")
    yield
    _core.torch_by_attributes(False)


@pytest.mark.parametrize("copy", [True, False], ids=["copy", "view"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NUMPY)
def test_numpy(name: str, layout: str, copy: bool) -> None:
    sent = np.asarray(LAYOUTS[layout](numpy_array(name)))
    got = round_trip(sent, copy=copy)
    assert type(got) is np.ndarray and got.dtype is sent.dtype and got.shape == sent.shape
    assert bits(got) == bits(sent)
    assert got.flags.writeable == copy and got.flags.aligned


@pytest.mark.parametrize("copy", [True, False], ids=["copy", "view"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TORCH)
@pytest.mark.usefixtures("torch_path")
def test_torch(name: str, layout: str, copy: bool) -> None:
    sent = LAYOUTS[layout](torch_tensor(name))
    got = round_trip(sent, copy=copy)
    assert type(got) is torch.Tensor and got.dtype is sent.dtype and got.shape == sent.shape and got.is_contiguous()
    assert bits(got) == bits(sent)


@pytest.mark.parametrize("name", [n for n in TORCH if n != "complex32"])
def test_across_frameworks(name: str) -> None:
    sent = torch_tensor(name)
    array_ = round_trip(sent, like="numpy")
    assert type(array_) is np.ndarray and array_.dtype is numpy_dtype(name) and bits(array_) == bits(sent)
    tensor = round_trip(array_, like="torch")
    assert type(tensor) is torch.Tensor and tensor.dtype is sent.dtype and bits(tensor) == bits(sent)


@pytest.mark.parametrize("name", ["longdouble", "clongdouble", "float8_e3m4"])
def test_dtypes_that_torch_lacks(name: str) -> None:
    with pytest.raises(TypeError, match=f"torch has no dtype {name}"):
        round_trip(numpy_array(name), like="torch")


def test_numpy_has_no_complex32() -> None:
    with pytest.raises(TypeError, match="complex32"):
        round_trip(torch_tensor("complex32"), like="numpy")


def test_bfloat16_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorlink import tensors

    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match="ml_dtypes"):
        tensors.numpy_dtype("bfloat16")


@pytest.mark.usefixtures("torch_path")
def test_lazy_conjugate_and_negative() -> None:
    z = torch.complex(torch.arange(6.0), torch.arange(6.0) + 10).reshape(2, 3)
    for view in [z.conj(), z.conj().imag, z.conj().T, z.conj().imag[0, 1], torch._neg_view(torch.arange(4.0))]:
        got = round_trip(view)
        assert not got.is_conj() and not got.is_neg()
        assert torch.equal(got, view.resolve_conj().resolve_neg())


@pytest.mark.usefixtures("torch_path")
def test_gradients_stay_behind() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    got = round_trip({"p": parameter, "y": parameter * 2})
    assert type(got["p"]) is torch.Tensor and not got["p"].requires_grad and not got["y"].requires_grad
    assert torch.equal(got["p"], parameter.detach())


def test_other_sources() -> None:
    assert np.array_equal(round_trip(np.arange(5, dtype=">i4")), np.arange(5))
    assert round_trip(np.arange(5, dtype=">i4")).dtype is np.dtype("int32")
    assert np.array_equal(round_trip(bytearray(b"abc")), np.frombuffer(b"abc", np.uint8))
    assert np.array_equal(round_trip(memoryview(b"abcd")[::2]), np.frombuffer(b"ac", np.uint8))
    assert np.array_equal(round_trip(array.array("d", [1, 2])), np.array([1.0, 2.0]))
    scalar = round_trip(np.float32(1.5))
    assert type(scalar) is np.ndarray and scalar.shape == () and scalar.dtype is np.dtype("float32") and scalar == 1.5
    assert type(round_trip(np.float64(1.5))) is float
    assert np.array_equal(round_trip(np.arange(6)[::-2]), [5, 3, 1])
    assert np.array_equal(round_trip(np.asarray(np.matrix([[1, 2]]))), [[1, 2]])
    read_only = np.arange(3)
    read_only.flags.writeable = False
    assert np.array_equal(round_trip(read_only), [0, 1, 2])
    fields = np.zeros(4, dtype=[("a", "u1"), ("b", "<f4")])
    fields["b"] = [1, 2, 3, 4]
    assert np.array_equal(round_trip(fields["b"]), [1, 2, 3, 4])  # strides that are no multiple of the item, unaligned


class DLPackOnly:
    """A tensor of a framework that nobody knows."""

    def __init__(self, array_: np.ndarray[Any, Any], device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device = array_, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def test_dlpack_protocol() -> None:
    assert np.array_equal(round_trip(DLPackOnly(np.arange(4.0))), np.arange(4.0))
    with pytest.raises(TypeError, match=r"obj\['x'\].*CPU"):
        _core.pack({"x": DLPackOnly(np.arange(4.0), (2, 0))})


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta device"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "quantized"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    "uint1": (lambda: torch.empty(4, dtype=torch.uint8).view(torch.uint1), "uint1"),
    "int4": (lambda: torch.empty(4, dtype=torch.int8).view(torch.int4), "int4"),
    "object": (lambda: np.array([object()]), "object"),
    "text": (lambda: np.array(["a"]), "<U1"),
    "structured": (lambda: np.zeros(2, dtype=[("a", "f4")]), "dict of arrays"),
    "datetime": (lambda: np.zeros(2, "datetime64[s]"), "int64"),
    "timedelta": (lambda: np.zeros(2, "timedelta64[s]"), "int64"),
    "masked": (lambda: np.ma.masked_array([1, 2], [True, False]), "mask"),
    "numpy int4": (lambda: np.zeros(2, ml_dtypes.int4), "int4"),
    "numpy float4": (lambda: np.zeros(2, ml_dtypes.float4_e2m1fn), "float4"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("torch_path")
def test_refused(case: str) -> None:
    make, text = REFUSED[case]
    with pytest.raises(TypeError, match=text) as caught:
        _core.pack({"layers": [0, make()]})
    assert "obj['layers'][1]" in str(caught.value)


def test_fake_tensors_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    with pytest.raises(TypeError, match="FakeTensor"):
        _core.pack(fake)


def test_tensor_subclasses_travel_as_tensors() -> None:
    class Tagged(torch.Tensor):
        pass

    got = round_trip(torch.ones(3).as_subclass(Tagged))
    assert type(got) is torch.Tensor and torch.equal(got, torch.ones(3))
    buffer = torch.nn.Buffer(torch.ones(2))
    assert torch.equal(round_trip(buffer), torch.ones(2))
