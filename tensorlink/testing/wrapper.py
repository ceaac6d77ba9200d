"""`FaultyTransport`: any transport, with faults between it and whoever uses it, and the contract kept all the same."""

from __future__ import annotations

import ctypes
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tensorlink import _core
from tensorlink.endpoint import Endpoint
from tensorlink.errors import TransferCancelledError, TransferTimeoutError, TransportError
from tensorlink.links import PeerLink
from tensorlink.transports.base import Connection, Fetch, Mailbox, Transport, View
from tensorlink.types import Buffer, Link, PeerId

Kind = Literal["delay", "fail", "hang", "corrupt", "lose", "duplicate", "reorder"]
_LOOK_S = 0.02
_FOREVER_S = 1e6


@dataclass(frozen=True)
class Plan:
    """What goes wrong, and how often: a share of the operations for each kind, from 0 to 1. An operation has one fault at most.

    The draws come from `seed`, in the order of the operations; with several threads that order is theirs.
    """

    seed: int = 0
    delay: float = 0.0
    """Of `connect`, `expose`, `fetch`, `map`, `open`: it begins up to `delay_s` seconds later, or ends at its deadline."""
    fail: float = 0.0
    """Of the same: `TransportError`; of a fetch, once `after_bytes` have landed."""
    hang: float = 0.0
    """Of all that have a deadline or can be cancelled: nothing comes, until then or until the peer has gone; of a fetch,
    once `after_bytes` have landed."""
    corrupt: float = 0.0
    """Of `fetch`: a bit of the first byte of one of its targets is another. Whoever wants to know needs a checksum."""
    lose: float = 0.0
    """Of messages: a mailbox drops it; a delivery fails, before or after the message was delivered."""
    duplicate: float = 0.0
    """Of messages: it comes twice."""
    reorder: float = 0.0
    """Of messages: it comes after the next one."""
    delay_s: float = 0.02
    after_bytes: int = 0
    after: int = 0
    """The first operations, as many as this, go well."""


