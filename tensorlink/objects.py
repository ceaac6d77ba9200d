"""Handles: `put`, `get` and tensors in the pool."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tensorlink import _core, tensors
from tensorlink.errors import (
    ClosedError,
    CorruptTransferError,
    NoPathError,
    PeerLostError,
    PoolExhaustedError,
    StaleRefError,
    TensorLinkError,
    TransportError,
)
from tensorlink.links import Links, PeerLink
from tensorlink.observing import Observing
from tensorlink.transfer import Background, Finished, InFlight, Transfer, Used, patiently
from tensorlink.transports.base import Connection
from tensorlink.types import Layout, TensorRef

_INLINE_META = 512
_ATTEMPTS = 3


class Objects:
    """The one-sided half of an endpoint. Thread-safe."""

    def __init__(
        self,
        engine: _core.Engine,
        links: Links,
        address: str,
        exhausted: Callable[[int, str], PoolExhaustedError],
        failed: Callable[[TensorLinkError], None],
        work: InFlight,
        observing: Observing,
    ) -> None:
        self._engine = engine
        self._links = links
        self._observing = observing
        self._work = work
        self._address = address
        self._exhausted = exhausted
        self._failed = failed

    def put(
        self, obj: Any, copy: bool, reads: int | None, ttl: float | None, checksum: bool, timeout: float
    ) -> TensorRef:
        """As `Endpoint.put`."""
        if reads is not None and reads < 1:
            raise ValueError(f"reads must be at least 1, not {reads}")
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl must be positive, not {ttl}")
        packed = _core.pack(obj)
        stored = None if copy else self._engine.claim_in_place(packed, reads or 0, ttl or 0.0, checksum)
        if stored is None:
            stored = self._engine.store(packed, reads or 0, ttl or 0.0, 0, _INLINE_META, timeout, checksum)
        if stored is None:
            raise self._exhausted(packed.nbytes, "put")
        return TensorRef(
            id=stored.claim,
            owner=self._links.me,
            address=self._address,
            nbytes=packed.nbytes,
            layout=_layout_of(packed),
            meta=stored.meta,
            descriptors=dict.fromkeys(self._links.transports, stored.descriptor),
            _release=self.release,
        )

    def release(self, ref: TensorRef) -> None:
        """As `Endpoint.release`."""
        if ref.owner != self._links.me:
            raise StaleRefError(
                f"the handle belongs to {ref.owner}, and this is {self._links.me}",
                peer=str(ref.owner),
                hint="Release it in its owner's process",
            )
        self._engine.release(ref.id)

    def get(
        self,
        ref: TensorRef,
        out: Any,
        like: str | None,
        timeout: float,
        stop: _core.Stop | None = None,
        only: str | None = None,
        used: Used | None = None,
    ) -> Any:
        """As `Endpoint.get`, with `only` as its `transports`; `used` learns of the transport."""
        link = self._links.fast(ref.owner.name) if only is None else None
        if (
            out is None and link is not None and link.near
        ):  # a look at shared memory is over before a drain can wait for it
            return self._get(link, ref, out, like, timeout, stop, only, used)
        with self._work:
            return self._get(link, ref, out, like, timeout, stop, only, used)

    def _get(
        self,
        link: PeerLink | None,
        ref: TensorRef,
        out: Any,
        like: str | None,
        timeout: float,
        stop: _core.Stop | None,
        only: str | None,
        used: Used | None,
    ) -> Any:
        deadline = time.monotonic() + timeout
        attempts = _ATTEMPTS
        while True:
            if only is not None:
                link = self._links.over(ref.owner, ref.address, only, ref.nbytes, timeout, stop)
            elif link is None or link.peer.incarnation != ref.owner.incarnation:
                link = self._links.to_owner(ref.owner, ref.address, timeout, stop)
            if used is not None:
                used.transport = link.connection.transport
            try:
                if link.near or not self._observing.due(ref.nbytes):
                    return self._read(link.connection, ref, out, like, timeout, stop)
                with self._observing.read(
                    link.peer, link.connection.transport, ref.nbytes, link.client.max_bytes_per_s
                ):
                    return self._read(link.connection, ref, out, like, timeout, stop)
            except PeerLostError:
                if self._engine.closed:
                    raise ClosedError("the endpoint was shut down", phase="get") from None
                self._links.drop(ref.owner)
                raise self._fail(self._links.lost(ref.owner, link.connection.transport, "get"), ref, "") from None
            except TensorLinkError as error:
                if attempts == 1 or not isinstance(error, TransportError) or error.code:
                    raise self._fail(error, ref, link.connection.transport) from None
                self._links.fail_over(link, error)
                link = None
                timeout = max(deadline - time.monotonic(), 0.0)
                attempts -= 1

    def _read(
        self,
        connection: Connection,
        ref: TensorRef,
        out: Any,
        like: str | None,
        timeout: float,
        stop: _core.Stop | None,
    ) -> Any:
        descriptor = ref.descriptors.get(connection.transport)
        if descriptor is None:
            have = ", ".join(ref.descriptors)
            raise NoPathError(f"the handle has no descriptor for {connection.transport}, only for {have}")
        if _core.claim_of(descriptor) != ref.id:
            raise CorruptTransferError("the handle contradicts itself")
        view = patiently(functools.partial(connection.open, descriptor), timeout, stop)
        if out is None:
            return view.unpack(ref.meta, like, False, stop, timeout)
        return view.fill(ref.meta, out, stop, timeout)

    def iget(self, ref: TensorRef, out: Any, like: str | None, timeout: float, only: str | None = None) -> Transfer:
        """As `Endpoint.iget`."""
        link = self._links.fast(ref.owner.name) if only is None else None
        used = Used(link.connection.transport if link is not None else "")
        if out is None and link is not None and link.peer == ref.owner:
            try:
                return Finished(self.get(ref, None, like, timeout, used=used), used.transport)
            except Exception as error:
                return Finished(None, used.transport, error)
        work = self._work.around(lambda stop: self.get(ref, out, like, timeout, stop, only, used))
        return Background(work, used, self._engine.flight)

    def empty(self, shape: Sequence[int] | int, dtype: Any, device: str, like: str, timeout: float) -> Any:
        """As `Endpoint.empty`."""
        if device != "cpu":
            raise TypeError(f"this version allocates on cpu, not on {device}")
        dims = (shape,) if isinstance(shape, int) else tuple(int(d) for d in shape)
        if any(d < 0 for d in dims):
            raise ValueError(f"a shape has no negative dimensions: {dims}")
        make = tensors.empty_maker(dtype, like)
        nbytes = int(np.prod(dims, dtype=object)) * make.itemsize
        memory = self._engine.empty(nbytes, timeout)
        if memory is None:
            raise self._exhausted(nbytes, "empty")
        return make.over(memory, dims)

    def _fail(self, error: TensorLinkError, ref: TensorRef, transport: str) -> TensorLinkError:
        error.peer = error.peer or str(ref.owner)
        error.transport = error.transport or transport or None
        error.phase = error.phase or "get"
        if isinstance(error, StaleRefError) and error.hint is None:
            error.hint = "Ask its owner for a new handle"
        self._failed(error)
        return error


def _layout_of(packed: _core.Packed) -> Layout | None:
    """Layout of an object that is one tensor; None for a tree."""
    single = packed.single()
    return None if single is None else Layout(*single)
