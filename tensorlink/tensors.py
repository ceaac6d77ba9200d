"""Framework adapters: how an object that the core can't read directly becomes a numpy array or a torch tensor that it can.

The core reads plain numpy arrays, torch tensors and parameters by itself; what comes here is rare or wrong. No framework is
imported here unless the object belongs to one.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from typing import Any

import numpy as np

from tensorlink.errors import LayoutMismatchError
from tensorlink.types import TensorRef

_SENDABLE = "a tree of dict, list, tuple, None, bool, int, float, str, bytes, TensorRef and tensors"


def handle_from_bytes(data: bytes) -> TensorRef:
    """The handle in a message. Raises: CorruptTransferError: it is none."""
    return TensorRef.from_bytes(data)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a name as the core writes them. Raises: TypeError: numpy has none, or ml_dtypes isn't installed."""
    if name == "complex32":
        raise TypeError('numpy has no dtype complex32; receive with like="torch"')
    if name != "bfloat16" and not name.startswith("float8_"):
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(
            f"numpy has {name} only through ml_dtypes, which isn't installed: pip install ml_dtypes"
        ) from None
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def canonical(obj: Any, path: str, writable: bool) -> Any:
    """A plain numpy array or torch tensor with the values of `obj`; shares its memory where it can.

    numpy scalars become 0-d arrays (`numpy.float64` alone never comes here: it is a float and travels as one). With
    `writable` the result must share the memory of `obj`, so that filling it fills `obj`.

    Raises: TypeError: `obj` cannot travel, with its `path` in the tree and what to do; LayoutMismatchError: only a copy of
    it could be filled.
    """
    if isinstance(obj, enum.Enum):
        raise TypeError(f"{path} is an enum ({type(obj).__name__}); send its .value")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _torch(torch, obj, path, writable)
    if isinstance(obj, np.generic):
        if writable:
            raise LayoutMismatchError(f"{path} is a numpy scalar and cannot be filled", hint="Give a 0-d array")
        return _numpy(np.asarray(obj), path, writable)
    if isinstance(obj, np.ndarray):
        return _numpy(obj, path, writable)
    if isinstance(obj, bytearray | memoryview) or type(obj).__module__ == "array":
        return _numpy(np.asarray(memoryview(obj)), path, writable)
    if hasattr(obj, "__dlpack__"):
        return _from_dlpack(obj, path, writable)
    try:
        view = memoryview(obj)
    except TypeError:
        name = type(obj).__qualname__
        raise TypeError(f"{path} is of type {name}, which cannot travel; {_advice(obj)}") from None
    return _numpy(np.asarray(view), path, writable)


def _advice(obj: Any) -> str:
    if hasattr(obj, "state_dict"):
        return "send its state_dict()"
    if dataclasses.is_dataclass(obj):
        return "send a dict of its fields"
    if isinstance(obj, set | frozenset | range) or hasattr(obj, "__next__"):
        return "send list(x)"
    if isinstance(obj, complex):
        return "send a tensor or array of it"
    return f"send {_SENDABLE}"


def _numpy(array: np.ndarray[Any, Any], path: str, writable: bool) -> np.ndarray[Any, Any]:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{path} is a masked array, whose mask would be lost; send {{'data': x.data, 'mask': x.mask}}")
    plain = np.asarray(array)
    dtype = plain.dtype
    if dtype.kind in "OSUVMmT" and not _is_extension(dtype):
        advice = {
            "O": "convert it to a numeric dtype, or send a list",
            "V": "send its fields as a dict of arrays",
            "M": "send x.view('int64') and the unit",
            "m": "send x.view('int64') and the unit",
        }.get(dtype.kind, "send x.tolist()")
        raise TypeError(f"{path} is a numpy array of dtype {dtype}, which cannot travel; {advice}")
    if not dtype.isnative:
        if writable:
            raise LayoutMismatchError(f"{path} is not in the byte order of this machine and cannot be filled in place")
        plain = plain.astype(dtype.newbyteorder("="))
    if _is_extension(dtype) and dtype.name not in _EXTENSIONS:
        raise TypeError(
            f"{path} has dtype {dtype.name}, whose elements are smaller than a byte; send x.view or x.astype('uint8')"
        )
    return plain


_EXTENSIONS = frozenset(
    ["bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"]
    + ["float8_e5m2fnuz", "float8_e8m0fnu"]
)


def _is_extension(dtype: np.dtype[Any]) -> bool:
    return dtype.num >= 256


