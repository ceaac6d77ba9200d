"""Where the peers of a job meet when something runs its processes already: Ray, torchrun, or what a plugin knows.

Plugins are found by the entry points `tensorlink.rendezvous`. Each names a function that takes whether the user asked for this
plugin by name, and returns a `Rendezvous` if this process runs in such an environment, else None. It is called by every
`init`, so it looks at the environment and imports nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points

from tensorlink.errors import ClosedError, PeerLostError, TensorLinkError, TransferTimeoutError
from tensorlink.settings import NO_RENDEZVOUS, Settings

log = logging.getLogger("tensorlink")

GROUP = "tensorlink.rendezvous"
_BACKOFF_S = (0.02, 0.5)


@dataclass(frozen=True)
class Place:
    """Where the coordinator is just now."""

    coordinator: str
    """As the setting `coordinator`."""
    token: str | None = field(default=None, repr=False)
    """What it asks for; None: nothing, or what the settings have."""


class Rendezvous(ABC):
    """What one environment tells a process that runs in it. One for each endpoint, which closes it."""

    name: str
    """Of the entry point, and so of the setting `rendezvous`."""
    precedence: int = 0
    """Where a process runs in several at once, the highest counts."""

    def __init__(self, peer_name: str, labels: Mapping[str, str] | None = None) -> None:
        self.peer_name = peer_name
        """What this process is called where the user gives it no name: the same after a restart, and for each `init`."""
        self.labels = dict(labels or {})
        """What is known of where it runs; the setting `labels` adds to it, and wins."""
        self.used = False
        """Whether the coordinator is looked for here, as none was named."""
        self._closed = threading.Event()

    def complete(self, settings: Settings) -> Settings:
        """Those of an endpoint that joins here: what the user set stays. Blocks until there is a coordinator, up to the
        setting `timeout`. Raises: as `find`."""
        settings = replace(settings, labels={**self.labels, **settings.labels})
        if settings.coordinator is not None:
            log.info("in %s, and its coordinator is the one that was named, %s", self.name, settings.coordinator)
            return settings
        self.used = True
        place = self.find(settings, settings.timeout)
        log.info("the rendezvous is %s: its coordinator is at %s", self.name, place.coordinator)
        return replace(settings, coordinator=place.coordinator, token=settings.token or place.token)

    @abstractmethod
    def look(self, settings: Settings, timeout: float) -> Place:
        """Where the coordinator is now; starts one, by these settings, if that is this process's part. Blocks up to `timeout`
        seconds, on any thread. `settings.token` is the one to use if there is one: of the user, or from an earlier look.

        Raises: PeerLostError, TransferTimeoutError: there is none yet, so ask again; ClosedError: the environment has ended, and
        there will be none any more.
        """

    def find(self, settings: Settings, timeout: float) -> Place:
        """Looks until there is one, up to `timeout` seconds. May be called from any thread, again and again: the place changes.

        Raises: as `look`; ClosedError: `close` was called.
        """
        deadline = time.monotonic() + timeout
        backoff, most = _BACKOFF_S
        while not self._closed.is_set():
            try:
                return self.look(settings, max(deadline - time.monotonic(), 0.1))
            except (PeerLostError, TransferTimeoutError) as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._told(error) from error.__cause__
            self._closed.wait(min(backoff, left))
            backoff = min(2 * backoff, most)
        raise ClosedError("the endpoint is closed", phase="join")

    def _told(self, error: TensorLinkError) -> TensorLinkError:
        error.hint = error.hint or f"TENSORLINK_RENDEZVOUS={NO_RENDEZVOUS} lets peers meet outside of {self.name}"
        return error

    def close(self) -> None:
        """Ends waits in other threads. What it started stays until its last peer has gone. Idempotent, doesn't block."""
        self._closed.set()


Detect = Callable[[bool], Rendezvous | None]


def detect(asked: str | None) -> Rendezvous | None:
    """That of the environment in which this process runs. `asked` is the setting `rendezvous`: the name of one, `none`, or
    None for the one that is there, if any. Doesn't block.

    Raises: ValueError: the one that is asked for isn't installed, or isn't there.
    """
    if asked == NO_RENDEZVOUS:
        return None
    points = {point.name: point for point in entry_points(group=GROUP)}
    if asked is None:
        found = [there for point in points.values() if (there := _try(point)) is not None]
        return max(found, key=lambda there: there.precedence, default=None)
    if asked not in points:
        known = ", ".join(sorted([*points, NO_RENDEZVOUS]))
        raise ValueError(f"TENSORLINK_RENDEZVOUS: no rendezvous {asked!r} is installed; there are: {known}")
    there = _load(points[asked])(True)
    if there is None:
        raise ValueError(f"TENSORLINK_RENDEZVOUS: this process doesn't run in {asked}")
    return there


def _try(point: EntryPoint) -> Rendezvous | None:
    """One that nobody asked for may not keep a process from joining."""
    try:
        return _load(point)(False)
    except Exception as error:
        log.warning("rendezvous %s cannot be used: %s", point.name, error)
        return None


def _load(point: EntryPoint) -> Detect:
    function: Detect = point.load()
    return function
