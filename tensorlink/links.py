"""Links: the connection to each peer, made when it is first needed and again after the peer has restarted."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tensorlink import _core
from tensorlink.control import ControlClient, Hello, PeerClient
from tensorlink.errors import (
    ClosedError,
    NoPathError,
    PeerLostError,
    PeerRestartedError,
    PeerUnknownError,
    TensorLinkError,
    TransferCancelledError,
    TransferTimeoutError,
    TransportError,
)
from tensorlink.flight import doing, failed_over
from tensorlink.lifecycle import Connected, Dialled, Unreached
from tensorlink.settings import Settings
from tensorlink.transports import registry
from tensorlink.transports.base import Connection, Site, Transport
from tensorlink.types import PeerId, PeerInfo

log = logging.getLogger("tensorlink")

_GONE_WAIT_S = 0.05
_STARTING_S = 0.005
_SLICE_S = 0.1
_TRY_S = 5.0
_COOLING_S = 10.0
_CANCEL_S = 0.8  # how long a silent peer may keep a cancel waiting
_T = TypeVar("_T")


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


class Links:
    """One link to each peer at most. Thread-safe; connecting blocks only those that want the same peer."""

    def __init__(self, settings: Settings, site: Site, control: ControlClient) -> None:
        self._settings = settings
        self._control = control
        self._roster = control.roster
        self._engine = site.engine
        self.me = PeerId(control.name, 0)
        """Set by the endpoint once it has joined."""
        self.transports: dict[str, Transport] = {}
        """Those that can be used here, by what they say of themselves: the fastest first."""
        self.rejected: dict[str, str] = {}
        """Transports that cannot be used here, and why."""
        self.failovers: dict[str, int] = {}
        """How often a path to a peer failed in use."""
        self._failed: dict[tuple[str, str], float] = {}  # (peer, transport): when
        self._links: dict[str, PeerLink] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._dialling: set[PeerClient] = set()
        self._closed = False
        self._load(site)

    def _load(self, site: Site) -> None:
        self._settings.check_transports(registry.installed())
        usable: list[tuple[float, str, Transport]] = []
        for name in sorted(registry.installed()):
            if not self._settings.allows(name):
                self.rejected[name] = "excluded by the setting transports"
                continue
            transport = registry.load(name)(site)
            links = transport.links()
            why = next((link.unavailable for link in links if link.unavailable), None)
            if why is None:
                usable.append((-max(link.bytes_per_s for link in links), name, transport))
            else:
                self.rejected[name] = why
        if not usable:
            rows = "; ".join(f"{name}: {why}" for name, why in self.rejected.items())
            raise NoPathError(
                f"no transport can be used here ({rows or 'none is installed'})",
                phase="init",
                hint=None
                if rows
                else "Install the package with pip, a checkout by `pip install -e .`: a copy has no entry points",
            )
        usable.sort(key=lambda row: row[:2])
        self.transports.update({name: transport for _, name, transport in usable})

    def addresses(self) -> dict[str, bytes]:
        """What a peer needs to connect to each transport here."""
        return {name: transport.address() for name, transport in self.transports.items()}

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
        """Ends the link to an incarnation that will never be back."""
        if link := self._take(peer):
            link.connection.abort()

    def _take(self, peer: PeerId) -> PeerLink | None:
        with self._lock:
            link = self._links.get(peer.name)
            if link is None or link.peer.incarnation > peer.incarnation:
                return None
            del self._links[peer.name]
        link.client.close()
        return link

    def close(self) -> None:
        with self._lock:
            self._closed = True
            clients = [link.client for link in self._links.values()] + list(self._dialling)
            self._links.clear()
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
            _check_stop(stop)
            self._left(deadline, peer, "connect")
        try:
            self._check_open()
            yield
        finally:
            lock.release()

    def _drop(self, name: str) -> None:
        link = self._links.pop(name, None)
        if link is not None:
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
            _check_stop(stop)

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
        token = self._settings.token
        client = PeerClient(address, peer=peer.name, me=self.me, token=token, certificates=self._control.certificates)
        try:
            with self._lock:
                self._check_open()
                self._dialling.add(client)
            with doing(self._engine.flight, "connect", peer.name, "hello"):
                hello = self._hello(client, peer, deadline, stop)
                connection = self._connect_fastest(peer, hello.connect, client, deadline, stop)
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
        lane = connection.lane()
        near = lane is not None and lane.pid != 0
        return PeerLink(peer, connection, client, None if self._settings.control == "grpc" else lane, near)

    def _connect_fastest(
        self,
        peer: PeerId,
        addresses: Mapping[str, bytes],
        client: PeerClient,
        deadline: float,
        stop: _core.Stop | None,
    ) -> Connection:
        """Over the fastest transport that works: one that looks good may still fail, between two containers for example.

        No attempt lasts longer than a few seconds: what was sent into a network that failed for a moment is tried again by
        TCP after ever longer pauses, a new attempt at once.
        """
        candidates = self._candidates(peer, addresses)
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
                self._cool_all(peer, failed)
                return found
            last = failed[-1][1]
            if not isinstance(last, TransferTimeoutError):
                break
            if time.monotonic() >= deadline:
                raise last
        # Where it is the peer that has gone or is leaving, this raises PeerLostError.
        patiently(functools.partial(client.hello, {}), self._left(deadline, peer, "connect"), stop)
        self._cool_all(peer, failed)
        reasons = [f"{name}: {error.message}" for name, error in failed]
        raise self._no_path(peer, reasons, "Set TENSORLINK_INTERFACE there to an address that is reached from here")

    def fail_over(self, link: PeerLink, error: TensorLinkError) -> None:
        """A path has failed in use: it is avoided for a while, and the next use of the peer finds another, if there is one."""
        self.failovers[link.peer.name] = self.failovers.get(link.peer.name, 0) + 1
        failed_over(self._engine.flight, link.peer.name, link.connection.transport, error)
        self._cool(link.peer, link.connection.transport, error)
        self.drop(link.peer)

    def mend(self, peer: PeerId) -> None:
        """Connects again to a peer that messages are on their way to, if their lane broke. Raises: as `to_owner`."""
        info = self._roster.member(peer.name)
        if info is not None and info.id == peer and self._engine.undelivered(peer.name, peer.incarnation):
            self.to_owner(peer, info.address, self._settings.timeout)

    def _cool_all(self, peer: PeerId, failed: list[tuple[str, TensorLinkError]]) -> None:
        for name, error in failed:
            self._cool(peer, name, error)

    def _cool(self, peer: PeerId, transport: str, error: TensorLinkError) -> None:
        log.warning("the path to %s over %s failed: %s", peer, transport, error.message)
        self._failed[peer.name, transport] = time.monotonic()

    def _hello(self, client: PeerClient, peer: PeerId, deadline: float, stop: _core.Stop | None) -> Hello:
        while True:
            hello = patiently(functools.partial(client.hello, {}), self._left(deadline, peer, "hello"), stop)
            if hello.peer == peer:
                return hello
            if hello.peer.name != peer.name or hello.peer.incarnation:
                raise PeerLostError(f"{hello.peer} answers at its address", peer=str(peer), phase="hello")
            time.sleep(_STARTING_S)  # others see a peer a moment before it is ready

    def _candidates(self, peer: PeerId, addresses: Mapping[str, bytes]) -> list[Transport]:
        """The transports that reach a peer, the fastest first, but last those that have just failed."""
        reasons = [f"{name}: {why}" for name, why in self.rejected.items()]
        found = []
        for name, transport in self.transports.items():
            if name not in addresses:
                reasons.append(f"{name}: {peer.name} doesn't have it")
            elif why := transport.reaches(transport.address(), addresses[name]):
                reasons.append(f"{name}: {why}")
            else:
                found.append(transport)
        if not found:
            raise self._no_path(peer, reasons or ["none is installed"], None)
        return sorted(found, key=lambda transport: self._cooling(peer, transport.name))

    def _cooling(self, peer: PeerId, transport: str) -> bool:
        return time.monotonic() - self._failed.get((peer.name, transport), -_COOLING_S) < _COOLING_S

    @staticmethod
    def _no_path(peer: PeerId, reasons: list[str], hint: str | None) -> NoPathError:
        text = f"no transport reaches {peer.name} ({'; '.join(reasons)})"
        return NoPathError(text, peer=str(peer), phase="connect", hint=hint)

    @staticmethod
    def _left(deadline: float, peer: PeerId, phase: str) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransferTimeoutError(f"{peer.name} could not be reached in time", peer=str(peer), phase=phase)
        return left


def patiently(attempt: Callable[[float], _T], timeout: float, stop: _core.Stop | None) -> _T:
    """What `attempt(timeout)` gives. With `stop` in several tries, since a cancel must not wait for a peer that is silent.

    Raises: TransferCancelledError; what `attempt` raises.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        if stop is None:
            return attempt(left)
        _check_stop(stop)
        try:
            return attempt(min(left, _CANCEL_S))
        except TransferTimeoutError:
            if left <= _CANCEL_S:
                raise


def _check_stop(stop: _core.Stop | None) -> None:
    if stop is not None and stop.is_set():
        raise TransferCancelledError("the transfer was cancelled", phase="connect")
