"""Frozen values that travel: who a peer is, what a tensor looks like, where its bytes are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from tensorlink.errors import CorruptTransferError, StaleRefError
from tensorlink.protocol import handle_pb2

MAX_NBYTES = 2**63 - 1
MAX_NDIM = 64  # the most that numpy and torch have
MAX_ITEMSIZE = 32  # complex256


@dataclass(frozen=True, order=True)
class PeerId:
    """A process that called `init`: its name and its incarnation, a number that grows at every restart."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"


@dataclass(frozen=True)
class PeerInfo:
    """What the coordinator knows of a live peer."""

    id: PeerId
    address: str
    """gRPC targets of its peer service, the nearest first and with commas between them."""
    host: str
    """Identity of its host (boot id): equal where memory can be shared."""
    pid: int
    services: tuple[str, ...] = ()
    """Names it serves, such as `weights/policy`."""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    leaving: bool = False
    """It has begun to drain: it finishes what it has, and will soon be gone."""

    @property
    def name(self) -> str:
        return self.id.name

    @property
    def incarnation(self) -> int:
        return self.id.incarnation


@dataclass(frozen=True)
class Layout:
    """Shape, dtype and strides of one tensor; `dtype` is a name such as `float32` or `bfloat16`."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Buffer:
    """A span of memory: `address`, `nbytes`, the `device` it lies on (`cpu`, `cuda:0`, ...)."""

    address: int
    nbytes: int
    device: str = "cpu"


@dataclass(frozen=True)
class Link:
    """One way in or out of a process that a transport advertises. Figures are declared, not measured."""

    transport: str
    bytes_per_s: float
    latency_s: float
    reach: str
    """Whom it reaches: `process`, `host` or `network`."""
    devices: tuple[str, ...] = ("cpu",)
    unavailable: str | None = None
    """Why the transport cannot be used in this process; None: it can."""


@dataclass(frozen=True)
class Figure:
    """What was measured of one way between two hosts."""

    latency_s: float
    bytes_per_s: float
    samples: int = 1


@dataclass(frozen=True)
class TensorRef:
    """A handle: names a tensor, or a tree of them, that its owner keeps readable. A value: copy it, pickle it, send it.

    `to_bytes` is under 1 KiB for one tensor. `release` works on what `put` returned, in the owner's process;
    elsewhere a handle is only read, by `get`.
    """

    id: int
    owner: PeerId
    address: str
    """gRPC targets of the owner, the nearest first and with commas between them, so that `get` needs no coordinator."""
    nbytes: int
    layout: Layout | None
    """Layout of the one tensor; None for a tree."""
    meta: bytes = field(repr=False)
    """Structure and layouts; empty when they lie in the block, before the payload."""
    descriptors: Mapping[str, bytes] = field(repr=False, hash=False)
    """For each transport, where the bytes are; opaque to all but that transport."""
    _release: Callable[[TensorRef], None] | None = field(default=None, repr=False, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the one tensor. Raises: TypeError: the handle names a tree."""
        return self._one().shape

    @property
    def dtype(self) -> str:
        """Name of the dtype of the one tensor. Raises: TypeError: the handle names a tree."""
        return self._one().dtype

    def _one(self) -> Layout:
        if self.layout is None:
            raise TypeError("this handle names a tree of tensors, which has no single shape or dtype; `get` it first")
        return self.layout

    def release(self) -> None:
        """Ends the handle: later reads raise `StaleRefError`, and its memory returns once readers drop their views.

        Idempotent. Raises: StaleRefError: this process isn't the owner's, or has the handle from elsewhere.
        """
        if self._release is None:
            raise StaleRefError(
                "only what `put` returned can be released",
                peer=str(self.owner),
                hint="In the owner's process call `endpoint.release(ref)`",
            )
        self._release(self)

    def __enter__(self) -> TensorRef:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def to_bytes(self) -> bytes:
        """The handle as bytes (protobuf message `Handle`)."""
        message = handle_pb2.Handle(
            id=self.id,
            owner=self.owner.name,
            incarnation=self.owner.incarnation,
            address=self.address,
            nbytes=self.nbytes,
            meta=self.meta,
            descriptors=dict(self.descriptors),
        )
        if self.layout is not None:
            message.layout.shape.extend(self.layout.shape)
            message.layout.dtype = self.layout.dtype
            message.layout.itemsize = self.layout.itemsize
        return message.SerializeToString(deterministic=True)

    @classmethod
    def from_bytes(cls, data: bytes) -> TensorRef:
        """The handle that `to_bytes` wrote. Raises: CorruptTransferError: `data` is no handle."""
        message = handle_pb2.Handle()
        try:
            message.ParseFromString(bytes(data))
        except (DecodeError, ValueError) as error:
            raise CorruptTransferError(f"these {len(data)} bytes are no handle: {error}") from None
        layout = None
        if message.HasField("layout"):
            layout = Layout(tuple(message.layout.shape), message.layout.dtype, message.layout.itemsize)
            _check_layout(layout)
        if message.nbytes > MAX_NBYTES:
            raise CorruptTransferError(f"a handle claims {message.nbytes} bytes")
        if not message.owner or not message.id or not message.descriptors:
            raise CorruptTransferError(f"these {len(data)} bytes are no handle: owner, id or descriptors are missing")
        return cls(
            id=message.id,
            owner=PeerId(message.owner, message.incarnation),
            address=message.address,
            nbytes=message.nbytes,
            layout=layout,
            meta=message.meta,
            descriptors=dict(message.descriptors),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A function: cloudpickle, which Ray uses, would take a method's code along.
        return _unpickled, (self.to_bytes(),)


def _unpickled(data: bytes) -> TensorRef:
    return TensorRef.from_bytes(data)


def _check_layout(layout: Layout) -> None:
    """Raises CorruptTransferError for a layout, given by a peer, that no tensor can have."""
    if (
        len(layout.shape) > MAX_NDIM
        or not 0 < layout.itemsize <= MAX_ITEMSIZE
        or not (layout.dtype.isascii() and layout.dtype.isidentifier())
        # An empty tensor may claim nothing absurd either: the product of its other sizes is bounded too.
        or math.prod(size or 1 for size in layout.shape) * layout.itemsize > MAX_NBYTES
    ):
        raise CorruptTransferError(f"no tensor has the layout of this handle: {layout!r:.200}")
