"""What the transports of the engine share: each reads the memory of its peers' pools, over a connection of the engine."""

from __future__ import annotations

import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Sequence

from tensorlink import _core, recording
from tensorlink.errors import (
    AuthenticationError,
    ClosedError,
    LayoutMismatchError,
    PeerLostError,
    PeerRestartedError,
    PoolExhaustedError,
    TensorLinkError,
    TransferCancelledError,
    TransferTimeoutError,
)
from tensorlink.transports.base import Connection, Mailbox, Site, Transport
from tensorlink.types import Buffer, PeerId

_MAP_TIMEOUT_S = 60.0
_MAP_SLICE_S = 0.2


class EngineFetch:
    """Copies on a thread of its own, which `cancel` joins: that is the fence."""

    def __init__(self, connection: EngineConnection, pairs: Sequence[tuple[bytes, Buffer]]) -> None:
        self._connection = connection
        self._pairs = list(pairs)
        self._stop = _core.Stop()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tensorlink-fetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            views = [
                self._open(descriptor) for descriptor, _ in self._pairs
            ]  # all that can be held are before a byte moves
            for view, (_, target) in zip(views, self._pairs, strict=True):
                if view.nbytes > target.nbytes:
                    raise LayoutMismatchError(f"{view.nbytes} bytes do not fit into a target of {target.nbytes}")
            for view, (_, target) in zip(views, self._pairs, strict=True):
                view.copy_to(target.address, self._stop)
        except Exception as error:  # handed to whoever waits; without its frames, which keep the views
            self._error = error.with_traceback(None)

    def _open(self, descriptor: bytes) -> _core.View:
        """In slices, so that a peer that doesn't answer cannot delay a cancel."""
        deadline = time.monotonic() + _MAP_TIMEOUT_S
        while True:
            if self._stop.is_set():
                raise TransferCancelledError("the fetch was cancelled", peer=str(self._connection.peer), phase="fetch")
            try:
                return self._connection.open(descriptor, _MAP_SLICE_S)
            except TransferTimeoutError:
                if time.monotonic() > deadline:
                    raise

    def wait(self, timeout: float) -> None:
        self._thread.join(max(timeout, 0.0))
        if self._thread.is_alive():
            waited = recording.told(self._connection.flight.find(self._thread.native_id or 0))
            self.cancel()
            if isinstance(self._error, TransferCancelledError):
                self._error = TransferTimeoutError(
                    "the copy did not end in time", waited=waited, peer=str(self._connection.peer), phase="fetch"
                )
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self._stop.set()
        self._thread.join()


class EngineConnection(Connection):
    """A connection of the engine."""

    def __init__(self, transport: str, engine: _core.Engine, native: _core.Connection) -> None:
        self.transport = transport
        self.peer = PeerId(native.peer_name, native.peer_incarnation)
        self.flight = engine.flight
        self._engine = engine
        self._native = native
        self._lock = threading.Lock()
        self._closed = False
        self._exposed: set[int] = set()
        self._fetches: weakref.WeakSet[EngineFetch] = weakref.WeakSet()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the connection is closed", peer=str(self.peer), transport=self.transport)
        if not self._native.up:
            raise PeerLostError(f"{self.peer.name} has gone", peer=str(self.peer), transport=self.transport)

    def expose(self, buffers: Sequence[Buffer]) -> list[bytes]:
        """Memory in the pool is exposed where it lies; other memory as it is now, by a copy into the pool."""
        exposed: list[bytes] = []
        try:
            for buffer in buffers:
                self._check()
                descriptor = self._engine.expose(buffer.address, buffer.nbytes)
                if descriptor is None:
                    raise PoolExhaustedError(
                        f"no room in the pool for {buffer.nbytes} bytes", peer=str(self.peer), phase="expose"
                    )
                exposed.append(descriptor)
            self._remember(exposed)
        except BaseException:
            self.retract(exposed)
            raise
        return exposed

    def _remember(self, descriptors: Sequence[bytes]) -> None:
        with self._lock:
            self._check()
            self._exposed.update(_core.claim_of(descriptor) for descriptor in descriptors)

    def retract(self, descriptors: Sequence[bytes]) -> None:
        claims = [_core.claim_of(descriptor) for descriptor in descriptors]
        with self._lock:
            self._exposed.difference_update(claims)
        for claim in claims:
            self._engine.release(claim)

    def fetch(self, pairs: Sequence[tuple[bytes, Buffer]]) -> EngineFetch:
        with self._lock:
            self._check()
            fetch = EngineFetch(self, pairs)
            self._fetches.add(fetch)
        return fetch

    def map(self, descriptor: bytes, timeout: float) -> _core.View | None:
        self._check()
        return self.open(descriptor, timeout) if self._native.pid else None

    def open(self, descriptor: bytes, timeout: float) -> _core.View:
        self._check()
        return self._engine.open(self._native, descriptor, timeout)

    def lane(self) -> _core.Connection:
        return self._native

    @property
    def up(self) -> bool:
        return not self._closed and self._native.up

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            fetches, claims = list(self._fetches), list(self._exposed)
            self._exposed.clear()
        for fetch in fetches:
            fetch.cancel()
        for claim in claims:
            self._engine.release(claim)
        self._engine.disconnect(self._native)

    def abort(self) -> None:
        self.close()


class EngineTransport(Transport):
    """Connects two engines."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._lock = threading.Lock()
        self._closed = False
        self._connections: weakref.WeakSet[EngineConnection] = weakref.WeakSet()

    @abstractmethod
    def _dial(self, peer: PeerId, address: bytes, timeout: float, stop: _core.Stop | None) -> _core.Connection: ...

    def connect(
        self,
        peer: PeerId,
        address: bytes,
        mailbox: Mailbox | None,
        timeout: float,
        stop: _core.Stop | None = None,
    ) -> EngineConnection:
        try:
            if self._closed:
                raise ClosedError("the transport is closed")
            native = self._dial(peer, address, timeout, stop)
        except TensorLinkError as error:
            if isinstance(error, AuthenticationError) and "restarted" in error.message:
                error = PeerRestartedError(f"{peer.name} has restarted")
            error.peer, error.transport, error.phase = str(peer), self.name, "connect"
            raise error from None
        connection = EngineConnection(self.name, self.site.engine, native)
        with self._lock:
            self._connections.add(connection)
            closed = self._closed
        if closed:
            connection.close()
        return connection

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        for connection in connections:
            connection.close()


__all__ = ["EngineConnection", "EngineFetch", "EngineTransport"]
