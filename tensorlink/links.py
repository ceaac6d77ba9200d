"""Links: the connection to each peer, made when it is first needed and again after the peer has restarted."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tensorlink import _core
from tensorlink.control import ControlClient, Hello, PeerClient
from tensorlink.errors import (
    ClosedError,
    PeerLostError,
    PeerRestartedError,
    PeerUnknownError,
    TensorLinkError,
    TransferTimeoutError,
    TransportError,
)
from tensorlink.flight import doing, failed_over
from tensorlink.lifecycle import Connected, Dialled, Unreached
from tensorlink.paths import PathReport
from tensorlink.settings import Settings, admits
from tensorlink.transfer import check_stop, patiently
from tensorlink.transports.base import Connection, Site, Transport
from tensorlink.types import PeerId, PeerInfo
from tensorlink.ways import Ways, no_path

_GONE_WAIT_S = 0.05
_STARTING_S = 0.005
_SLICE_S = 0.1
_TRY_S = 5.0


@dataclass(frozen=True)
class PeerLink:
    """A working connection, and the gRPC channel beside it."""

    peer: PeerId
    connection: Connection
    client: PeerClient
    lane: _core.Connection | None
    """Where messages go; None: over gRPC."""
    near: bool
    """Whether memory is shared with it."""
    addresses: Mapping[str, bytes] = field(repr=False)
    """Where it is reached by each of its transports. Secret."""


class Links:
    """One link to each peer, and others beside it where a call asks for them. Thread-safe; connecting blocks only those that
    want the same peer."""

    def __init__(self, settings: Settings, site: Site, control: ControlClient) -> None:
        self._settings = settings
        self._control = control
        self._roster = control.roster
        self._engine = site.engine
        self.me = PeerId(control.name, 0)
        """Set by the endpoint once it has joined."""
        self.ways = Ways(settings, site)
        self.transports: dict[str, Transport] = self.ways.transports
        self.failovers: dict[str, int] = {}
        """How often a path to a peer failed in use."""
        self._links: dict[str, PeerLink] = {}
        self._beside: dict[PeerId, dict[str, PeerLink]] = {}  # further ones, by other transports that a call asked for
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._dialling: set[PeerClient] = set()
        self._closed = False

    def fast(self, name: str) -> PeerLink | None:
        """The link that stands, if it works. Doesn't block."""
        link = self._links.get(name)
        if link is None:
            return None
        up = link.connection.up if link.lane is None else link.lane.up  # the same, at less cost
        return link if up else None

    def to_name(self, name: str, timeout: float, stop: _core.Stop | None = None) -> PeerLink:
        """The link to whoever has the name now; a name that never joined is waited for, until `stop` is set.

        Raises: TransferCancelledError, PeerUnknownError, PeerLostError, NoPathError, AuthenticationError, TransferTimeoutError.
        """
        link = self.fast(name)
        if link is not None:
            return link
        deadline = time.monotonic() + timeout
        with doing(self._engine.flight, "connect", name, "name"):
            info = self._resolve(name, deadline, stop)
        with self._turn(info.id, deadline, stop):
            link = self.fast(name)
            if link is not None:
                return link
            self._drop(name)
            return self._connect(info.id, info.address, deadline, stop)

    def to_owner(self, peer: PeerId, address: str, timeout: float, stop: _core.Stop | None = None) -> PeerLink:
        """The link to exactly this incarnation, by the address in its handle; once `stop` is set, it ends within a second.

        Raises: TransferCancelledError, PeerRestartedError, PeerLostError, NoPathError, AuthenticationError, TransferTimeoutError.
        """
        link = self.fast(peer.name)
        if link is not None and link.peer == peer:
            return link
        if self._roster.restarted(peer) or self._roster.gone(peer):
            raise self.lost(peer)
        deadline = time.monotonic() + timeout
        with self._turn(peer, deadline, stop):
            link = self.fast(peer.name)
            if link is not None and link.peer == peer:
                return link
            self._drop(peer.name)
            return self._connect(peer, address, deadline, stop)

    def over(
        self, peer: PeerId, address: str, only: str, nbytes: int, timeout: float, stop: _core.Stop | None = None
    ) -> PeerLink:
        """A link to exactly this incarnation by one of these transports, in the form of the setting `transports`: the one that
        stands where it fits, else another beside it, by what is fastest for so many bytes. Messages go on by the first.

        Raises: as `to_owner`.
        """
        deadline = time.monotonic() + timeout
        link = self.to_owner(peer, address, timeout, stop)
        if admits(only, link.connection.transport):
            return link
        with self._turn(peer, deadline, stop):
            for name, other in self._beside.get(peer, {}).items():
                if admits(only, name) and other.connection.up:
                    return other
            order = self.ways.order(peer, link.addresses, self._host(peer), nbytes, only)
            with self._calling(peer, address) as client:  # the link's own is closed once the peer is taken for down
                connection = self._connect_first(peer, order, link.addresses, client, deadline, stop)
            client.close()
            other = replace(link, connection=connection, lane=None, near=_near(connection))
            with self._lock:
                self._check_open()
                self._beside.setdefault(peer, {})[connection.transport] = other
        return other

    def explain(self, to: str | tuple[PeerId, str], nbytes: int, timeout: float) -> PathReport:
        """As `Endpoint.explain`: to whoever has a name, or to an incarnation at its address."""
        deadline = time.monotonic() + timeout
        name, peer = (to, None) if isinstance(to, str) else (to[0].name, to[0])
        link = self.fast(name)
        if link is not None and peer not in (None, link.peer):
            link = None
        addresses: Mapping[str, bytes]
        if link is not None:
            peer, addresses = link.peer, link.addresses
        elif name == self.me.name and peer in (None, self.me):
            peer, addresses = self.me, self.ways.addresses()
        else:
            peer, addresses = self._ask(to, deadline)
        used = link.connection.transport if link is not None else None
        return self.ways.report(peer, addresses, self._host(peer), nbytes, used)

    def _ask(self, to: str | tuple[PeerId, str], deadline: float) -> tuple[PeerId, Mapping[str, bytes]]:
        """A peer, and where its transports are reached. Raises: as `to_name` and `to_owner`."""
        if isinstance(to, str):
            info = self._resolve(to, deadline, None)
            peer, address = info.id, info.address
        else:
            peer, address = to
            if self._roster.restarted(peer) or self._roster.gone(peer):
                raise self.lost(peer, phase="hello")
        with self._calling(peer, address) as client:
            addresses = self._hello(client, peer, deadline, None).connect
        client.close()
        return peer, addresses

    def _host(self, peer: PeerId) -> str | None:
        """Identity of its host, if it has been heard of."""
        info = self._roster.member(peer.name)
        return info.host if info is not None and info.id == peer else None

    def lost(
        self, peer: PeerId, transport: str | None = None, phase: str | None = None, why: PeerLostError | None = None
    ) -> PeerLostError:
        """The error that says what became of an incarnation: restarted, or just gone; `why` is what was seen of that."""
        if self._roster.restarted(peer):
            return PeerRestartedError(
                f"{peer.name} has restarted",
                peer=str(peer),
                transport=transport,
                phase=phase,
                hint="Get a new handle from it, or send again: its name now means the new process",
            )
        return PeerLostError(
            f"{peer.name} has gone" + (f" or is out of reach: {why.message}" if why else ""),
            peer=str(peer),
            transport=transport,
            phase=phase,
            hint=(why and why.hint) or "It works again under its name once it is restarted, or can be reached again",
        )

    def drop(self, peer: PeerId) -> None:
        """Forgets the link to an incarnation that is down. Its connection stays for what is held over it."""
        self._take(peer)

    def abort(self, peer: PeerId) -> None:
        """Ends the links to an incarnation that will never be back."""
        for other in self._beside.pop(peer, {}).values():
            other.connection.abort()
        if link := self._take(peer):
            link.connection.abort()

    def _take(self, peer: PeerId) -> PeerLink | None:
        with self._lock:
            link = self._links.get(peer.name)
            if link is None or link.peer.incarnation > peer.incarnation:
                return None
            del self._links[peer.name]
            self._beside.pop(link.peer, None)
        link.client.close()
        return link

    def close(self) -> None:
        with self._lock:
            self._closed = True
            clients = [link.client for link in self._links.values()] + list(self._dialling)
            self._links.clear()
            self._beside.clear()
        for client in clients:
            client.close()
        for transport in self.transports.values():
            transport.close()

    def _lock_of(self, name: str) -> threading.Lock:
        with self._lock:
            self._check_open()
            return self._locks.setdefault(name, threading.Lock())

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the endpoint was shut down")

    @contextlib.contextmanager
    def _turn(self, peer: PeerId, deadline: float, stop: _core.Stop | None) -> Iterator[None]:
        """One thread at a time connects to a peer. Who comes meanwhile has deadlines too.

        Raises: TransferTimeoutError, TransferCancelledError, ClosedError.
        """
        lock = self._lock_of(peer.name)
        while not lock.acquire(timeout=min(max(deadline - time.monotonic(), 0.0), _SLICE_S)):
            check_stop(stop)
            self._left(deadline, peer, "connect")
        try:
            self._check_open()
            yield
        finally:
            lock.release()

    def _drop(self, name: str) -> None:
        link = self._links.pop(name, None)
        if link is not None:
            self._beside.pop(link.peer, None)
            link.client.close()

    def _resolve(self, name: str, deadline: float, stop: _core.Stop | None) -> PeerInfo:
        while True:
            last = self._roster.incarnation(name)
            left = max(deadline - time.monotonic(), 0.0)
            try:
                return self._control.resolve(
                    name, min(left, _GONE_WAIT_S if last else left if stop is None else _SLICE_S)
                )
            except PeerUnknownError:
                if last:
                    raise self.lost(PeerId(name, last)) from None
                if stop is None or left <= _SLICE_S:
                    raise
            check_stop(stop)

    def _connect(self, peer: PeerId, address: str, deadline: float, stop: _core.Stop | None) -> PeerLink:
        self._roster.hear(Dialled(peer))
        try:
            link = self._link(peer, address, deadline, stop)
        except BaseException:
            self._roster.hear(Unreached(peer))
            raise
        with self._lock:
            self._links[peer.name] = link
        self._roster.hear(Connected(peer))
        return link

    def _link(self, peer: PeerId, address: str, deadline: float, stop: _core.Stop | None) -> PeerLink:
        with self._calling(peer, address) as client, doing(self._engine.flight, "connect", peer.name, "hello"):
            addresses = self._hello(client, peer, deadline, stop).connect
            order = self.ways.order(peer, addresses, self._host(peer))
            connection = self._connect_first(peer, order, addresses, client, deadline, stop)
        lane = None if self._settings.control == "grpc" else connection.lane()
        return PeerLink(peer, connection, client, lane, _near(connection), addresses)

    @contextlib.contextmanager
    def _calling(self, peer: PeerId, address: str) -> Iterator[PeerClient]:
        """The channel to a peer. After a failure, and by `close`, it is closed, else whoever asked for it sees to that.

        Raises: PeerLostError, PeerRestartedError: it is that peer that has gone, whatever was seen of it; ClosedError.
        """
        token = self._settings.token
        client = PeerClient(address, peer=peer.name, me=self.me, token=token, certificates=self._control.certificates)
        try:
            with self._lock:
                self._check_open()
                self._dialling.add(client)
            yield client
        except PeerLostError as error:
            client.close()
            if isinstance(error, PeerRestartedError):
                raise
            raise self.lost(peer, phase=error.phase, why=error) from error
        except BaseException:
            client.close()
            raise
        finally:
            self._dialling.discard(client)

    def _connect_first(
        self,
        peer: PeerId,
        candidates: Sequence[Transport],
        addresses: Mapping[str, bytes],
        client: PeerClient,
        deadline: float,
        stop: _core.Stop | None,
    ) -> Connection:
        """Over the first transport that works: one that looks good may still fail, between two containers for example.

        No attempt lasts longer than a few seconds: what was sent into a network that failed for a moment is tried again by
        TCP after ever longer pauses, a new attempt at once.
        """
        while True:
            failed: list[tuple[str, TensorLinkError]] = []
            for transport in candidates:
                left = self._left(deadline, peer, "connect")
                try:
                    found = transport.connect(peer, addresses[transport.name], None, min(left, _TRY_S), stop)
                except PeerRestartedError:
                    raise
                except (PeerLostError, TransportError, TransferTimeoutError) as error:
                    failed.append((transport.name, error))
                    continue
                self.ways.cool(peer, failed)
                return found
            last = failed[-1][1]
            if not isinstance(last, TransferTimeoutError):
                break
            if time.monotonic() >= deadline:
                raise last
        # Where it is the peer that has gone or is leaving, this raises PeerLostError.
        patiently(functools.partial(client.hello, {}), self._left(deadline, peer, "connect"), stop)
        self.ways.cool(peer, failed)
        reasons = [f"{name}: {error.message}" for name, error in failed]
        raise no_path(peer, reasons, "Set TENSORLINK_INTERFACE there to an address that is reached from here")

    def fail_over(self, link: PeerLink, error: TensorLinkError) -> None:
        """A path has failed in use: it is avoided for a while, and the next use of the peer finds another, if there is one."""
        self.failovers[link.peer.name] = self.failovers.get(link.peer.name, 0) + 1
        failed_over(self._engine.flight, link.peer.name, link.connection.transport, error)
        self.ways.cool(link.peer, [(link.connection.transport, error)])
        if self._links.get(link.peer.name) is link:
            self.drop(link.peer)
        self._beside.get(link.peer, {}).pop(link.connection.transport, None)

    def mend(self, peer: PeerId) -> None:
        """Connects again to a peer that messages are on their way to, if their lane broke. Raises: as `to_owner`."""
        info = self._roster.member(peer.name)
        if info is not None and info.id == peer and self._engine.undelivered(peer.name, peer.incarnation):
            self.to_owner(peer, info.address, self._settings.timeout)

    def _hello(self, client: PeerClient, peer: PeerId, deadline: float, stop: _core.Stop | None) -> Hello:
        while True:
            hello = patiently(functools.partial(client.hello, {}), self._left(deadline, peer, "hello"), stop)
            if hello.peer == peer:
                return hello
            if hello.peer.name != peer.name or hello.peer.incarnation:
                raise PeerLostError(f"{hello.peer} answers at its address", peer=str(peer), phase="hello")
            time.sleep(_STARTING_S)  # others see a peer a moment before it is ready

    @staticmethod
    def _left(deadline: float, peer: PeerId, phase: str) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransferTimeoutError(f"{peer.name} could not be reached in time", peer=str(peer), phase=phase)
        return left


def _near(connection: Connection) -> bool:
    native = connection.lane()
    return native is not None and native.pid != 0
