"""What `local` and `shm` share: memory of the peer's pool, mapped here, under the engine's holds."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

from tensorlink import _core
from tensorlink.errors import (
    AuthenticationError,
    ClosedError,
    CorruptTransferError,
    LayoutMismatchError,
    PeerLostError,
    PeerRestartedError,
    PoolExhaustedError,
    TensorLinkError,
    TransferTimeoutError,
)
from tensorlink.transports.base import Connection, Fetch, Mailbox, Transport, View
from tensorlink.types import Buffer, PeerId

_MAP_TIMEOUT_S = 10.0


class PoolFetch:
    """Copies on a thread of its own, which `cancel` joins: that is the fence."""

    def __init__(self, connection: PoolConnection, pairs: Sequence[tuple[bytes, Buffer]]) -> None:
        self._connection = connection
        self._pairs = list(pairs)
        self._stop = _core.Stop()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tensorlink-fetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for descriptor, target in self._pairs:
                view = self._connection.map(descriptor, _MAP_TIMEOUT_S)
                if view.nbytes > target.nbytes:
                    raise LayoutMismatchError(f"{view.nbytes} bytes do not fit into a target of {target.nbytes}")
                view.copy_to(target.address, self._stop)
        except BaseException as error:  # handed to whoever waits
            self._error = error

    def wait(self, timeout: float) -> None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            self.cancel()
            raise TransferTimeoutError("the copy did not end in time", peer=str(self._connection.peer), phase="fetch")
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self._stop.set()
        self._thread.join()


class PoolConnection(Connection):
    """A connection of the engine."""

    def __init__(self, transport: str, engine: _core.Engine, native: _core.Connection) -> None:
        self.transport = transport
        self.peer = PeerId(native.peer_name, native.peer_incarnation)
        self._engine = engine
        self._native = native
        self._closed = False

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the connection is closed", peer=str(self.peer), transport=self.transport)
        if not self._native.up:
            raise PeerLostError(f"{self.peer.name} has gone", peer=str(self.peer), transport=self.transport)

    def expose(self, buffers: Sequence[Buffer]) -> list[bytes]:
        """Memory in the pool is exposed where it lies; other memory as it is now, by a copy into the pool."""
        self._check()
        exposed = []
        for buffer in buffers:
            descriptor = self._engine.expose(buffer.address, buffer.nbytes)
            if descriptor is None:
                self.retract(exposed)
                raise PoolExhaustedError(f"no room in the pool for {buffer.nbytes} bytes", phase="expose")
            exposed.append(descriptor)
        return exposed

    def retract(self, descriptors: Sequence[bytes]) -> None:
        for descriptor in descriptors:
            self._engine.release(_core.claim_of(descriptor))

    def fetch(self, pairs: Sequence[tuple[bytes, Buffer]]) -> Fetch:
        self._check()
        return PoolFetch(self, pairs)

    def map(self, descriptor: bytes, timeout: float) -> _core.View:
        self._check()
        return self._engine.open(self._native, descriptor, timeout)

    def lane(self) -> _core.Connection:
        return self._native

    @property
    def up(self) -> bool:
        return not self._closed and self._native.up

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._engine.disconnect(self._native)

    def abort(self) -> None:
        self.close()


class PoolTransport(Transport):
    """Connects two engines of one host."""

    def address(self) -> bytes:
        site = self.site
        fields = {"host": site.host, "pid": site.pid, "path": site.socket_path, "key": site.key.hex()}
        return json.dumps(fields).encode()

    def connect(self, peer: PeerId, address: bytes, mailbox: Mailbox | None, timeout: float) -> PoolConnection:
        fields = parse(address)
        try:
            native = self.site.engine.connect(
                str(fields["path"]), bytes.fromhex(str(fields["key"])), peer.name, peer.incarnation, timeout
            )
        except AuthenticationError as error:
            if "restarted" in error.message:
                raise PeerRestartedError(f"{peer.name} has restarted", peer=str(peer), transport=self.name) from None
            raise
        except TensorLinkError as error:
            error.peer, error.transport, error.phase = str(peer), self.name, "connect"
            raise
        return PoolConnection(self.name, self.site.engine, native)

    def close(self) -> None:
        """Its connections end with the engine, which the endpoint closes."""


def parse(address: bytes) -> dict[str, object]:
    """The fields of an address. Raises: CorruptTransferError: it is none."""
    try:
        fields = json.loads(address)
        str(fields["host"]), int(fields["pid"]), str(fields["path"]), bytes.fromhex(fields["key"])
    except (ValueError, KeyError, TypeError):
        raise CorruptTransferError("the address of a peer cannot be read") from None
    return dict(fields)


__all__ = ["PoolConnection", "PoolTransport", "View", "parse"]
