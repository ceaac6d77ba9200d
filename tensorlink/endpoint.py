"""The endpoint: one peer in this process. It owns everything that has a lifetime and puts the parts together."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import operator
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

from tensorlink import _core, flight
from tensorlink.control import (
    Certificates,
    ControlClient,
    Hello,
    Mailbox,
    Membership,
    PeerServer,
    engine_socket,
    host_identity,
    listen_address,
)
from tensorlink.errors import (
    ClosedError,
    NameInUseError,
    PeerLostError,
    PoolExhaustedError,
    TensorLinkError,
    TransferTimeoutError,
)
from tensorlink.hooks import Hooks
from tensorlink.lifecycle import Action, Connected
from tensorlink.links import Links
from tensorlink.measured import Measured
from tensorlink.messages import Messages
from tensorlink.objects import Objects
from tensorlink.observing import Observing
from tensorlink.paths import PathReport
from tensorlink.rendezvous import Rendezvous
from tensorlink.scratch import Scratch
from tensorlink.settings import Settings
from tensorlink.topology import Topology
from tensorlink.transfer import InFlight, Transfer
from tensorlink.transports.base import Site
from tensorlink.types import PeerId, PeerInfo, TensorRef
from tensorlink.upkeep import Upkeep
from tensorlink.ways import BULK

log = logging.getLogger("tensorlink")

Timeout = float | None | EllipsisType

_LINGER_S = 5.0
_TELL_S = 2.0
_LOOK_S = 0.002


class Endpoint:
    """A peer. Every method may be called from any thread, and raises `ClosedError` after `shutdown` and after `fork`; what
    begins something does so after `drain` too.

    `timeout` is in seconds; left out it is the setting `timeout`. Where it is over, `TransferTimeoutError` is raised;
    None, to wait without end, is allowed only where one waits for somebody's next act (`recv`).
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        on_closed: Callable[[Endpoint], None] | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.settings = settings
        self._on_closed = on_closed
        self._rendezvous = rendezvous
        self._pid = os.getpid()
        self._closed = False
        self._draining = False
        self._work = InFlight()
        self._usable = (
            True  # neither draining, shut down nor forked: each call looks here, where getpid would cost a system call
        )
        on_fork = weakref.WeakMethod(self._on_fork)
        os.register_at_fork(after_in_child=lambda: (on_fork() or _nothing)())
        self._closing = threading.Lock()
        self._shut = threading.Event()
        self._hooks = Hooks()
        certificates = Certificates.load(settings)
        listen = listen_address(settings)
        path = str(engine_socket(clean=rendezvous is not None))
        key = secrets.token_bytes(16)
        self._engine = _core.Engine(
            name, path, key, settings.pool_bytes, flight.new_file(settings.flight, Path(path).parent)
        )
        if self._engine.flight.error:
            log.debug("no flight recorder: %s", self._engine.flight.error)
        try:
            if certificates:
                self._engine.secure(*certificates.files)
            self._server = PeerServer(
                _Handlers(self),
                name=name,
                token=settings.token,
                listen=listen,
                ports=settings.ports,
                certificates=certificates,
            )
            self._server.max_bytes_per_s = settings.max_bytes_per_s or 0
            self._control = ControlClient(
                settings,
                name=name,
                address=self._server.address,
                labels=settings.labels,
                find=self._find if rendezvous is not None and rendezvous.used else None,
                act=self._act,
                on_joined=self._on_joined,
                on_failed=self._on_failed,
            )
            self._engine.limit(settings.max_bytes_per_s or 0)
            self._engine.verify(settings.verify)
            site = Site(self._engine, path, key, host_identity(), os.getpid(), listen, settings.ports)
            self._measured = Measured.by_setting(settings.measured)
            self._links = Links(settings, site, self._control)
            self._links.ways.measured = self._measured.of
            links = (link for transport in self._links.transports.values() for link in transport.links())
            self._observing = Observing(self._measured, site.host, links, self._control.known)
            self._messages = Messages(
                self._engine, self._links, self._control, self._exhausted, self._report, self._work
            )
            self._objects = Objects(
                self._engine,
                self._links,
                self._server.address,
                self._exhausted,
                self._report,
                self._work,
                self._observing,
            )
            self._scratch = Scratch(self._objects.put, self._engine.usage, self._hooks)
        except BaseException:
            self._engine.close()
            if hasattr(self, "_server"):
                self._server.close()
            raise
        self._services: set[str] = set()
        self._serving = threading.Lock()
        self._upkeep = Upkeep(self._engine, self._control, self._links, self._hooks)

    def start(self) -> None:
        """Joins. Raises: NameInUseError, AuthenticationError, PeerLostError, TransferTimeoutError."""
        try:
            with flight.doing(self._engine.flight, "join", "", "coordinator"):
                membership = self._control.join(self.settings.timeout)
            self._links.me = PeerId(self.name, membership.incarnation)
            self._engine.start(membership.incarnation)
            self._on_joined(membership)
            self._server.incarnation = membership.incarnation  # from now on it answers a hello
            self._upkeep.start()
        except BaseException:
            self.shutdown()
            raise
        atexit.register(self._at_exit)

    # Who and what

    @property
    def closed(self) -> bool:
        """Whether it was shut down, or belongs to the parent of this forked process."""
        return self._closed or os.getpid() != self._pid

    @property
    def name(self) -> str:
        return self._control.name

    @property
    def id(self) -> PeerId:
        """Name and incarnation."""
        return self._links.me

    def peers(self) -> list[PeerInfo]:
        """The live peers by name, this one among them, as last heard. Doesn't block."""
        self._check_open()
        return self._control.peers()

    def topology(self) -> Topology:
        """This machine: devices, and the links between them. Looked at when first asked for, which blocks while files are read
        and drivers answer; from then on it is the same, and paths are chosen by it."""
        self._check_open()
        return self._links.ways.topology()

    def explain(self, peer_or_ref: str | TensorRef, nbytes: int | None = None, *, timeout: Timeout = ...) -> PathReport:
        """Every path to a peer for so many bytes: which would be taken, what each is predicted to take, and why each other one
        isn't taken; `print` it. Without `nbytes` they are those of the handle, or 1 MiB.

        Transfers nothing. `used` is the transport of the connection that stands, which may differ: connections are chosen for
        1 MiB and stay as long as they work. A peer that isn't connected is asked for its addresses, and stays so; one's own
        name is a peer too. Blocks for that, and for `topology` the first time.

        Raises: PeerUnknownError: nobody has joined under that name in time; PeerLostError, PeerRestartedError: it, or the owner
        of the handle, has gone; AuthenticationError; TransferTimeoutError; ValueError: `nbytes` is negative or beyond any memory.
        """
        self._check_open()
        if not isinstance(peer_or_ref, (str, TensorRef)):
            raise TypeError(f"explain takes the name of a peer or a TensorRef, not a {type(peer_or_ref).__name__}")
        if nbytes is None:
            nbytes = peer_or_ref.nbytes if isinstance(peer_or_ref, TensorRef) else BULK
        nbytes = _size(nbytes)
        to = (peer_or_ref.owner, peer_or_ref.address) if isinstance(peer_or_ref, TensorRef) else peer_or_ref
        self._links.ways.topology()
        return self._links.explain(to, nbytes, self._moving(timeout))

    def on(self, event: str, callback: Callable[..., None]) -> Callable[[], None]:
        """Calls `callback` for each event from now on, in order, on one thread of its own; returns what ends that.

        `peer_up(peer)`, `peer_down(peer, reason)`, `peer_restart(peer)` get a `PeerInfo`; `transfer_failed(error)` gets the
        error. A callback that raises is logged and harms nothing. Raises: ValueError: there is no such event.
        """
        self._check_open()
        return self._hooks.on(event, callback)

    def stats(self) -> dict[str, Any]:
        """Counters: `pool` (bytes, handles, and for each peer in `holders` its views, bytes and pid), `peers`, `queued` (messages
        that nobody has received), `served_bytes` (sent to other hosts out of this process's memory). Doesn't block.

        `peers` has those that are connected now: `pid` (0: on another host), messages and the bytes that they carried
        themselves (a large object is offered and counts in `bytes_read` of its reader), `retries` of reads whose stream broke,
        and `failovers` to another transport if there were any. The counters of a connection end with it."""
        self._check_open()
        peers: dict[str, dict[str, Any]] = {}
        for native in self._engine.connections():
            row = peers.setdefault(native.peer_name, {"pid": native.pid, "incarnation": 0, "up": False, "holds": 0})
            for name, count in native.counters().items():
                row[name] = row.get(name, 0) + count
            row["incarnation"] = max(row["incarnation"], native.peer_incarnation)
            row["up"] |= native.up
            row["holds"] += native.holds
        for name, count in self._links.failovers.items():
            peers.setdefault(name, {})["failovers"] = count
        sent = self._engine.sent_bytes()
        return {"pool": self._engine.usage(), "peers": peers, "queued": self._engine.queued, "served_bytes": sent}

    # Messages

    def send(self, obj: Any, to: str, *, tag: str = "", timeout: Timeout = ...) -> None:
        """Sends a tensor, or a tree of them, to the peer of that name.

        Local completion: when it returns, `obj` may be changed, and the receiver need not have looked yet. Blocks only
        while the pool has no room, the receiver takes no messages, or the name has not joined yet.

        Raises: PeerUnknownError, PeerLostError, NoPathError, PoolExhaustedError, TransferTimeoutError; TypeError: `obj`
        cannot travel. After a failure nothing was sent.
        """
        self._check()
        if type(to) is not str:
            _name_of_peer(to)
        self._messages.send(obj, to, tag, self.settings.timeout if timeout is ... else self._moving(timeout))

    def recv(
        self,
        source: str | None = None,
        *,
        tag: str = "",
        out: Any = None,
        timeout: Timeout = ...,
        like: str | None = None,
    ) -> Any:
        """The next message with this tag, from `source` or from anyone. Blocks until there is one.

        Without `out` large tensors are views of shared memory: numpy arrays are read-only, torch tensors are private
        copy-on-write. With `out`, its tensors are filled in place and returned. `like` ("torch", "numpy") names the
        framework; else it is the sender's, where it is installed. Messages of one source and tag come in order.

        Raises: TransferTimeoutError, PeerLostError (only where `source` is named), PeerUnknownError; LayoutMismatchError:
        `out` differs, and not a byte was written. A `recv` that fails takes no message away.
        """
        self._check()
        wait_s = self.settings.timeout if timeout is ... else self._waiting(timeout)
        return self._messages.recv(source, tag, out, wait_s, like)

    def isend(self, obj: Any, to: str, *, tag: str = "", timeout: Timeout = ...) -> Transfer:
        """As `send`, without blocking. Until the transfer has ended `obj` must not be changed."""
        self._check()
        _name_of_peer(to)
        return self._messages.isend(obj, to, tag, self._moving(timeout))

    def irecv(
        self,
        source: str | None = None,
        *,
        tag: str = "",
        out: Any = None,
        timeout: Timeout = None,
        like: str | None = None,
    ) -> Transfer:
        """As `recv`, without blocking. Receives that fit a message get it in the order in which they were posted.

        `out` is filled by whoever asks for the result. Without `timeout` it waits until it is cancelled.
        """
        self._check()
        return self._messages.irecv(source, tag, out, self._waiting(timeout), like)

    # Handles

    def put(
        self,
        obj: Any,
        *,
        copy: bool = True,
        reads: int | None = None,
        ttl: float | None = None,
        checksum: bool = False,
    ) -> TensorRef:
        """Makes a tensor, or a tree of them, readable for others, and returns its handle.

        It is a snapshot in the pool. With `copy=False` tensors that already lie in the pool (from `empty`) are shared in
        place, and must not be written until the handle is released. The handle ends with `release`, after `reads` reads
        (the owner learns of each a moment later), or after `ttl` seconds; views that readers have by then stay readable
        until they drop them.

        Blocks while the pool is full and readers may still make room, up to the setting `timeout`.

        Raises: PoolExhaustedError: no room, and the message says who holds what; TypeError: `obj` cannot travel.
        """
        self._check()
        return self._objects.put(obj, copy, reads, ttl, checksum, self.settings.timeout)

    def release(self, ref: TensorRef) -> None:
        """Ends a handle of this endpoint, however it came here. Idempotent. Raises: StaleRefError: it is somebody else's."""
        self._check_open()
        self._objects.release(ref)

    def get(
        self,
        ref: TensorRef,
        *,
        out: Any = None,
        device: str | None = None,
        timeout: Timeout = ...,
        like: str | None = None,
        transports: str | None = None,
    ) -> Any:
        """What a handle names. Needs nothing of the owner but that it is connected once.

        `out` and `like` as for `recv`. `transports` (`"tcp"`, `"^shm"`) says what may carry this one: where the connection that
        stands is none of them, another is made beside it, and kept. Blocks to connect, and to fill `out`.

        Raises: StaleRefError, PeerLostError, PeerRestartedError, NoPathError, TransferTimeoutError;
        LayoutMismatchError: `out` differs, and not a byte was written; ValueError: `transports` names none that is installed.
        """
        self._check()
        if type(ref) is not TensorRef:
            _handle(ref)
        if device is not None:
            _cpu_only(device)
        if transports is not None:
            self._links.ways.check(transports)
        wait_s = self.settings.timeout if timeout is ... else self._moving(timeout)
        return self._objects.get(ref, out, like, wait_s, None, transports)

    def iget(
        self,
        ref: TensorRef,
        *,
        out: Any = None,
        device: str | None = None,
        timeout: Timeout = ...,
        like: str | None = None,
        transports: str | None = None,
    ) -> Transfer:
        """As `get`, without blocking."""
        self._check()
        _handle(ref)
        _cpu_only(device)
        if transports is not None:
            self._links.ways.check(transports)
        return self._objects.iget(ref, out, like, self._moving(timeout), transports)

    def empty(self, shape: Sequence[int] | int, dtype: Any, *, device: str = "cpu", like: str = "torch") -> Any:
        """A tensor in the pool, its values undefined: `put(copy=False)` of it costs nothing.

        `dtype` is the framework's or a name. Its memory returns when it and all handles and views of it are gone.
        Raises: PoolExhaustedError; TypeError: the framework isn't installed or has no such dtype.
        """
        self._check()
        return self._objects.empty(shape, dtype, device, like, self.settings.timeout)

    # Lifetime

    def drain(self, *, timeout: Timeout = ...) -> None:
        """Prepares to leave without cutting anything off, and leaves: `shutdown` is then quick.

        From now on every call that would begin something raises `ClosedError`; `release`, `stats`, `peers` and what is there
        already (transfers, views) go on. Everybody is told that this peer will leave: subscribers find another publisher, and no
        reader is sent to what this process passes on. Blocks until calls of other threads have ended, other hosts have taken
        what was sent to them, and nobody there is reading from this process's memory; then tells the coordinator that it has
        left, and others see it go. A receive that has no message yet isn't waited for: it ends with `shutdown`. What others
        send meanwhile is not received, and handles of this peer end with it; views that others have stay readable.

        May be called again, and from any thread, but not from a signal handler: what it interrupted would be waited for.

        Raises: TransferTimeoutError: something has not ended after `timeout` seconds. Then nothing was cut off and nothing is
        taken back: what was begun goes on, others know that this peer will leave, and it is still a member. Call `drain`
        again to wait longer, or `shutdown`, which ends what is left. ClosedError: it was shut down, also meanwhile.
        """
        self._check_open()
        deadline = time.monotonic() + self._moving(timeout)
        first, self._draining = not self._draining, True
        self._usable = False
        if first:
            with contextlib.suppress(TensorLinkError):  # with no coordinator, the next one is told
                self._control.retire(min(_TELL_S, max(deadline - time.monotonic(), 0.0)))
        with flight.doing(self._engine.flight, "drain", "", "work"):
            while self._work or self._engine.owes:
                self._check_open()
                if time.monotonic() >= deadline:
                    raise TransferTimeoutError(self._unfinished(), phase="drain")
                time.sleep(_LOOK_S)
        self._check_open()  # it may have ended because all was shut down
        self._control.leave()

    def _unfinished(self) -> str:
        calls = f"{len(self._work)} operations have not ended" if self._work else ""
        others = (
            "other hosts have not taken all that was sent to them or that they are reading" if self._engine.owes else ""
        )
        return f"{self.name} is still busy: {', and '.join(filter(None, (calls, others))) or 'with the last of it'}"

    def shutdown(self) -> None:
        """Leaves: peers see it go, waits in other threads end with `ClosedError`, views that are held stay readable.

        Within a few seconds; idempotent; safe at interpreter exit and from any thread. In a forked child it only marks
        the child's endpoint closed.
        """
        first = self._closing.acquire(blocking=False)  # for ever; no waiting, as a signal handler may come in between
        self._closed = True
        self._usable = False
        if os.getpid() != self._pid or not first:
            return
        if self._on_closed is not None:
            self._on_closed(self)
        parts = (self._engine, self._links, self._control, self._server, self._hooks)
        linger = functools.partial(self._messages.linger, _LINGER_S)
        steps: list[Callable[[], object]] = [self._upkeep.stop, linger, self._control.leave, self._measured.save]
        steps += [self._rendezvous.close] if self._rendezvous is not None else []
        interrupted: BaseException | None = None
        for step in [*steps, *(part.close for part in parts)]:
            try:
                step()
            except BaseException as error:  # Ctrl-C, or what a signal handler raised: the rest is closed all the same
                interrupted = interrupted or error
        atexit.unregister(self._at_exit)
        self._shut.set()
        if interrupted is not None:
            raise interrupted

    def _at_exit(self) -> None:
        """As `shutdown`; one that another thread is at must end before the interpreter does."""
        self.shutdown()
        if os.getpid() == self._pid:
            self._shut.wait(2 * _LINGER_S)

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"<Endpoint {self.id}{' closed' if self._closed else ''}>"

    # Inside

    def _check(self) -> None:
        if not self._usable:
            raise self._closed_error()

    def _check_open(self) -> None:
        """For what may still be asked of an endpoint that drains."""
        if not self._usable and (self.closed or not self._draining):
            raise self._closed_error()

    def _on_fork(self) -> None:
        self._usable = False

    def _closed_error(self) -> ClosedError:
        if self._draining and not self.closed:
            return ClosedError(
                f"endpoint {self.name} is draining: it finishes what was begun, and takes no new work",
                hint="Call tensorlink.shutdown(), and tensorlink.init() to join again",
            )
        if os.getpid() != self._pid:
            return ClosedError(
                f"endpoint {self.name} belongs to the parent of this process",
                hint="Use it there, or start this process by spawn instead of fork and call tensorlink.init() in it",
            )
        return ClosedError(f"endpoint {self.name} was shut down", hint="Call tensorlink.init() again")

    def _moving(self, timeout: Timeout) -> float:
        if timeout is None:
            raise ValueError("timeout=None is allowed only for recv; bytes that move have a deadline")
        return self._waiting(timeout) or 0.0

    def _waiting(self, timeout: Timeout) -> float | None:
        if isinstance(timeout, EllipsisType):
            return self.settings.timeout
        if timeout is not None and timeout < 0:
            raise ValueError(f"a timeout is not negative: {timeout}")
        return timeout

    def _exhausted(self, nbytes: int, phase: str) -> PoolExhaustedError:
        pool = self._engine.usage()
        if nbytes > pool["budget_bytes"]:
            return PoolExhaustedError(
                f"{nbytes:,} bytes never fit into a pool of {pool['budget_bytes']:,}",
                phase=phase,
                hint="Raise pool_bytes of tensorlink.init or TENSORLINK_POOL_BYTES",
            )
        rows = [
            f"{name} (pid {pid}) holds {count} views of {size:,} bytes"
            for name, (count, size, pid) in pool["holders"].items()
        ]
        rows.append(f"{pool['handles']} handles and messages of this process keep {pool['handle_bytes']:,} bytes")
        return PoolExhaustedError(
            f"no room for {nbytes:,} bytes in the pool: {pool['used_bytes']:,} of {pool['budget_bytes']:,} are used; "
            + "; ".join(rows),
            phase=phase,
            hint="Release handles, drop views, or raise pool_bytes (TENSORLINK_POOL_BYTES)",
        )

    def _serve(self, service: str) -> None:
        """Makes this the one endpoint, and the caller the one user of it, that serves a name. Raises: NameInUseError."""
        with self._serving:
            if service in self._services:
                raise NameInUseError(f"this process serves {service} already", hint="Close the other one first")
            self._services.add(service)
        try:
            self._control.advertise(service)
        except BaseException:
            self._services.discard(service)
            raise

    def _withdraw(self, service: str) -> None:
        self._services.discard(service)
        self._control.withdraw(service)

    def _report(self, error: TensorLinkError) -> None:
        flight.record(self._engine.flight, error)
        self._hooks.fire("transfer_failed", error)

    def _act(self, actions: list[Action]) -> None:
        self._upkeep.act(actions)

    def _on_joined(self, membership: Membership) -> None:
        if membership.expelled:
            log.warning("%s was silent for longer than its lease, and has joined again", self.name)
            self._engine.lapse()
        self._engine.heartbeat(membership.heartbeat_address, membership.lease_key, membership.lease_s / 5)

    def _find(self, timeout: float) -> str:
        assert self._rendezvous is not None
        return self._rendezvous.find(self.settings, timeout).coordinator

    def _on_failed(self, error: TensorLinkError) -> None:
        if not isinstance(error, ClosedError):
            log.error("%s is no longer a member: %s", self.name, error)
        if isinstance(error, NameInUseError | ClosedError):
            threading.Thread(target=self.shutdown, name="tensorlink-shutdown", daemon=True).start()


