"""One peer's connection to the coordinator: synchronous, thread-safe, and kept up by a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from tensorlink.control import control_pb2 as pb
from tensorlink.control import wire
from tensorlink.control.certificates import Certificates
from tensorlink.control.link import Link, Membership, open_link
from tensorlink.control.roster import Roster
from tensorlink.control.runtime_dir import host_identity
from tensorlink.errors import ClosedError, PeerLostError, TensorLinkError, TransferTimeoutError
from tensorlink.lifecycle import Action, Gone, Here
from tensorlink.settings import Settings
from tensorlink.types import PeerInfo

log = logging.getLogger("tensorlink.control")

_LEAVE_S = 1.0
_JOIN_TRY_S = 30.0
_HEARTBEAT_TRY_S = 5.0
_CLOSE_S = 2.0
_MIN_GRACE_S = 2.0
_PATIENCE_S = 3.0
_BACKOFF_S = (0.02, 1.0)

Result = TypeVar("Result")


class ControlClient:
    """Joins a coordinator under a name and stays joined until `close`.

    Every method may be called from any thread, has a deadline, and raises errors of `tensorlink.errors` only:
    `ClosedError` after `close` and in a forked child, and the reason of the failure once membership is lost for good
    (another process took the name, or the token is refused). A lost coordinator is no failure: calls wait for the next
    one until their deadline. `find` tells where it is at each attempt to join, in so many seconds; None: the settings do.

    What it hears of other peers goes to `roster`, which calls `act`. Callbacks run one at a time on one daemon thread, never on a
    caller's: `on_joined` after each join but the first, with the lease to use from now on; `on_failed` once, with the reason.
    What they raise is logged and harms nothing; while one runs, the next waits.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        name: str,
        address: str,
        find: Callable[[float], str] | None = None,
        act: Callable[[list[Action]], None] | None = None,
        on_joined: Callable[[Membership], None] | None = None,
        on_failed: Callable[[TensorLinkError], None] | None = None,
        labels: Mapping[str, str] | None = None,
        links: bytes = b"",
    ) -> None:
        self.name = name
        self.roster = Roster(name, act)
        self.on_joined = on_joined
        self.on_failed = on_failed
        self.certificates = Certificates.load(settings)
        """As they are now: what lies in the files later counts for processes that start then."""
        self._settings = settings
        self._find = find
        self._pid = os.getpid()
        self._nonce = secrets.token_bytes(16)
        self._self = pb.Peer(
            name=name, address=address, host=host_identity(), pid=self._pid, labels=dict(labels or {}), links=links
        )
        self._state = threading.Condition()  # guards all below
        self._seen_snapshot = False
        self._services: set[str] = set()
        self._link: Link | None = None
        self._joining: Link | None = None
        self._membership: Membership | None = None
        self._joins = 0
        self._failure: TensorLinkError | None = None
        self._left = False
        self._closed = False
        self._inbox: queue.SimpleQueue[tuple[str, Link | None, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._maintain, name=f"tensorlink-control-{name}", daemon=True)

    # Joining and leaving

    def join(self, timeout: float) -> Membership:
        """Joins, and waits until the first snapshot of the peers is there. Call it once.

        Raises:
            NameInUseError: a live process has the name.
            AuthenticationError: the token is refused, or the run-time directory belongs to somebody else.
            PeerLostError, TransferTimeoutError: no coordinator could be reached or started in time.
            TensorLinkError: the coordinator speaks another version.
        """
        self._check()
        deadline = time.monotonic() + timeout
        membership = self._join_until(deadline)
        self._thread.start()
        with self._state:
            done = self._state.wait_for(lambda: self._seen_snapshot or self._failure or self._closed, timeout)
        self._check()
        if not done:
            raise TransferTimeoutError("the coordinator sent no snapshot in time", phase="join")
        return membership

    def rejoin_needed(self) -> None:
        """Says that a heartbeat was answered 1 or could not be sent. Returns at once; `on_joined` follows."""
        with self._state:
            self._inbox.put(("rejoin", self._link, None))

    def retire(self, timeout: float) -> None:
        """Tells everybody that this peer will leave, and serves nothing any more. Raises: PeerLostError: no coordinator."""
        with self._state:
            self._services.clear()
            self._self.leaving = True  # also to the next coordinator
        self._call("Advertise", lambda _: pb.AdvertiseRequest(lease_key=self._key(), leaving=True), timeout)

    def leave(self) -> None:
        """Tells the coordinator that this peer goes, and joins none again. Best effort within a second, no error. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._state:
            if self._left:
                return
            self._left = True
            self._state.notify_all()
            link, membership = self._link, self._membership
        if link is None or membership is None:
            return
        with contextlib.suppress(TensorLinkError):
            link.call("Leave", pb.LeaveRequest(lease_key=membership.lease_key), timeout=_LEAVE_S, phase="leave")

    def close(self) -> None:
        """Ends the connection and its thread, within two seconds; one that looks for a coordinator just then ends by itself
        soon after. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._state:
            self._closed = True
            links = [link for link in {self._link, self._joining} if link is not None]
            self._link = None
            self._state.notify_all()
        self._inbox.put(("close", None, None))
        for link in links:
            link.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    # Finding peers

    def resolve(self, name: str, timeout: float) -> PeerInfo:
        """The live peer of this name, waited for. Asks the coordinator; its last word counts while there is none.

        Raises: PeerUnknownError: nobody joined under it in `timeout` seconds; the message lists near names;
        ValueError: no peer can have that name.
        """
        wire.check_name(name)
        known = self._ask("Resolve", lambda left: pb.ResolveRequest(name=name, wait_s=left), timeout, name)
        return known if isinstance(known, PeerInfo) else wire.peer_from_pb(known)

    def find(self, service: str, timeout: float) -> PeerInfo:
        """The live peer that serves this name, waited for.

        Raises: PeerUnknownError: nobody served it in `timeout` seconds; the message lists near names.
        """
        found = self._call("Find", lambda left: pb.FindRequest(service=service, wait_s=left), timeout)
        return wire.peer_from_pb(found)

    def peers(self) -> list[PeerInfo]:
        """Live peers by name, this one among them, as last heard. Doesn't block."""
        self._check()
        return self.roster.members()

    def known(self, name: str) -> PeerInfo | None:
        """The live peer of this name as last heard. Doesn't block."""
        return self.roster.member(name)

    def last_incarnation(self, name: str) -> int:
        """Highest incarnation ever heard of under this name; 0: never heard of it. Doesn't block."""
        return self.roster.incarnation(name)

    # Services

    def advertise(self, service: str, timeout: float | None = None) -> None:
        """Makes this peer the one that serves a name, also after a rejoin. Idempotent.

        Raises: NameInUseError: another live peer serves it.
        """
        self._call("Advertise", lambda _: pb.AdvertiseRequest(lease_key=self._key(), add=[service]), timeout)
        with self._state:
            self._services.add(service)

    def withdraw(self, service: str, timeout: float | None = None) -> None:
        """Ends what `advertise` began. Idempotent."""
        with self._state:
            self._services.discard(service)
        self._call("Advertise", lambda _: pb.AdvertiseRequest(lease_key=self._key(), remove=[service]), timeout)

    # Calls

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("this endpoint belongs to the parent of this process", hint="Call init in the child too")
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise ClosedError("the endpoint is closed", hint="Call init first")

    def _key(self) -> bytes:
        with self._state:
            return self._membership.lease_key if self._membership is not None else b""

    def _ask(self, method: str, request: Callable[[float], Any], timeout: float, name: str) -> Any:
        """A call whose answer the local view may give while the coordinator is away."""
        try:
            return self._call(method, request, timeout, once=self.known(name) is not None)
        except PeerLostError:
            known = self.known(name)
            if known is None:
                raise
            return known

    def _call(self, method: str, request: Callable[[float], Any], timeout: float | None, *, once: bool = False) -> Any:
        """Calls until it gets an answer; a lost coordinator or lease is renewed by the thread meanwhile."""
        deadline = time.monotonic() + (self._settings.timeout if timeout is None else timeout)
        phase = method.lower()
        while True:
            self._check()
            if self._left:
                raise ClosedError("this peer has left", phase=phase, hint="Call shutdown, and init to join again")
            left = max(deadline - time.monotonic(), 0.001)
            with self._state:
                link, joins = self._link, self._joins
            try:
                if link is None:
                    raise PeerLostError("not joined", phase=phase)
                return link.call(method, request(left), timeout=left + 2.0, phase=phase)
            except (PeerLostError, ClosedError) as error:  # the latter: the thread replaced the link meanwhile
                self._check()
                lost = error
            self._inbox.put(("rejoin", link, None))
            if once:
                raise lost if isinstance(lost, PeerLostError) else PeerLostError(lost.message, phase=phase)
            with self._state:
                left = max(deadline - time.monotonic(), 0)
                changed = lambda joins=joins: self._joins != joins or self._failure or self._closed or self._left  # noqa: E731
                if not self._state.wait_for(changed, left):
                    raise PeerLostError(f"no coordinator: {lost.message}", phase=phase) from lost

    # Joins; `join` runs them before the thread is there, afterwards only the thread

    def _join_until(self, deadline: float) -> Membership:
        backoff, most = _BACKOFF_S
        began, told = time.monotonic(), False
        while True:
            try:
                return self._join_once(deadline)
            except (PeerLostError, TransferTimeoutError) as error:
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    raise
                if not told and time.monotonic() - began > _PATIENCE_S:
                    told = True
                    log.warning("not joined yet, and %.0f s are left: %s", left, error)
                time.sleep(min(backoff, left))
                backoff = min(2 * backoff, most)

    def _join_once(self, deadline: float) -> Membership:
        link = open_link(self._settings_now(deadline), self.certificates, max(deadline - time.monotonic(), 0.1))
        try:
            with self._state:
                self._joining = link
                peer = pb.Peer(services=sorted(self._services), incarnation=self._held())
                peer.MergeFrom(self._self)
            newest = sorted(self.roster.incarnations().items(), key=lambda pair: -pair[1])
            known = dict(newest[: wire.MAX_KNOWN])
            request = pb.JoinRequest(
                version=wire.VERSION, peer=peer, nonce=self._nonce, known=known, utc_us=time.time_ns() // 1000
            )
            reply = link.call("Join", request, timeout=max(deadline - time.monotonic(), 0.1), phase="join")
            membership = link.membership(reply, min(max(deadline - time.monotonic(), 0.1), _HEARTBEAT_TRY_S))
        except TensorLinkError:
            link.close()
            raise
        with self._state:
            if self._closed:
                link.close()
                raise ClosedError("the endpoint is closed")
            self._link, self._membership = link, membership
            self._joins += 1
            self._state.notify_all()
        link.watch(lambda kind, what: self._inbox.put((kind, link, what)))
        return membership

    def _settings_now(self, deadline: float) -> Settings:
        if self._find is None:
            return self._settings
        return replace(self._settings, coordinator=self._find(max(deadline - time.monotonic(), 0.1)))

    def _held(self) -> int:
        return self._membership.incarnation if self._membership is not None else 0

    def _drop(self) -> None:
        with self._state:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    # The thread

    def _maintain(self) -> None:
        try:
            while not self._closed:
                kind, link, what = self._next()
                if kind == "close":
                    return
                if kind == "reply" and link is self._link:
                    self._heard(what)
                elif kind in ("ended", "rejoin") and link is self._link:
                    # Nobody has joined again since that was asked for.
                    self._rejoin()
                self.roster.expire(time.monotonic())
        except TensorLinkError as error:
            self._fail(error)

    def _next(self) -> tuple[str, Link | None, Any]:
        deadline = self.roster.next_deadline()
        try:
            return self._inbox.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0))
        except queue.Empty:
            return "tick", None, None

    def _rejoin(self) -> None:
        """Over a new link, also where the old one seems to stand: what it leads to may no longer be the coordinator."""
        self._drop()
        while not (self._closed or self._left):
            try:
                membership = self._join_until(time.monotonic() + _JOIN_TRY_S)
            except (PeerLostError, TransferTimeoutError) as error:
                log.warning("%s cannot reach a coordinator: %s", self.name, error)
                continue
            except ClosedError:
                if self._closed:
                    return
                raise  # what told where the coordinator is has ended
            self._guard(self.on_joined, membership)
            return

    def _heard(self, reply: pb.WatchReply) -> None:
        if reply.HasField("snapshot"):
            peers = [wire.peer_from_pb(peer) for peer in reply.snapshot.peers]
            grace_s = max(reply.snapshot.lease_s, _MIN_GRACE_S)
            self.roster.snapshot(reply.snapshot.epoch, peers, now=time.monotonic(), grace_s=grace_s)
        elif reply.change.kind == pb.Change.DOWN:
            self.roster.hear(Gone(wire.peer_from_pb(reply.change.peer).id, reply.change.reason))
        else:
            self.roster.hear(Here(wire.peer_from_pb(reply.change.peer)))
        with self._state:
            self._seen_snapshot = True
            self._state.notify_all()

    def _fail(self, error: TensorLinkError) -> None:
        with self._state:
            self._failure = error
            self._state.notify_all()
        ended = isinstance(error, ClosedError)
        log.log(logging.INFO if ended else logging.ERROR, "%s is no member any more: %s", self.name, error)
        self._guard(self.on_failed, error)

    def _guard(self, callback: Callable[[Result], None] | None, value: Result) -> None:
        if callback is None or self._closed:
            return
        try:
            callback(value)
        except Exception:
            log.exception("a membership callback failed")
