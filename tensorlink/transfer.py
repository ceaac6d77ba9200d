"""One operation in flight: awaitable, waitable, cancellable."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from tensorlink import _core, recording
from tensorlink.errors import TransferCancelledError, TransferTimeoutError

_SLICE_S = 0.002
_CANCEL_S = 0.8  # how long a silent peer may keep a cancel waiting
_T = TypeVar("_T")
_DROPPED_S = 2.0
"""A dropped transfer is waited for so long at most: at the end of a process its thread may not run any more."""


class Transfer(ABC):
    """What `isend`, `irecv`, `iget` and `ipull` return.

    Any thread may wait for it, and any number of waiters get the same result.
    """

    @property
    def path(self) -> str:
        """The transport that it is tried by, and once it is done, the one that it went by. Empty: not known yet, or gRPC
        carried it, or it is a receive, which its sender chose the path of."""
        return ""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended, in whatever way. Doesn't block; may do what is left to do."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until it has ended, and returns its result.

        Raises: TransferTimeoutError: `timeout` seconds passed; the transfer itself goes on. What the operation raises.
        """

    @abstractmethod
    def cancel(self) -> bool:
        """Stops it; False: it had ended. Once this returns, nothing more is written to any buffer of the caller."""

    def result(self) -> Any:
        """The result of a transfer that is done. Raises: TransferTimeoutError: it isn't; what the operation raises."""
        return self.wait(0)

    @abstractmethod
    def __await__(self) -> Generator[Any, None, Any]: ...

    def _waited(self, since: float | None = None) -> str | None:
        """What it waits for, in one sentence; where nobody knows since when, since the time `since`."""
        return None

    def _awaited(self) -> None:
        """Somebody waits for it, in more than one call: one with a thread of its own is told of already."""
        return


class InFlight:
    """Counts what was begun and has not ended, at the cost of two appends. Any thread."""

    def __init__(self) -> None:
        marks: deque[None] = deque()
        self._marks = marks
        self.begin = functools.partial(marks.append, None)
        self.end = marks.pop

    def __len__(self) -> int:
        return len(self._marks)

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def around(self, operation: Callable[[_core.Stop], Any]) -> Callable[[_core.Stop], Any]:
        """The operation, which counts from now until it has run."""
        self.begin()

        def run(stop: _core.Stop) -> Any:
            try:
                return operation(stop)
            finally:
                self.end()

        return run


class Used:
    """The transport of an operation, for its transfer's `path`: whoever runs it writes, any thread reads."""

    __slots__ = ("transport",)

    def __init__(self, transport: str = "") -> None:
        self.transport = transport


class Finished(Transfer):
    """One that needed no time: what it gave, or what it raised."""

    def __init__(self, result: Any, path: str, error: BaseException | None = None) -> None:
        self._result = result
        self.error = error
        self._path = path

    @property
    def path(self) -> str:
        return self._path

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> Any:
        if self.error is not None:
            raise self.error
        return self._result

    def cancel(self) -> bool:
        return False

    def __await__(self) -> Generator[Any, None, Any]:
        return self.wait()
        yield


class Background(Transfer):
    """One that runs on a thread of its own, since it may have to wait or to copy much.

    `operation` gets the stop flag, and ends soon after it is set; its transport is what it writes to `used`. A transfer that
    nobody can ask for any more is cancelled, unless `goes_on`.
    """

    def __init__(
        self, operation: Callable[[_core.Stop], Any], used: Used, recorder: _core.Flight, *, goes_on: bool = False
    ) -> None:
        self._used = used
        self._flight = recorder
        self._goes_on = goes_on
        self._work = _Work(operation)

    @property
    def path(self) -> str:
        return self._used.transport

    def done(self) -> bool:
        return self._work.ended.is_set()

    def _waited(self, since: float | None = None) -> str | None:
        return recording.told(self._flight.find(self._work.thread.native_id or 0))

    def wait(self, timeout: float | None = None) -> Any:
        if not self._work.ended.wait(timeout):
            raise TransferTimeoutError("the transfer has not ended", waited=self._waited(), phase="wait")
        if self._work.error is not None:
            raise self._work.error
        return self._work.result

    def cancel(self) -> bool:
        if self.done():
            return False
        self._work.stop.set()
        self._work.ended.wait()
        return isinstance(self._work.error, TransferCancelledError)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            try:
                yield from _event_of(self._work.on_end).__await__()
            except BaseException:  # the task was cancelled, or its loop is over
                self.cancel()
                raise
        return self.wait(0)

    def __del__(self) -> None:
        work: _Work | None = getattr(self, "_work", None)  # None: there was no thread to be had
        if work is not None and not self._goes_on and not work.ended.is_set():
            work.stop.set()
            if threading.current_thread() is not work.thread:
                work.ended.wait(_DROPPED_S)


