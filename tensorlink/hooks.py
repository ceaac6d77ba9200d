"""Callbacks for what happens to peers and transfers."""

from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

log = logging.getLogger("tensorlink")

EVENTS = ("peer_up", "peer_down", "peer_restart", "transfer_failed")


class Hooks:
    """Runs callbacks in the order of the events, on one daemon thread of its own; one that raises is logged."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callable[..., None]]] = defaultdict(list)
        self._events: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def on(self, event: str, callback: Callable[..., None]) -> Callable[[], None]:
        """Calls `callback` at each event from now on; the returned function ends that.

        Raises: ValueError: there is no such event.
        """
        if event not in EVENTS:
            raise ValueError(f"no event {event!r}; there are: {', '.join(EVENTS)}")
        with self._lock:
            self._callbacks[event].append(callback)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tensorlink-hooks", daemon=True)
                self._thread.start()

        def unsubscribe() -> None:
            with self._lock:
                if callback in self._callbacks[event]:
                    self._callbacks[event].remove(callback)

        return unsubscribe

    def fire(self, event: str, *arguments: Any) -> None:
        """Queues an event. Doesn't block."""
        if self._callbacks[event]:
            self._events.put((event, arguments))

    def close(self) -> None:
        """Ends the thread once it has run what is queued, within a second. May be called from a callback."""
        thread = self._thread
        if thread is not None:
            self._events.put(None)
            if thread is not threading.current_thread():
                thread.join(1.0)

    def _run(self) -> None:
        while (item := self._events.get()) is not None:
            event, arguments = item
            with self._lock:
                callbacks = list(self._callbacks[event])
            for callback in callbacks:
                try:
                    callback(*arguments)
                except BaseException:  # one that exits too: the others go on
                    log.exception("a %s hook failed", event)