class Dice:
    """A plan in force. Thread-safe."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.struck: Counter[str] = Counter()
        """How many faults there were of each kind."""
        self._random = random.Random(plan.seed)
        self._lock = threading.Lock()
        self._operations = 0

    def draw(self, *kinds: Kind) -> Kind | None:
        """The fault of one operation, of these kinds."""
        with self._lock:
            self._operations += 1
            if self._operations <= self.plan.after:
                return None
            at = self._random.random()
            for kind in kinds:
                at -= getattr(self.plan, kind)
                if at < 0:
                    self.struck[kind] += 1
                    return kind
        return None

    def seconds(self) -> float:
        with self._lock:
            return self._random.uniform(0, self.plan.delay_s)

    def below(self, limit: int) -> int:
        with self._lock:
            return self._random.randrange(limit)

    def before(self, peer: PeerId, transport: str, what: str, timeout: float, there: Callable[[], bool]) -> float:
        """What an operation with a deadline meets before it begins; the seconds that are left of it then.

        Raises: TransportError, TransferTimeoutError, PeerLostError: the peer has gone meanwhile.
        """
        kind = self.draw("delay", "fail", "hang")
        if kind is None:
            return timeout
        if kind == "fail":
            raise _made_to_fail(peer, transport, what)
        deadline = time.monotonic() + timeout
        until = time.monotonic() + (self.seconds() if kind == "delay" else _FOREVER_S)
        while (now := time.monotonic()) < until:
            if now >= deadline:
                raise TransferTimeoutError(f"{what} was made to hang", peer=str(peer), transport=transport, phase=what)
            if not there():
                break  # and what is under it says so
            time.sleep(max(min(_LOOK_S, until - now, deadline - now), 0.0))
        return max(deadline - time.monotonic(), 0.0)


class FaultyFetch:
    """A fetch with a fault, on a thread of its own, which `cancel` joins: that is the fence, while it hangs too."""

    def __init__(self, connection: FaultyConnection, pairs: Sequence[tuple[bytes, Buffer]], kind: Kind | None) -> None:
        self._connection = connection
        self._pairs = list(pairs)
        self._kind = kind
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._inner: Fetch | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="faulty-fetch", daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> None:
        self._thread.join(max(timeout, 0.0))
        if self._thread.is_alive():
            self.cancel()
            if isinstance(self._error, TransferCancelledError):
                self._error = TransferTimeoutError(
                    "the fetch did not end in time", peer=str(self._connection.peer), phase="fetch"
                )
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self._stopped.set()
        with self._lock:
            inner = self._inner
        if inner is not None:
            inner.cancel()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._kind in ("fail", "hang"):
                self._some()
            if self._kind == "fail":
                raise _made_to_fail(self._connection.peer, self._connection.transport, "fetch")
            if self._kind in ("delay", "hang"):
                self._pause(self._connection.dice.seconds() if self._kind == "delay" else _FOREVER_S)
            self._copy(self._pairs)
            if self._kind == "corrupt":
                self._flip()
        except Exception as error:  # handed to whoever waits
            self._error = error.with_traceback(None)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self._connection.up:
            if self._stopped.wait(min(left, _LOOK_S)):
                raise TransferCancelledError("the fetch was cancelled", phase="fetch")

    def _copy(self, pairs: Sequence[tuple[bytes, Buffer]]) -> None:
        with self._lock:
            if self._stopped.is_set():
                raise TransferCancelledError("the fetch was cancelled", phase="fetch")
            self._inner = self._connection.inner.fetch(pairs)
        self._inner.wait(_FOREVER_S)

    def _some(self) -> None:
        """Copies the first `after_bytes`: all of it comes elsewhere first, since no transport is asked for a part."""
        left = self._connection.dice.plan.after_bytes
        if left == 0:
            return
        aside = [ctypes.create_string_buffer(max(target.nbytes, 1)) for _, target in self._pairs]
        for memory, (_, target) in zip(aside, self._pairs, strict=True):
            ctypes.memmove(memory, target.address, target.nbytes)  # what lies behind the exposed bytes stays as it is
        self._copy(
            [
                (descriptor, Buffer(ctypes.addressof(memory), target.nbytes))
                for memory, (descriptor, target) in zip(aside, self._pairs, strict=True)
            ]
        )
        for memory, (_, target) in zip(aside, self._pairs, strict=True):
            if self._stopped.is_set():
                raise TransferCancelledError("the fetch was cancelled", phase="fetch")
            ctypes.memmove(target.address, memory, min(target.nbytes, left))
            left -= min(target.nbytes, left)

    def _flip(self) -> None:
        targets = [target for _, target in self._pairs if target.nbytes]
        if targets:
            chosen = targets[self._connection.dice.below(len(targets))]
            byte = ctypes.c_ubyte.from_address(chosen.address)
            byte.value ^= 1 << self._connection.dice.below(8)


class FaultyConnection(Connection):
    """What a `FaultyTransport` gives: a connection of the transport inside, `inner`."""

    def __init__(self, inner: Connection, owner: FaultyTransport) -> None:
        self.inner = inner
        self.transport = inner.transport
        self.peer = inner.peer
        self._owner = owner
        self._lock = threading.Lock()
        self._closed = False
        self._fetches: weakref.WeakSet[FaultyFetch] = weakref.WeakSet()

    @property
    def dice(self) -> Dice:
        return self._owner.dice

    def _before(self, what: str, timeout: float) -> float:
        return self.dice.before(self.peer, self.transport, what, timeout, lambda: self.up)

    def expose(self, buffers: Sequence[Buffer]) -> list[bytes]:
        """It has no deadline, so it never hangs."""
        kind = self.dice.draw("delay", "fail")
        if kind == "fail":
            raise _made_to_fail(self.peer, self.transport, "expose")
        if kind == "delay":
            time.sleep(self.dice.seconds())
        return self.inner.expose(buffers)

    def retract(self, descriptors: Sequence[bytes]) -> None:
        """Never fails, as the contract wants it."""
        self.inner.retract(descriptors)

    def fetch(self, pairs: Sequence[tuple[bytes, Buffer]]) -> Fetch:
        kind = self.dice.draw("delay", "fail", "hang", "corrupt")
        with self._lock:
            if kind is None or self._closed or not self.inner.up:
                return self.inner.fetch(pairs)
            fetch = FaultyFetch(self, pairs, kind)
            self._fetches.add(fetch)
        return fetch

    def map(self, descriptor: bytes, timeout: float) -> View | None:
        return self.inner.map(descriptor, self._before("map", timeout))

    def open(self, descriptor: bytes, timeout: float) -> View:
        return self.inner.open(descriptor, self._before("open", timeout))

    def lane(self) -> _core.Connection | None:
        """The core's own, which no wrapper gets in between: `Relay` hurts those that are streams."""
        return self.inner.lane()

    @property
    def up(self) -> bool:
        return self.inner.up

    def close(self) -> None:
        self._end_fetches()
        self.inner.close()

    def abort(self) -> None:
        self._end_fetches()
        self.inner.abort()

    def _end_fetches(self) -> None:
        with self._lock:
            self._closed = True
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.cancel()


