"""The contract of a transport: two small abstract classes.

Values travel and resources never do: an address (`Transport.address`) and a descriptor (`Connection.expose`) are bytes
that mean something to the same transport in another process; a connection, a view and a fetch belong to one process.

Each side connects for itself. Two processes that have both connected to each other are a pair: what one exposes on its
connection, the other fetches or maps on its own.

`tensorlink.testing.TransportContract` checks all that is said here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from tensorlink import _core
from tensorlink.errors import NoPathError
from tensorlink.types import Buffer, Link, PeerId


class Mailbox(Protocol):
    """An ordered channel to the same transport in the peer, which the endpoint provides."""

    def send(self, message: bytes) -> None:
        """Queues a message; doesn't block. Raises: PeerLostError."""

    def recv(self, timeout: float) -> bytes:
        """The next message. Raises: PeerLostError, TransferTimeoutError."""


@dataclass(frozen=True)
class Site:
    """The process that a transport lives in, and the engine that it may use."""

    engine: _core.Engine
    socket_path: str
    """Unix socket of the engine."""
    key: bytes
    """What a peer must show there."""
    host: str
    """Identity of the host."""
    pid: int
    listen: str | None = None
    """IP address on which a transport may listen for other hosts; None: it may not, without a token or certificates."""
    ports: str | None = None
    """The range that its ports are from, `20000-20100`; None: any. `tensorlink.network.listener` takes it."""


class Fetch(Protocol):
    """A copy from a peer's memory into ours, in progress. The targets must stay alive until `wait` or `cancel` has returned."""

    def wait(self, timeout: float) -> None:
        """Until all bytes have arrived; may be called again, with the same outcome.

        When it has returned or raised, not one byte more lands in any target. A wait that times out has cancelled the
        fetch, which may take a grace of a second more than `timeout`.

        Raises: TransferTimeoutError; TransferCancelledError: after `cancel`, or an end of the connection by its own
        process, that came before the last byte; what `fetch` says.
        """

    def cancel(self) -> None:
        """Stops it. Once this returns, not one byte more lands in any target.

        Blocks for a second at most. Idempotent; never raises; without effect on a fetch that is complete.
        """


class View(Protocol):
    """A peer's bytes, readable in place until the view and all that was built from it are gone."""

    @property
    def nbytes(self) -> int:
        """Bytes in all its spans."""

    def addresses(self) -> list[tuple[int, int]]:
        """(address, nbytes) of each span; read-only."""

    def unpack(
        self,
        meta: bytes,
        like: str | None,
        copy: bool = False,
        stop: _core.Stop | None = None,
        timeout_s: float = -1.0,
    ) -> Any:
        """The object in it. Raises: CorruptTransferError, TypeError, TransferTimeoutError, TransferCancelledError."""

    def fill(self, meta: bytes, out: Any, stop: _core.Stop | None, timeout_s: float) -> Any:
        """Fills the tensors of `out`. Raises: LayoutMismatchError, TransferTimeoutError, TransferCancelledError."""