class _Work:
    """What the thread of a `Background` has of it: not the transfer itself, which may be dropped meanwhile."""

    def __init__(self, operation: Callable[[_core.Stop], Any]) -> None:
        self.stop = _core.Stop()
        self.ended = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self._operation: Callable[[_core.Stop], Any] | None = operation
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []
        self.thread = threading.Thread(target=self._run, name="tensorlink-transfer", daemon=True)
        self.thread.start()

    def on_end(self, wake: Callable[[], None]) -> None:
        """Calls `wake` once it has ended, from whatever thread."""
        with self._lock:
            if not self.ended.is_set():
                self._wakers.append(wake)
                return
        wake()

    def _run(self) -> None:
        assert self._operation is not None
        try:
            self.result = self._operation(self.stop)
        except BaseException as error:  # handed to whoever waits
            self.error = error
        self._operation = None  # it keeps the caller's tensors alive
        with self._lock:
            self.ended.set()
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()


def _event_of(subscribe: Callable[[Callable[[], None]], None]) -> asyncio.Future[None]:
    """A future of the running loop that `subscribe`'s callback resolves, from whatever thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(resolve)

    subscribe(wake)
    return future


class Arrivals:
    """Wakes coroutines that wait for messages, through the engine's event descriptor."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    async def next(self, ready: Callable[[], bool]) -> None:
        """Returns when `ready()` holds; it is asked again after each arrival."""
        loop = asyncio.get_running_loop()
        self._engine.watch(True)
        try:
            while not ready():
                future: asyncio.Future[None] = loop.create_future()
                with self._lock:
                    first = loop not in self._waiting
                    self._waiting.setdefault(loop, []).append(future)
                if first:
                    loop.add_reader(self._engine.event_fd, self._on_event)
                try:
                    if ready():
                        return
                    await future
                finally:
                    self._forget(loop, future)
        finally:
            self._engine.watch(False)

    def _forget(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        with self._lock:
            waiting = self._waiting[loop]
            waiting.remove(future)
            if waiting:
                return
            del self._waiting[loop]
        loop.remove_reader(self._engine.event_fd)

    def _on_event(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._engine.event_fd)
        with self._lock:
            everyone = [(loop, list(futures)) for loop, futures in self._waiting.items()]
        for loop, futures in everyone:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, futures)


def _resolve(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def wait(transfers: Sequence[Transfer], *, timeout: float | None, any: bool = False) -> list[Transfer]:
    """Blocks until all transfers have ended, or one of them with `any=True`; returns those that have.

    Raises: TransferTimeoutError: `timeout` seconds passed before. How each one ended is told by its `result()`.
    """
    began = time.monotonic()
    deadline = None if timeout is None else began + timeout
    while True:
        pending = [transfer for transfer in transfers if not transfer.done()]
        if not pending or (any and len(pending) < len(transfers)):
            return [transfer for transfer in transfers if transfer not in pending]
        pending[0]._awaited()
        left = _SLICE_S if deadline is None else min(deadline - time.monotonic(), _SLICE_S)
        if left <= 0:
            what = f"{len(pending)} of {len(transfers)} transfers have not ended"
            raise TransferTimeoutError(what, waited=pending[0]._waited(began), phase="wait")
        with contextlib.suppress(Exception):
            pending[0].wait(left)


def patiently(attempt: Callable[[float], _T], timeout: float, stop: _core.Stop | None) -> _T:
    """What `attempt(timeout)` gives. With `stop` in several tries, since a cancel must not wait for a peer that is silent.

    Raises: TransferCancelledError; what `attempt` raises.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        if stop is None:
            return attempt(left)
        check_stop(stop)
        try:
            return attempt(min(left, _CANCEL_S))
        except TransferTimeoutError:
            if left <= _CANCEL_S:
                raise


def check_stop(stop: _core.Stop | None) -> None:
    """Raises: TransferCancelledError: `stop` is set."""
    if stop is not None and stop.is_set():
        raise TransferCancelledError("the transfer was cancelled", phase="connect")
