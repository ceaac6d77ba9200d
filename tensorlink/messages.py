"""Messages: `send` and `recv` in all their forms.

A small object travels inside its message. A larger one is copied into the pool, and the message offers it: so `send`
ends without the receiver, and two peers that both send first don't wait for each other.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from tensorlink import _core, flight, recording
from tensorlink.control import ControlClient
from tensorlink.errors import (
    ClosedError,
    CorruptTransferError,
    PeerLostError,
    PeerRestartedError,
    PeerUnknownError,
    PoolExhaustedError,
    StaleRefError,
    TensorLinkError,
    TransferCancelledError,
    TransferTimeoutError,
    TransportError,
)
from tensorlink.links import Links, PeerLink
from tensorlink.transfer import Arrivals, Background, Finished, InFlight, Transfer, Used, patiently
from tensorlink.transports.base import View
from tensorlink.types import PeerId

log = logging.getLogger("tensorlink")

_FOREVER = -1.0
_LOOK_S = 0.002
_INLINE_META = 16 << 10
_HOPELESS = (PeerLostError, StaleRefError, CorruptTransferError)


class Messages:
    """The two-sided half of an endpoint. Thread-safe."""

    def __init__(
        self,
        engine: _core.Engine,
        links: Links,
        control: ControlClient,
        exhausted: Callable[[int, str], PoolExhaustedError],
        failed: Callable[[TensorLinkError], None],
        work: InFlight,
    ) -> None:
        self._engine = engine
        self._work = work
        self._links = links
        self._control = control
        self._exhausted = exhausted
        self._failed = failed
        self._arrivals = Arrivals(engine)
        self._holes: dict[PeerId, deque[bytes]] = {}
        self._filling = threading.Lock()
        self._origins: dict[str, int] = {}

    # Sending

    def send(self, obj: Any, to: str, tag: str, timeout: float) -> None:
        """As `Endpoint.send`."""
        link = self._links.fast(to)
        if link is not None and link.lane is not None:
            try:
                packed = link.lane.send(obj, tag)
            except PeerLostError as error:
                self._broke(link, error)
                packed = _core.pack(obj)
            if packed is None:
                return
        else:
            packed = _core.pack(obj)
        try:
            with self._work:
                self._send_packed(packed, to, tag, timeout)
        except TensorLinkError as error:
            self._failed(error)
            raise

    def isend(self, obj: Any, to: str, tag: str, timeout: float) -> Transfer:
        """As `Endpoint.isend`: the object is taken apart at once, and mostly sent at once too."""
        link = self._links.fast(to)
        if link is None or link.lane is None:
            packed = _core.pack(obj)
            return self._send_aside(packed, to, tag, timeout, "")
        path = link.connection.transport
        try:
            left = link.lane.send(obj, tag)
            if left is None:
                return Finished(None, path)
            if self._offer_now(link, left, tag):
                return Finished(None, path)
        except PeerLostError as error:
            try:
                self._broke(link, error)
            except (PeerLostError, ClosedError) as lost:
                return Finished(None, path, lost)
            left = _core.pack(obj)
        return self._send_aside(left, to, tag, timeout, path)

    def _send_aside(self, packed: _core.Packed, to: str, tag: str, timeout: float, path: str) -> Transfer:
        used = Used(path)

        def send(stop: _core.Stop) -> None:
            with flight.doing(self._engine.flight, "send", to, "room", tag):
                self._send_packed(packed, to, tag, timeout, stop, used)

        return Background(self._work.around(send), used, self._engine.flight, goes_on=True)

    def _offer_now(self, link: PeerLink, packed: _core.Packed, tag: str) -> bool:
        stored = self._store(link, packed, 0.0)
        if stored is None:
            return False
        offered = False
        try:
            offered = self._offer(link, stored, tag, 0.0)
        finally:
            stored.fill()
            if not offered:
                self._engine.release(stored.claim)
        return offered

    def _send_packed(
        self,
        packed: _core.Packed,
        to: str,
        tag: str,
        timeout: float,
        stop: _core.Stop | None = None,
        used: Used | None = None,
    ) -> None:
        deadline = time.monotonic() + timeout
        while True:
            link = self._links.to_name(to, max(deadline - time.monotonic(), 0.0), stop)
            if used is not None:
                used.transport = link.connection.transport if link.lane is not None else ""
            try:
                return self._send_to(link, packed, tag, deadline, stop)
            except PeerLostError as error:  # nothing was sent
                self._broke(link, error)
            except ClosedError as error:  # its channel was closed under a call, since the peer went down
                if self._engine.closed or not self._engine.is_down(self._origin(to)):
                    raise
                raise self._lost(link, "send") from error

    def _send_to(
        self, link: PeerLink, packed: _core.Packed, tag: str, deadline: float, stop: _core.Stop | None
    ) -> None:
        if link.lane is None:
            self._send_over_grpc(link, packed, tag, deadline, stop)
            return
        small = packed.nbytes + len(packed.meta) < _core.EAGER_LIMIT
        if small and self._engine.send_packed(link.lane, packed, tag, 0.0):
            return
        stored = _until(deadline, stop, lambda left: self._store(link, packed, left))
        if stored is None:
            raise self._exhausted(packed.nbytes, f"send to {link.peer.name}")
        self._offer_until(link, stored, tag, deadline, stop)

    def _broke(self, link: PeerLink, error: PeerLostError) -> None:
        """A stream to another host may break and the peer live: then the next look for a link makes another.

        Raises: PeerLostError: it is the peer that has gone; ClosedError: it is this endpoint.
        """
        if self._engine.closed:
            raise ClosedError("the endpoint was shut down", phase="send") from error
        if link.lane is None or link.lane.pid or self._engine.is_down(self._origin(link.peer.name)):
            raise self._lost(link, "send") from error
        self._links.drop(link.peer)

    def _store(self, link: PeerLink, packed: _core.Packed, timeout: float) -> _core.Stored | None:
        """A copy in the pool for one peer. For one on another host it may have to be filled: that one can read along."""
        native = link.connection.lane()  # also where messages go over gRPC: what it was sent ends with the reader
        reader, later = (native.reader, native.pid == 0) if native is not None else (0, False)
        return self._engine.store(packed, 1, 0.0, reader, _INLINE_META, timeout, False, later)

    def _offer(self, link: PeerLink, stored: _core.Stored, tag: str, timeout: float) -> bool:
        assert link.lane is not None
        return self._engine.send_offer(link.lane, stored.descriptor, stored.meta, tag, timeout)

    def _offer_until(
        self, link: PeerLink, stored: _core.Stored, tag: str, deadline: float, stop: _core.Stop | None
    ) -> None:
        offered: bool | None = False
        try:
            try:
                offered = self._offer(link, stored, tag, 0.0)
            finally:
                stored.fill()
            offered = offered or _until(deadline, stop, lambda left: self._offer(link, stored, tag, left) or None)
        finally:
            if not offered:
                self._engine.release(stored.claim)
        if offered:
            return
        raise TransferTimeoutError(
            f"{link.peer.name} takes no messages",
            waited=_core.waited(),
            peer=str(link.peer),
            transport=link.connection.transport,
            phase="send",
        )

    def _send_over_grpc(
        self, link: PeerLink, packed: _core.Packed, tag: str, deadline: float, stop: _core.Stop | None
    ) -> None:
        descriptor, meta, payload, stored = b"", packed.meta, b"", None
        if packed.nbytes + len(meta) < _core.EAGER_LIMIT:
            payload = packed.to_bytes()
        else:
            stored = _until(deadline, stop, lambda left: self._store(link, packed, left))
            if stored is None:
                raise self._exhausted(packed.nbytes, f"send to {link.peer.name}")
            stored.fill()
            descriptor, meta = stored.descriptor, stored.meta
            if (native := link.connection.lane()) is not None:
                self._engine.announce(native, descriptor)
        frame = self._engine.frame(link.peer.name, link.peer.incarnation, tag, meta, descriptor, payload)
        try:
            with flight.doing(self._engine.flight, "send", link.peer.name, "answer", tag):
                self._fill_holes(link, deadline)
                link.client.deliver(0, tag, frame, max(0.001, deadline - time.monotonic()))
        except BaseException:
            self._holes.setdefault(link.peer, deque()).append(_core.void_frame(frame))
            if stored is not None:
                self._engine.release(stored.claim)
            raise

    def _fill_holes(self, link: PeerLink, deadline: float) -> None:
        """Delivers void frames for the numbers of messages that failed: what follows them would wait for ever."""
        with self._filling:
            holes = self._holes.get(link.peer)
            while holes:
                link.client.deliver(0, "", holes[0], max(0.001, deadline - time.monotonic()))
                holes.popleft()

    def _lost(self, link: PeerLink, phase: str) -> PeerLostError:
        self._links.drop(link.peer)
        return self._links.lost(link.peer, link.connection.transport, phase)

    def linger(self, timeout: float) -> None:
        """Until peers on other hosts have what was sent to them, since it goes with this process; or for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._engine.owes and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    # Receiving

    def recv(self, source: str | None, tag: str, out: Any, timeout: float | None, like: str | None) -> Any:
        """As `Endpoint.recv`."""
        wait_s = _FOREVER if timeout is None else timeout
        got = self._engine.receive(self._origin(source), tag, wait_s, out, like)
        if type(got) is _core.Message:
            return self.open(got, out, wait_s, like, None)
        if type(got) is _core.NoMessage:
            error = self._nothing(source, tag, got, _core.waited)
            self._failed(error)
            raise error
        return got

    def _origin(self, source: str | None) -> int:
        """The engine's number of a source; it never changes."""
        if source is None:
            return _core.ANY_SOURCE
        number = self._origins.get(source)
        if number is None:
            number = self._origins[source] = self._engine.source(source)
        return number

    def irecv(self, source: str | None, tag: str, out: Any, timeout: float | None, like: str | None) -> Transfer:
        """As `Endpoint.irecv`."""
        return PostedReceive(self, self._engine, self._arrivals, self._origin(source), source, tag, out, timeout, like)

    def open(self, message: _core.Message, out: Any, wait_s: float, like: str | None, stop: _core.Stop | None) -> Any:
        """The object of a message. After a failure the next `recv` gets it again, unless nobody ever could."""
        try:
            with self._work:
                result = self._open(message, out, wait_s, like, stop)
        except TensorLinkError as error:
            error.peer = error.peer or self._engine.source_name(message.source)
            error.phase = error.phase or "recv"
            if isinstance(error, _HOPELESS):
                message.consumed()
            else:
                self._engine.put_back(message)
            self._failed(error)
            raise
        except BaseException:
            self._engine.put_back(message)
            raise
        message.consumed()
        return result

    def _open(self, message: _core.Message, out: Any, wait_s: float, like: str | None, stop: _core.Stop | None) -> Any:
        if not message.offered:
            return message.unpack(like) if out is None else message.fill(out, stop, wait_s)
        timeout = 60.0 if wait_s < 0 else wait_s
        sender = PeerId(self._engine.source_name(message.source), message.incarnation)
        if message.connection is not None:
            try:
                offered = functools.partial(self._engine.open, message.connection, message.descriptor)
                view: View = patiently(offered, timeout, stop)
                return _looked_at(view, message, out, like, stop, timeout)
            except (TransportError, PeerLostError) as error:
                if getattr(error, "code", None) or self._control.roster.restarted(sender):
                    raise
                log.warning("the path that a message came by failed: %s", error.message)
        # gRPC brought it, or its path failed: its bytes come over the connection that stands, or is made now.
        link = self._links.to_name(sender.name, timeout, stop)
        if link.peer != sender:
            raise self._links.lost(sender, phase="recv")
        view = patiently(functools.partial(link.connection.open, message.descriptor), timeout, stop)
        return _looked_at(view, message, out, like, stop, timeout)

    def _nothing(
        self,
        source: str | None,
        tag: str,
        why: _core.NoMessage | _core.Posted,
        waited: Callable[[], str | None],
    ) -> TensorLinkError:
        if why.lapsed and source is not None:
            return PeerLostError(
                f"this process was silent for longer than its lease, so {source} may have given up what it waited for",
                peer=source,
                phase="recv",
                hint="It has joined again, as it was: receive again",
            )
        if why.lost and source is not None:
            if self._engine.is_down(self._origin(source)):
                return self._links.lost(PeerId(source, self._control.last_incarnation(source)), phase="recv")
            return PeerRestartedError(
                f"{source} has restarted",
                peer=source,
                phase="recv",
                hint="Receive again: its name now means the new process",
            )
        what = f"no message with tag {tag!r}" if tag else "no message"
        if source is None:
            return TransferTimeoutError(f"{what} came in time", waited=waited(), phase="recv")
        if self._control.known(source) is None:
            try:
                self._control.resolve(source, 0.001)
            except PeerUnknownError as error:
                return error
        return TransferTimeoutError(f"{what} from {source} came in time", waited=waited(), peer=source, phase="recv")