def _torch(torch: Any, tensor: Any, path: str, writable: bool) -> Any:
    problem = _torch_problem(torch, tensor)
    if problem is not None:
        raise TypeError(f"{path} is {problem}")
    plain = tensor.detach()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    if plain.is_conj() or plain.is_neg():
        if writable:
            raise LayoutMismatchError(f"{path} is a lazily conjugated or negated view and cannot be filled in place")
        plain = plain.resolve_conj().resolve_neg()
    return plain


def _torch_problem(torch: Any, tensor: Any) -> str | None:
    """What keeps a tensor from travelling, and what to do instead."""
    names = {base.__name__ for base in type(tensor).__mro__}
    if "DTensor" in names:
        return "a DTensor; send x.to_local(), or publish it through the weights API"
    if "FakeTensor" in names or "FunctionalTensor" in names:
        return f"a {type(tensor).__name__}, which has no data; send real tensors"
    if tensor.is_nested:
        return "a nested tensor; send list(x.unbind())"
    if tensor.layout is not torch.strided:
        return f"a sparse tensor ({tensor.layout}); send x.to_dense(), or its indices and values"
    if tensor.is_quantized:
        return "a quantized tensor; send x.int_repr() with its scale and zero point"
    if tensor.device.type == "meta":
        return "on the meta device and has no data; materialise it first"
    if tensor.device.type != "cpu":
        return f"on {tensor.device}; this build moves CPU tensors: send x.cpu()"
    if _dtype_name(tensor.dtype) not in _TORCH:
        return f"of dtype {tensor.dtype}, which cannot travel; send x.view(torch.uint8) or convert it"
    if hasattr(tensor, "__tensor_flatten__"):
        return f"a {type(tensor).__name__}, which wraps other tensors; send those"
    return None


_TORCH = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
    + ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
    + ["complex32", "complex64", "complex128"]
)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def torch_fields(tensor: Any) -> tuple[int, str, tuple[int, ...], tuple[int, ...]] | None:
    """Address, dtype name, shape and strides (elements) of a torch tensor that has no C exchange API.

    None: it has no plain memory, or is lazily conjugated or negated.
    """
    torch = sys.modules["torch"]
    if _torch_problem(torch, tensor) is not None or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.data_ptr(), _dtype_name(tensor.dtype), tuple(tensor.shape), tensor.stride()


def torch_from_capsule(capsule: Any, dtype: str) -> Any:
    """The torch tensor of a DLPack capsule whose elements are to be read as `dtype`, of equal size."""
    import torch

    tensor = torch.utils.dlpack.from_dlpack(capsule)
    return tensor.view(getattr(torch, dtype))


def _from_dlpack(obj: Any, path: str, writable: bool) -> np.ndarray[Any, Any]:
    try:
        kind, _ = obj.__dlpack_device__()
    except Exception as error:
        raise TypeError(f"{path} ({type(obj).__qualname__}) doesn't say on which device it is: {error}") from error
    if kind not in (1, 3):
        raise TypeError(
            f"{path} ({type(obj).__qualname__}) isn't in CPU memory; this build moves CPU tensors: copy it there first"
        )
    try:
        return _numpy(np.from_dlpack(obj), path, writable)
    except (BufferError, RuntimeError, ValueError, TypeError) as error:
        if writable or not hasattr(obj, "__array__"):
            raise TypeError(f"{path} ({type(obj).__qualname__}) cannot be read: {error}") from error
    return _numpy(np.asarray(obj), path, writable)


class EmptyMaker:
    """Tensors of one dtype over given memory."""

    def __init__(self, dtype: np.dtype[Any], torch_dtype: Any = None) -> None:
        self._dtype = dtype
        self._torch_dtype = torch_dtype
        self.itemsize: int = dtype.itemsize if torch_dtype is None else torch_dtype.itemsize

    def over(self, memory: np.ndarray[Any, Any], shape: tuple[int, ...]) -> Any:
        """A tensor of `shape` whose bytes are those of `memory`, a byte array of just that size, which it keeps alive."""
        if self._torch_dtype is None:
            return memory.view(self._dtype).reshape(shape)
        import torch

        return torch.from_numpy(memory).view(self._torch_dtype).reshape(shape)


def empty_maker(dtype: Any, like: str) -> EmptyMaker:
    """For a dtype of torch or numpy, or the name of one. Raises: TypeError: there is none; ValueError: `like` is unknown."""
    name = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else np.dtype(dtype).name
    if like == "numpy":
        return EmptyMaker(numpy_dtype(name))
    if like != "torch":
        raise ValueError(f'like is "torch" or "numpy", not {like!r}')
    try:
        import torch
    except ImportError:
        raise TypeError('torch isn\'t installed; give like="numpy"') from None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    return EmptyMaker(np.dtype(np.uint8), found)