def _nothing() -> None:
    pass


class _Handlers:
    """What the endpoint answers to its peers' calls."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def hello(self, hello: Hello) -> Mapping[str, bytes]:
        if self._endpoint._closed:
            raise PeerLostError(f"{self._endpoint.name} is leaving")
        self._heard_of(hello.peer)
        return self._endpoint._links.ways.addresses()

    def deliver(self, source: PeerId, sequence: int, tag: str, frame: bytes) -> bytes:
        self._heard_of(source)
        self._endpoint._engine.deliver(source.name, source.incarnation, frame)
        return b""

    def _heard_of(self, peer: PeerId) -> None:
        """Who calls is there, whatever a probe of its port has shown."""
        if peer.incarnation:  # else it hasn't joined yet
            self._endpoint._control.roster.hear(Connected(peer))

    def release(self, source: PeerId, ids: list[int]) -> None:
        """Handles are released by their owner only, and reads are counted by the engine."""

    def mailbox(self, source: PeerId, box: Mailbox) -> None:
        box.close()  # no transport of this version needs one

    def scratch(self, source: PeerId, nbytes: int) -> bytes:
        if not self._endpoint._usable:
            raise PeerLostError(f"{self._endpoint.name} is leaving")
        self._heard_of(source)
        return self._endpoint._scratch.give(source, nbytes)


def default_name() -> str:
    """A name for a peer that doesn't care: host, pid and four random digits."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