class Connection(ABC):
    """Live state towards one incarnation of one peer. Methods may be called from any thread.

    After `close` or `abort`, `expose`, `fetch` and `map` raise `ClosedError`; after the peer has gone, `PeerLostError`.
    `retract`, `close` and `abort` work at all times, and views that were opened before stay readable.
    """

    transport: str
    peer: PeerId

    @abstractmethod
    def expose(self, buffers: Sequence[Buffer]) -> list[bytes]:
        """Makes memory readable for the peer and returns a descriptor for each buffer, of any size, 0 too.

        It stays exposed, and the caller must not change the memory, until `retract` or the end of this connection. All
        or none: after a failure none of the buffers is exposed. Raises: PoolExhaustedError.
        """

    @abstractmethod
    def retract(self, descriptors: Sequence[bytes]) -> None:
        """Ends what `expose` began: from now on the peer can begin no read of it; one that has begun gets the old bytes.

        Idempotent; doesn't wait for readers. Raises: CorruptTransferError: that is no descriptor.
        """

    @abstractmethod
    def fetch(self, pairs: Sequence[tuple[bytes, Buffer]]) -> Fetch:
        """Begins to copy what the peer exposed into memory of ours, of at least that size, and returns at once.

        A target may be larger: what lies behind the exposed bytes stays as it is. Any number of fetches may run at once.

        Raises, here or from `wait`: StaleRefError: retracted, or never exposed; CorruptTransferError: no descriptor, or
        one that names what isn't there; LayoutMismatchError: a target is too small, and no byte has moved; PeerLostError.
        What the targets hold after any other failure is unknown, but nothing lands in them any more.
        """

    @abstractmethod
    def map(self, descriptor: bytes, timeout: float) -> View | None:
        """The exposed memory in place, with no copy; None where this transport or memory cannot do that.

        What the view shows never changes: not by `retract`, not by what the owner does with its memory then, and not by
        the death of the owner. Blocks at most `timeout` seconds. Raises: as `fetch`, and TransferTimeoutError.
        """

    def open(self, descriptor: bytes, timeout: float) -> View:
        """The exposed memory as it is through a view: in place where it can be mapped, else brought here, into memory of this
        process, when it is first looked at. Looking then may block, and raises what `fetch` says.

        Blocks at most `timeout` seconds. Raises: as `map`; NoPathError: this transport has no views.
        """
        view = self.map(descriptor, timeout)
        if view is None:
            raise NoPathError(f"{self.transport} cannot open it", peer=str(self.peer), transport=self.transport)
        return view

    @abstractmethod
    def lane(self) -> _core.Connection | None:
        """The ordered stream of messages of this connection, or None: they go over gRPC."""

    @property
    @abstractmethod
    def up(self) -> bool:
        """Whether the peer was there when last heard of. Doesn't block."""

    @abstractmethod
    def close(self) -> None:
        """Ends it gracefully: what it exposed is retracted, its fetches are cancelled. Idempotent; may be called at both ends
        at once; a close that fails has still closed."""

    @abstractmethod
    def abort(self) -> None:
        """Ends it at once, without a word to the peer if need be. After it returns no byte lands in any target, and the peer
        can begin no read of what this connection exposed. Idempotent; never raises."""


class Transport(ABC):
    """One way for bytes to travel. Made once for each endpoint; owns no thread of the caller's."""

    name: ClassVar[str]

    def __init__(self, site: Site) -> None:
        self.site = site

    @abstractmethod
    def links(self) -> tuple[Link, ...]:
        """What it can do in this process, or why it can't (`Link.unavailable`). Doesn't block."""

    @abstractmethod
    def address(self) -> bytes:
        """What a peer needs to connect here; the same at every call. Secret: it travels over the authenticated control
        channel only."""

    def where(self, address: bytes) -> str:
        """Where an address leads, for people: `HOST:PORT`, a path, nothing secret; empty: there is no telling.

        Raises: CorruptTransferError: it is no address of this transport.
        """
        return ""

    @abstractmethod
    def reaches(self, local: bytes, remote: bytes) -> str | None:
        """None: the processes with these addresses reach each other. Else why not. Pure and symmetric.

        Raises: CorruptTransferError: one of them is no address of this transport.
        """

    @abstractmethod
    def connect(
        self,
        peer: PeerId,
        address: bytes,
        mailbox: Mailbox | None,
        timeout: float,
        stop: _core.Stop | None = None,
    ) -> Connection:
        """Connects to a peer, within `timeout` seconds, and gives up within one once `stop` is set.

        Raises: PeerLostError: nobody is there; PeerRestartedError: another incarnation is; AuthenticationError: the key
        in the address is wrong; CorruptTransferError: `address` is none; TransferTimeoutError; TransferCancelledError:
        `stop` was set; ClosedError: after `close`.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes all its connections. Idempotent."""
