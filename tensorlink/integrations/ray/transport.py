"""The transport itself, as Ray's interface `TensorTransportManager` wants it (Ray 2.60)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray._private import ray_constants
from ray.experimental.rdt import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
    util,
)
from ray.experimental.rdt.tensor_transport_manager import FetchRequest

from tensorlink.errors import ClosedError, TransferTimeoutError
from tensorlink.integrations.ray import devices, process, serializer
from tensorlink.transfer import Transfer
from tensorlink.types import TensorRef

if TYPE_CHECKING:
    import torch

log = logging.getLogger("tensorlink")

_registering = threading.Lock()

LIMIT_S: float = 0.75 * ray_constants.RDT_FETCH_FAIL_TIMEOUT_SECONDS
"""A transfer has so long at most: when it fails, Ray still listens (60 s, unless its user says otherwise)."""
_LEAST_S = LIMIT_S / 10
"""What a transfer is given that waited for its turn too long, or whose request comes from a host with another clock."""


def register(name: str) -> None:
    """See `tensorlink.integrations.ray.register`."""
    import torch

    with _registering:
        if name.upper() not in util.transport_manager_info:
            register_tensor_transport(name, ["cpu", "cuda"], TensorLinkTransport, torch.Tensor)


@dataclass
class Metadata(TensorTransportMetadata):
    """What Ray takes from the actor that has the tensors to those that want them."""

    handle: bytes = b""
    """The handle of the list of tensors; empty where there are none."""


@dataclass
class Request(CommunicatorMetadata):
    """That somebody wants an object."""

    asked_at: float
    """Seconds since the epoch, by the clock of the process that asked Ray."""

    def left(self) -> float:
        """How long the transfer may take: several that wait for each other end within one limit, not one after another."""
        return min(max(self.asked_at + LIMIT_S - time.time(), _LEAST_S), LIMIT_S)


@dataclass(eq=False)
class Fetch(FetchRequest):
    """A read that was begun. One with target buffers only begins when it is waited for."""

    ref: TensorRef | None = None
    device: str = "cpu"
    targets: list[torch.Tensor] | None = None
    transfer: Transfer | None = None

    __hash__ = object.__hash__  # each is itself; Ray's base class, which compares by value, has none


@dataclass
class _Kept:
    metadata: Metadata
    ref: TensorRef | None = field(repr=False)


class TensorLinkTransport(TensorTransportManager):
    """One-sided: who wants tensors reads them from the pool of the process that has them, which takes no part. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}  # object id: the snapshot of it that this process keeps
        self._receiving: dict[str, Transfer] = {}  # object id: the read that Ray may abort
        self._begun = threading.local()

    def tensor_transport_backend(self) -> str:
        return "TENSORLINK"

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """True, so Ray never kills an actor because a transfer failed."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """True without asking the actor: Ray calls this before each call of a method, and registers the transport itself."""
        return True

    # Where the tensors are

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[torch.Tensor]) -> Metadata:
        """Takes a snapshot of the tensors. For an object that has one already, which Ray asks for when it retries, that one.

        Blocks while the pool has no room. Raises: PoolExhaustedError; TypeError: a tensor cannot travel; ValueError.
        """
        serializer.confine()
        with self._lock:
            kept = self._kept.get(obj_id)
        if kept is None:
            try:
                made = _snapshot(rdt_object)
            except BaseException:
                _forget(obj_id)
                raise
            with self._lock:  # not meanwhile: a put that waits for room waits for garbage_collect
                kept = self._kept.setdefault(obj_id, made)
            if kept is not made:
                _release(made)
        return kept.metadata

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Any]) -> None:
        """Ends the snapshot. What readers have of it stays as it is until they drop it."""
        with self._lock:
            kept = self._kept.pop(obj_id, None)
        if kept is not None:
            _release(kept)

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Request:
        if not getattr(dst_actor, "_ray_enable_tensor_transport", True):  # to raise here could end this process
            log.error(
                "%s gets tensors and has no enable_tensor_transport=True: Ray may hang in it and end it", dst_actor
            )
        return Request(time.time())

    def send_multiple_tensors(
        self, tensors: list[Any], tensor_transport_metadata: Any, communicator_metadata: Any
    ) -> None:
        raise NotImplementedError("one-sided: nobody sends")

    # Where they are wanted

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """The tensors; blocks until they are here. Raises: as `wait_fetch_complete`."""
        fetch = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        if fetch.transfer is not None:
            self._receiving[obj_id] = fetch.transfer
        try:
            return self.wait_fetch_complete(fetch, communicator_metadata.left())
        finally:
            self._receiving.pop(obj_id, None)

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: list[Any] | None = None,
    ) -> Fetch:
        """Begins to read, into memory of our own. Target buffers are filled while `wait_fetch_complete` runs, and only then:
        where Ray itself gives up between the two, nobody could stop what is being written.
        """
        metadata: Metadata = tensor_transport_metadata
        if not metadata.handle:
            return Fetch(obj_id, [])
        with self._fencing():
            ref = TensorRef.from_bytes(metadata.handle)
            fetch = Fetch(obj_id, [], ref, metadata.tensor_device or "cpu", target_buffers or None)
            if fetch.targets is None or any(target.device.type != "cpu" for target in fetch.targets):
                fetch.transfer = process.endpoint().iget(ref, timeout=LIMIT_S)
        self._outstanding().add(fetch)
        return fetch

    def wait_fetch_complete(self, fetch_request: Any, timeout: float = -1) -> list[Any]:
        """The tensors of a read that was begun. Without target buffers large ones are private copy-on-write views of shared
        memory, where their owner is on this host.

        When one read of a thread fails, all others that it has begun are cancelled before this raises. Raises:
        TransferTimeoutError: `timeout` seconds passed, or three quarters of Ray's own limit; StaleRefError, PeerLostError,
        PeerRestartedError, NoPathError, LayoutMismatchError. After a failure nothing more is written to any target buffer.
        """
        fetch: Fetch = fetch_request
        if fetch.ref is None:
            return fetch.tensors
        with self._fencing():
            fetch.tensors = _complete(fetch, LIMIT_S if timeout < 0 else min(timeout, LIMIT_S))
        self._outstanding().discard(fetch)
        return fetch.tensors

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """Cancels the read of an argument. Once it returns, the read has ended."""
        transfer = self._receiving.get(obj_id)
        if transfer is not None:
            transfer.cancel()

    def _outstanding(self) -> weakref.WeakSet[Fetch]:
        """What this thread has begun and not got yet. Ray drops what it gives up, and what is dropped is cancelled."""
        if not hasattr(self._begun, "fetches"):
            self._begun.fetches = weakref.WeakSet()
        fetches: weakref.WeakSet[Fetch] = self._begun.fetches
        return fetches

    @contextlib.contextmanager
    def _fencing(self) -> Any:
        try:
            yield
        except BaseException:
            outstanding = self._outstanding()
            for fetch in list(outstanding):
                if fetch.transfer is not None:
                    fetch.transfer.cancel()
            outstanding.clear()
            raise


def _snapshot(tensors: list[torch.Tensor]) -> _Kept:
    if not tensors:
        return _Kept(Metadata([]), None)
    kinds = {tensor.device.type for tensor in tensors}
    if len(kinds) > 1:
        raise ValueError(f"Ray takes tensors of one kind of device in an object, not of {sorted(kinds)}")
    (kind,) = kinds
    endpoint = process.endpoint()
    ref = endpoint.put(tensors) if kind == "cpu" else devices.put_copied(endpoint, tensors)
    shapes: list[Any] = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    return _Kept(Metadata(shapes, kind, ref.to_bytes()), ref)


def _forget(obj_id: str) -> None:
    """Takes an object out of Ray's store. Ray put it there before it asked for the snapshot, and never frees what had none."""
    with contextlib.suppress(AttributeError, AssertionError):  # Ray's internals aren't those that are known
        ray._private.worker.global_worker.rdt_manager.rdt_store.pop_object(obj_id)


def _release(kept: _Kept) -> None:
    if kept.ref is not None:
        with contextlib.suppress(ClosedError):  # the endpoint has left, and its pool with it
            kept.ref.release()


def _complete(fetch: Fetch, timeout: float) -> list[torch.Tensor]:
    assert fetch.ref is not None
    try:
        if fetch.transfer is None:
            process.endpoint().get(fetch.ref, out=fetch.targets, timeout=timeout)
            return fetch.targets or []
        tensors: list[torch.Tensor] = fetch.transfer.wait(timeout)
    except TransferTimeoutError as error:
        if fetch.transfer is not None:
            fetch.transfer.cancel()
        error.peer = error.peer or str(fetch.ref.owner)
        raise
    if fetch.targets is None:
        return devices.moved(tensors, fetch.device)
    for target, tensor in zip(fetch.targets, tensors, strict=True):
        target.copy_(tensor)
    return fetch.targets
