"""What the relay of `tensorlink.testing.faults` does with bytes. All of it runs in the relay's thread."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Direction = Literal["forward", "backward"]
"""`forward` is from who connected to the relay to its target, `backward` the other way."""

BOTH: tuple[Direction, ...] = ("forward", "backward")
CAPACITY = 4 << 20  # bytes under way in one direction of a connection
CHUNK = 256 << 10
RESET_AT_CLOSE = b"\1\0\0\0\0\0\0\0"  # struct linger: on, for no time


@dataclass
class Counters:
    """What a relay has seen."""

    connections: int = 0  # accepted so far
    forward_bytes: int = 0
    backward_bytes: int = 0
    cuts: int = 0  # connections ended by `cut` and `cut_after`
    flips: int = 0  # bits turned over by `corrupt` and `corrupt_once`


@dataclass(eq=False, frozen=True)
class Mark:
    """A fault at a byte of each connection: `gaps` says how many bytes pass before it, and between it and the next."""

    direction: Direction
    kind: Literal["cut", "flip"]
    gaps: Callable[[], Iterator[int]]
    once: bool


@dataclass
class Line:
    """The connections of a relay, and the faults in force on all of them."""

    loop: asyncio.AbstractEventLoop
    counters: Counters = field(default_factory=Counters)
    links: set[Link] = field(default_factory=set)
    marks: list[Mark] = field(default_factory=list)
    stalled: set[Direction] = field(default_factory=set)
    delays: dict[Direction, float] = field(default_factory=dict)
    dribbles: dict[Direction, tuple[int, float]] = field(default_factory=dict)  # bytes a write, seconds between writes

    def arm(self, mark: Mark) -> None:
        self.marks.append(mark)
        for link in self.links:
            link.flows[mark.direction].arm(mark)

    def disarm(self, mark: Mark) -> None:
        self.marks.remove(mark)
        for link in self.links:
            link.flows[mark.direction].disarm(mark)

    def reset(self) -> None:
        for link in list(self.links):
            link.close(reset=True)

    def go_on(self) -> None:
        """To be called after a change."""
        for link in list(self.links):
            link.go_on()

    def heal(self) -> None:
        for faults in (self.stalled, self.delays, self.dribbles):
            faults.clear()
        for mark in list(self.marks):
            self.disarm(mark)


class Link:
    """One connection: the socket of the client, that to the target, and a flow each way."""

    def __init__(self, line: Line, client: socket.socket, family: int, address: Any) -> None:
        self.line, self.client, self.target = line, client, socket.socket(family)
        self.connected = self.closed = False
        for end in (self.client, self.target):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.flows: dict[Direction, Flow] = {
            "forward": Flow(self, "forward", self.client, self.target),
            "backward": Flow(self, "backward", self.target, self.client),
        }
        line.links.add(self)
        self.target.connect_ex(address)
        line.loop.add_writer(self.target, self._answered)

    def _answered(self) -> None:
        self.line.loop.remove_writer(self.target)
        if self.target.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.close(reset=True)
        else:
            self.connected = True
            self.go_on()

    def go_on(self) -> None:
        if self.connected:
            for flow in self.flows.values():
                flow.write()

    def close(self, reset: bool) -> None:
        if self.closed:
            return
        self.closed = True
        self.line.links.discard(self)
        for flow in self.flows.values():
            flow.cancel_timer()
        for end in (self.client, self.target):
            self.line.loop.remove_reader(end)
            self.line.loop.remove_writer(end)
            if reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
            end.close()


class Flow:
    """One direction of a connection. Positions count its bytes from the beginning; those from `passed` to `taken` lie in
    a ring, which starts anew when it is empty, so that little traffic stays in the cache.
    """

    def __init__(self, link: Link, way: Direction, source: socket.socket, sink: socket.socket) -> None:
        self.link, self.line, self.loop, self.way = link, link.line, link.line.loop, way
        self.source, self.sink = source, sink
        self.ring = memoryview(bytearray(CAPACITY))
        self.passed = self.taken = self.origin = 0
        self.due: deque[tuple[float, int]] = deque()  # from when on bytes may leave, and up to which position
        self.next_write = 0.0
        self.marks: dict[Mark, int] = {}  # where the next ones are
        self.gaps: dict[Mark, Iterator[int]] = {}
        self.reading = self.writing = self.eof = self.finished = False
        self.timer: asyncio.TimerHandle | None = None
        for mark in self.line.marks:
            if mark.direction == way:
                self.arm(mark)

    def arm(self, mark: Mark) -> None:
        self.gaps[mark] = mark.gaps()
        self.marks[mark] = self.passed + next(self.gaps[mark])

    def disarm(self, mark: Mark) -> None:
        self.marks.pop(mark, None)
        self.gaps.pop(mark, None)

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def read(self) -> None:
        if self.passed == self.taken:
            self.origin = self.passed
        at = (self.taken - self.origin) % CAPACITY
        room = min(CAPACITY - (self.taken - self.passed), CAPACITY - at, CHUNK)
        try:
            count = self.source.recv_into(self.ring[at : at + room])
        except BlockingIOError:
            return
        except OSError:
            self.link.close(reset=True)
            return
        self.taken += count
        self.eof = count == 0
        self.due.append((self.loop.time() + self.line.delays.get(self.way, 0.0), self.taken))
        self.write()

    def write(self) -> None:
        """Passes on what may leave now, and asks to be called again for the rest."""
        try:
            if not self.link.closed:
                self._wait_for(*self._pass_on())
        except OSError:
            self.link.close(reset=True)

    def _pass_on(self) -> tuple[float | None, bool]:
        """When to come back, and whether the sink has to take something first."""
        while self.way not in self.line.stalled:
            if self._struck("cut"):
                self.line.counters.cuts += 1
                self.link.close(reset=True)
                break
            if not self.due:
                self._finish()
                break
            due, end = self.due[0]
            now = self.loop.time()
            if max(due, self.next_write) > now:
                return max(due, self.next_write), False
            if self.passed == end:
                self.due.popleft()
            elif not self._send(end):
                return None, True
            elif self.way in self.line.dribbles:
                self.next_write = now + self.line.dribbles[self.way][1]
                return self.next_write, False  # also at once: others get their turn
        return None, False

    def _send(self, end: int) -> bool:
        at = (self.passed - self.origin) % CAPACITY
        if self._struck("flip"):
            self.ring[at] ^= 1 << self.passed % 8
            self.line.counters.flips += 1
        most, _ = self.line.dribbles.get(self.way, (CAPACITY, 0.0))
        until = min(end, *self.marks.values(), self.passed + most, self.passed + CAPACITY - at)
        try:
            count = self.sink.send(self.ring[at : at + until - self.passed])
        except BlockingIOError:
            return False
        self.passed += count
        if self.way == "forward":
            self.line.counters.forward_bytes += count
        else:
            self.line.counters.backward_bytes += count
        return True

    def _struck(self, kind: str) -> bool:
        """Whether marks of this kind lie here. If so they move on, or go."""
        struck = [mark for mark, at in self.marks.items() if at == self.passed and mark.kind == kind]
        for mark in struck:
            if mark.once:
                self.line.disarm(mark)
            else:
                self.marks[mark] += 1 + next(self.gaps[mark])
        return bool(struck)

    def _finish(self) -> None:
        if self.eof and not self.finished:
            self.sink.shutdown(socket.SHUT_WR)
            self.finished = True
            if all(flow.finished for flow in self.link.flows.values()):
                self.link.close(reset=False)

    def _wait_for(self, wake_at: float | None, blocked: bool) -> None:
        """Has the loop call for what this flow can use: bytes to read, room to write, time to pass."""
        if self.link.closed:
            return
        reading = not (self.eof or self.way in self.line.stalled or self.taken - self.passed == CAPACITY)
        if reading != self.reading:
            if reading:
                self.loop.add_reader(self.source, self.read)
            else:
                self.loop.remove_reader(self.source)
        if blocked != self.writing:
            if blocked:
                self.loop.add_writer(self.sink, self.write)
            else:
                self.loop.remove_writer(self.sink)
        self.reading, self.writing = reading, blocked
        self.cancel_timer()
        self.timer = None if wake_at is None else self.loop.call_at(wake_at, self.write)