def _name_of_peer(to: object) -> None:
    if not isinstance(to, str):
        raise TypeError(f"`to` is the name of a peer, a str, not a {type(to).__name__}: send(obj, to)")


def _size(nbytes: object) -> int:
    """Raises: TypeError: it is no whole number; ValueError: no memory is that large."""
    if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
        raise TypeError(f"nbytes is a number of bytes, an int, not a {type(nbytes).__name__}")
    if not 0 <= (size := operator.index(nbytes)) < 1 << 64:
        raise ValueError(f"nbytes must be from 0 to 2**64, not {nbytes}")
    return size


def _handle(ref: object) -> None:
    if not isinstance(ref, TensorRef):
        raise TypeError(f"get takes a TensorRef, which put returned, not a {type(ref).__name__}")


def _cpu_only(device: str | None) -> None:
    if device not in (None, "cpu"):
        raise TypeError(f"this version reads into cpu memory, not into {device}")


def open_endpoint(
    name: str | None,
    settings: Settings,
    on_closed: Callable[[Endpoint], None] | None = None,
    rendezvous: Rendezvous | None = None,
) -> Endpoint:
    """Makes an endpoint and joins, where `rendezvous` says if there is one; it is closed with the endpoint, also if that fails.

    Raises: what `Endpoint.start` does; ValueError: the name is no name.
    """
    logging.getLogger("tensorlink").setLevel(settings.log.upper())
    if rendezvous is None:
        return _open(default_name() if name is None else name, settings, on_closed, None)
    try:
        return _open(
            rendezvous.peer_name if name is None else name, rendezvous.complete(settings), on_closed, rendezvous
        )
    except BaseException:
        rendezvous.close()
        raise


def _open(
    chosen: str, settings: Settings, on_closed: Callable[[Endpoint], None] | None, rendezvous: Rendezvous | None
) -> Endpoint:
    if not isinstance(chosen, str):
        raise TypeError(f"a peer's name is a str, not a {type(chosen).__name__}")
    if not chosen or len(chosen) > 200 or not chosen.isprintable():
        raise ValueError(f"a peer's name has 1 to 200 printable characters, not {chosen!r}")
    endpoint = Endpoint(chosen, settings, on_closed, rendezvous)
    endpoint.start()
    return endpoint
