"""Daemon threads that serve calls. The standard pool's threads are joined at interpreter exit, where one that waits
for a peer would keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonPool(Executor):
    """Starts a thread whenever none is idle, up to `limit`; more work waits."""

    def __init__(self, name: str, limit: int = 256) -> None:
        self._name = name
        self._limit = limit
        self._work: SimpleQueue[Callable[[], Callable[[], None]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs `fn` on one of the threads. Raises: RuntimeError: the pool was shut down."""
        future: Future[T] = Future()

        def run() -> Callable[[], None]:
            if not future.set_running_or_notify_cancel():
                return lambda: None
            try:
                return partial(future.set_result, fn(*args, **kwargs))
            except BaseException as error:
                return partial(future.set_exception, error)

        with self._lock:
            if self._closed:
                raise RuntimeError("the pool was shut down")
            self._work.put(run)
            if self._idle > 0:
                self._idle -= 1  # it is promised to this piece of work
            elif self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._serve, name=f"{self._name}-{self._threads}", daemon=True).start()
        return future

    def _serve(self) -> None:
        while (run := self._work.get()) is not None:
            answer = run()
            with self._lock:
                if self._work.empty():
                    self._idle += 1  # before the answer, so that who has it finds an idle thread for what comes next
                closed = self._closed
            answer()
            del run, answer  # neither the work nor its result outlives it here
            if closed:
                return

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends idle threads now and busy ones after their work. Never waits for them."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._threads):
                    self._work.put(None)
