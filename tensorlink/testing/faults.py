"""Faults to test with: of the network (`Relay`), of a transport (`FaultyTransport`), of processes (`csrc/point.h`).

A TCP relay hurts what passes through it:

with Relay("127.0.0.1", server_port) as relay:
    client = socket.create_connection(relay.address)
    relay.cut_after(10 << 20)  # the connection dies in the middle of a transfer

A stream of bytes has no messages that a relay could drop, double or reorder: TCP would have mended that before anybody
sees it. What it shows of a bad network are delays, stalls, ends and, where something on the way is broken, changed bytes. Whole
messages are lost, doubled and overtaken by `FaultyMailbox` and `FaultyDeliveries`.

`FaultyTransport` wraps any transport, third parties' too, and `TransportContract` takes its `Plan` with the maker of pairs.

Processes are killed or stopped at named points of their code where the environment says so before they make an endpoint:
`TENSORLINK_TEST_POINT=served.part:kill@3` kills a process that has sent the third part of an answer;
`csrc/point.h` names the points.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import repeat
from typing import Any, Self

from tensorlink.testing.flows import BOTH, CAPACITY, Counters, Direction, Line, Link, Mark
from tensorlink.testing.wrapper import (
    Dice,
    FaultyConnection,
    FaultyDeliveries,
    FaultyMailbox,
    FaultyTransport,
    Plan,
)

__all__ = [
    "Counters",
    "Dice",
    "Direction",
    "FaultyConnection",
    "FaultyDeliveries",
    "FaultyMailbox",
    "FaultyTransport",
    "Plan",
    "Relay",
    "strike",
]

ANSWER_S = 30.0


class Relay:
    """Listens on `listen` and forwards every connection to a target, both ways, until told otherwise.

    A fault holds for all connections, those there are and those to come, until it is called off or `heal` ends all of
    them. It is in force when the call returns. `direction` is "forward", towards the target, or "backward".

    Any thread may call anything. The relay works in a thread of its own; a call waits for it, less than a millisecond as
    a rule. At most 4 MiB are under way in each direction of a connection; then the sender waits for the receiver. Where
    the target doesn't answer, the client is reset.

    Raises:
        OSError: `host` has no address, or `listen` is none of ours.
        RuntimeError: a fault after `close`.
    """

    def __init__(self, host: str, port: int, *, listen: str = "127.0.0.1") -> None:
        self._target = _resolve(host, port)
        family, address = _resolve(listen, 0)
        self._place = _bound(family, address)  # never listens: it keeps the port while connections are refused
        self._listener: socket.socket | None = None
        self._lock = threading.RLock()
        self._loop = asyncio.new_event_loop()
        self._line = Line(self._loop)
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"relay {self.port}", daemon=True)
        self._thread.start()
        try:
            self.refuse(False)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to connect to instead of the target's."""
        host, port = self._place.getsockname()[:2]
        return host, port

    @property
    def port(self) -> int:
        return self.address[1]

    @property
    def open_connections(self) -> int:
        return len(self._line.links)

    @property
    def counters(self) -> Counters:
        """What it has seen so far. Every byte that has arrived somewhere is counted."""
        with self._lock:
            counters = self._line.counters
            seen: Counters = replace(counters) if self._loop.is_closed() else self._do(replace, counters)
            return seen

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Resets what is open and stops listening; no thread and no descriptor is left. Idempotent."""
        with self._lock:
            if self._loop.is_closed():
                return
            self._do(self._stop_listening)
            self._do(self._line.reset)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(ANSWER_S)
            self._loop.close()
            self._place.close()

    # Faults

    def cut(self) -> None:
        """Resets (RST) both sides of all connections. What was under way is lost; new connections are served."""
        self._do(self._cut)

    def cut_after(self, nbytes: int, direction: Direction = "forward", *, once: bool = True) -> None:
        """Cuts a connection when `nbytes` more have passed over it; none after them arrives.

        With `once`, the first connection that gets there; otherwise each one does, new ones too.
        """
        _at_least(1, nbytes)
        self._do(self._line.arm, Mark(direction, "cut", lambda: repeat(nbytes), once))

    def refuse(self, refused: bool = True) -> None:
        """Whether new connections are refused (ECONNREFUSED). Those there are go on."""
        self._do(self._stop_listening if refused else self._start_listening)

    def stall(self, direction: Direction | None = None) -> None:
        """Not a byte passes any more, nor the end of a stream; all connections stay open."""
        self._change(self._line.stalled.update, _each(direction))

    def resume(self, direction: Direction | None = None) -> None:
        """Ends `stall`: what was held passes, and nothing is lost."""
        self._change(self._line.stalled.difference_update, _each(direction))

    def delay(self, seconds: float, direction: Direction | None = None) -> None:
        """What comes in from now on leaves that much later, in order. With both directions, a round trip takes twice that.

        A connection then carries no more than 4 MiB per `seconds`. `delay(0)` ends it.
        """
        self._change(self._line.delays.update, dict.fromkeys(_each(direction), seconds))

    def dribble(self, nbytes: int, every_s: float = 0.0, direction: Direction | None = None) -> None:
        """Passes on no more than `nbytes` with each write, and one write in `every_s`. Only `heal` ends it."""
        _at_least(1, nbytes)
        self._change(self._line.dribbles.update, dict.fromkeys(_each(direction), (min(nbytes, CAPACITY), every_s)))

    def corrupt(self, nbytes: int, direction: Direction | None = None, *, seed: int = 0) -> None:
        """Flips a bit in one of about `nbytes`, and in at least one of any `2 * nbytes`.

        The places are drawn from `seed`, the same in every connection.
        """
        _at_least(1, nbytes)
        for way in _each(direction):
            self._do(self._line.arm, Mark(way, "flip", lambda: _drawn(2 * nbytes, seed), False))

    def corrupt_once(self, at: int, direction: Direction = "forward") -> None:
        """Flips a bit of the byte that comes after `at` more bytes, in the first connection that gets there."""
        _at_least(0, at)
        self._do(self._line.arm, Mark(direction, "flip", lambda: repeat(at), True))

    def heal(self) -> None:
        """Ends all faults. What is cut stays cut, what is flipped stays flipped."""
        self._change(self._line.heal)
        self.refuse(False)

    # How they get into the relay's thread, and what runs there

    def _do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs it there, and returns what it has returned."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(function(*arguments))
            except Exception as error:
                done.set_exception(error)

        with self._lock:  # so that nobody waits for a loop that is being closed
            self._loop.call_soon_threadsafe(run)
            return done.result(ANSWER_S)

    def _change(self, function: Callable[..., object], *arguments: Any) -> None:
        def run() -> None:
            function(*arguments)
            self._line.go_on()

        self._do(run)

    def _cut(self) -> None:
        self._line.counters.cuts += len(self._line.links)
        self._line.reset()

    def _start_listening(self) -> None:
        if self._listener is None:
            listener = _bound(self._place.family, self._place.getsockname())
            listener.listen(128)
            listener.setblocking(False)
            self._loop.add_reader(listener, self._accept)
            self._listener = listener

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(OSError):  # who knocked may be gone
            client, _ = self._listener.accept()
            self._line.counters.connections += 1
            Link(self._line, client, *self._target)


def strike(relay: Relay, kind: str, chance: random.Random, nbytes: int) -> None:
    """A fault of that kind in the middle of traffic of about `nbytes`; `heal` ends it.

    Kinds: `cut`, `cut after`, `cuts`, `stall`, `delay`, `dribble`, `refuse`, `corrupt`. Raises: ValueError: it is none.
    """
    way: Direction = chance.choice(BOTH)
    if kind == "cut":
        relay.cut()
    elif kind == "cut after":
        relay.cut_after(chance.choice((1, 100, 1 + chance.randrange(nbytes))), way)
    elif kind == "cuts":
        relay.cut_after(chance.randrange(nbytes // 8 + 1, nbytes + 2), way, once=False)
    elif kind == "stall":
        relay.stall(chance.choice((way, None)))
    elif kind == "delay":
        relay.delay(chance.random() * 0.1)
    elif kind == "dribble":
        relay.dribble(chance.randrange(1 << 10, 256 << 10), 0.001)
    elif kind == "refuse":
        relay.refuse()
        relay.cut()
    elif kind == "corrupt":
        relay.corrupt(chance.choice((100, 10 << 10, 1 << 20)), way, seed=chance.randrange(1 << 30))
    else:
        raise ValueError(f"there is no fault {kind!r}")


def _resolve(host: str, port: int) -> tuple[int, Any]:
    """Family and address for a socket of TCP."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, address


def _bound(family: int, address: Any) -> socket.socket:
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _each(direction: Direction | None) -> tuple[Direction, ...]:
    return BOTH if direction is None else (direction,)


def _drawn(below: int, seed: int) -> Iterator[int]:
    draw = random.Random(seed)
    while True:
        yield draw.randrange(below)


def _at_least(least: int, value: int) -> None:
    if value < least:
        raise ValueError(f"{value} is less than {least}")