class FaultyTransport(Transport):
    """Wraps a transport. Change `dice` at any time: `transport.dice = Dice(Plan(hang=0.1))`; `Dice(Plan())` heals.

    It keeps the transport contract: a deadline is a deadline, and a fence a fence, also of what hangs. What the transport
    inside promises of bytes and errors holds but for the faults of the plan.
    """

    def __init__(self, inner: Transport, plan: Plan) -> None:
        super().__init__(inner.site)
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]  # it is whatever it wraps
        self.dice = Dice(plan)
        self._connections: weakref.WeakSet[FaultyConnection] = weakref.WeakSet()

    @classmethod
    def into(cls, endpoint: Endpoint, plan: Plan) -> list[FaultyTransport]:
        """Puts one around each transport of an endpoint, for the connections that it makes from now on."""
        transports = endpoint._links.transports
        wrapped = [cls(transport, plan) for transport in transports.values()]
        transports.update({transport.name: transport for transport in wrapped})
        return wrapped

    def links(self) -> tuple[Link, ...]:
        return self.inner.links()

    def address(self) -> bytes:
        return self.inner.address()

    def where(self, address: bytes) -> str:
        return self.inner.where(address)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        return self.inner.reaches(local, remote)

    def connect(
        self,
        peer: PeerId,
        address: bytes,
        mailbox: Mailbox | None,
        timeout: float,
        stop: _core.Stop | None = None,
    ) -> Connection:
        left = self.dice.before(peer, self.name, "connect", timeout, lambda: stop is None or not stop.is_set())
        box = None if mailbox is None else FaultyMailbox(mailbox, self.dice)
        connection = FaultyConnection(self.inner.connect(peer, address, box, left, stop), self)
        self._connections.add(connection)
        return connection

    def close(self) -> None:
        for connection in list(self._connections):
            connection._end_fetches()
        self.inner.close()


class FaultyMailbox:
    """A mailbox that loses, doubles and reorders what is sent. Its messages are promised to do none of that: a transport that
    needs one may fail, but in time."""

    def __init__(self, inner: Mailbox, dice: Dice) -> None:
        self._inner = inner
        self._dice = dice
        self._late: list[bytes] = []

    def send(self, message: bytes) -> None:
        kind = self._dice.draw("lose", "duplicate", "reorder")
        if kind == "lose":
            return
        if kind == "reorder":
            self._late.append(message)
            return
        self._inner.send(message)
        if kind == "duplicate":
            self._inner.send(message)
        while self._late:
            self._inner.send(self._late.pop(0))

    def recv(self, timeout: float) -> bytes:
        return self._inner.recv(timeout)


class FaultyDeliveries:
    """The messages of an endpoint that go over gRPC, each of which has a number: those lost are told to the sender, though
    they may have arrived; those doubled must come once, and those overtaken in order."""

    def __init__(self, endpoint: Endpoint, plan: Plan) -> None:
        self.dice = Dice(plan)
        self._links = endpoint._links
        self._link = endpoint._links._link
        self._links._link = self._made  # type: ignore[method-assign]

    def _made(self, peer: PeerId, address: str, deadline: float, stop: _core.Stop | None) -> PeerLink:
        link = self._link(peer, address, deadline, stop)
        deliver = link.client.deliver
        link.client.deliver = lambda *message: self._deliver(deliver, *message)  # type: ignore[method-assign]
        return link

    def _deliver(self, deliver: Callable[..., bytes], sequence: int, tag: str, frame: bytes, timeout: float) -> bytes:
        kind = self.dice.draw("delay", "lose", "duplicate", "reorder")
        lost = TransportError("the delivery was made to fail", phase="deliver")
        if kind == "lose" and self.dice.below(2):
            raise lost
        if kind in ("delay", "reorder"):
            time.sleep(min(self.dice.seconds(), timeout))
        answer = deliver(sequence, tag, frame, timeout)
        if kind == "duplicate":
            deliver(sequence, tag, frame, timeout)
        if kind == "lose":
            raise lost
        return answer


def _made_to_fail(peer: PeerId, transport: str, what: str) -> TransportError:
    return TransportError(f"{what} was made to fail", peer=str(peer), transport=transport, phase=what)


__all__ = ["Dice", "FaultyConnection", "FaultyDeliveries", "FaultyFetch", "FaultyMailbox", "FaultyTransport", "Plan"]