class PostedReceive(Transfer):
    """A receive that waits for its message; what is left to do then is done by whoever asks for the result."""

    def __init__(
        self,
        messages: Messages,
        engine: _core.Engine,
        arrivals: Arrivals,
        origin: int,
        source: str | None,
        tag: str,
        out: Any,
        timeout: float | None,
        like: str | None,
    ) -> None:
        self._messages = messages
        self._engine = engine
        self._arrivals = arrivals
        self._source = source
        self._tag = tag
        self._out = out
        self._like = like
        self._timeout = timeout or 0.0
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._posted = engine.post(origin, tag)
        self._lock = threading.RLock()
        self._stop = _core.Stop()
        self._outcome: Finished | None = None

    def _arrived(self) -> bool:
        return self._outcome is not None or self._engine.posted_done(self._posted) or self._engine.closed

    def _left(self) -> float:
        return _FOREVER if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _finish(self) -> Finished:
        """Ends it: with its message, or, when there is none, because it was lost, cancelled or too late."""
        with self._lock:
            if self._outcome is None:
                self._outcome = self._conclude()
                self._out = None
            return self._outcome

    def _conclude(self) -> Finished:
        message = self._engine.posted_collect(self._posted)
        if message is None and self._engine.closed:
            return Finished(None, self.path, ClosedError("the endpoint was shut down", phase="recv"))
        if message is None:
            why = self._messages._nothing(self._source, self._tag, self._posted, self._waited)
            return Finished(None, self.path, why)
        try:
            wait_s = self._left()
            result = self._messages.open(message, self._out, wait_s or 0.001, self._like, self._stop)
            return Finished(result, self.path)
        except Exception as error:
            return Finished(None, self.path, error)

    def _waited(self, since: float | None = None) -> str | None:
        if since is None:
            since = time.monotonic() if self._deadline is None else self._deadline - self._timeout
        return recording.waited("message", since, self._source or "", self._tag)

    def _awaited(self) -> None:
        self._engine.posted_awaited(self._posted)

    def done(self) -> bool:
        if self._outcome is None and (self._arrived() or self._left() == 0):
            self._finish()
        return self._outcome is not None

    def wait(self, timeout: float | None = None) -> Any:
        if self._outcome is None:
            left = self._left()
            wait_s = left if timeout is None else timeout if left < 0 else min(left, timeout)
            with contextlib.suppress(ClosedError):
                if not self._engine.posted_wait(self._posted, wait_s) and self._left() != 0:
                    raise TransferTimeoutError("the transfer has not ended", waited=_core.waited(), phase="wait")
        return self._finish().wait()

    def cancel(self) -> bool:
        if self._outcome is not None:
            return False
        self._stop.set()  # a fill in progress in another thread ends, and the lock comes free
        with self._lock:
            if self._outcome is not None:
                return isinstance(self._outcome.error, TransferCancelledError)
            message = self._engine.posted_collect(self._posted)
            if message is not None:
                self._engine.put_back(message)
            self._outcome = Finished(None, self.path, TransferCancelledError("the receive was cancelled", phase="recv"))
            return True

    def __del__(self) -> None:
        # Nobody can ask for its result any more: the message it waits for is the next receive's.
        if self._outcome is None:
            self.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._await().__await__()

    async def _await(self) -> Any:
        import asyncio

        try:
            if not self._arrived():
                left = self._left()
                self._awaited()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._arrivals.next(self._arrived), None if left < 0 else left)
            if self._outcome is None and (self._out is not None or self._engine.posted_far(self._posted)):
                # filling or bringing it may take long: not on the loop's thread
                await asyncio.get_running_loop().run_in_executor(None, self._finish)
        except BaseException:  # the task was cancelled, or its loop is over
            self.cancel()
            raise
        return self._finish().wait()


def _looked_at(
    view: View, message: _core.Message, out: Any, like: str | None, stop: _core.Stop | None, timeout: float
) -> Any:
    if out is None:
        return view.unpack(message.meta, like, False, stop, timeout)
    return view.fill(message.meta, out, stop, timeout)


def _until(deadline: float, stop: _core.Stop | None, attempt: Callable[[float], Any]) -> Any:
    """Calls `attempt(seconds)` until it gives something or the deadline passes; in slices where it can be stopped."""
    while True:
        left = max(0.0, deadline - time.monotonic())
        result = attempt(left if stop is None else min(left, 0.05))
        if result is not None or left == 0 or stop is None:
            return result
        if stop.is_set():
            raise TransferCancelledError("the transfer was cancelled", phase="send")
