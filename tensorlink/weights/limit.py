"""When a pull has to end."""

from __future__ import annotations

import time
from collections.abc import Callable

from tensorlink import _core
from tensorlink.errors import TransferCancelledError, TransferTimeoutError

FOREVER = -1.0
SLICE_S = 0.05
"""A wait looks this often whether it was cancelled, or the publisher closed."""


class Limit:
    """When an operation has to end: its deadline, its stop flag, or because its endpoint is closed."""

    def __init__(self, timeout: float | None, stop: _core.Stop | None, alive: Callable[[], None]) -> None:
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._alive = alive
        self.stop = stop

    def left(self) -> float:
        """Seconds; negative: without end."""
        return FOREVER if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def over(self) -> bool:
        return self.left() == 0

    def slice(self, most: float = SLICE_S) -> float:
        """How long to wait before looking at `check` again."""
        left = self.left()
        return most if left < 0 else min(left, most)

    def check_stop(self) -> None:
        """Raises: TransferCancelledError."""
        if self.stop is not None and self.stop.is_set():
            raise TransferCancelledError("the pull was cancelled", phase="pull")

    def check(self, late: Callable[[], str]) -> None:
        """Raises: TransferTimeoutError with the text of `late()`, TransferCancelledError, ClosedError."""
        self.check_stop()
        self._alive()
        if self.over():
            raise TransferTimeoutError(late(), waited=_core.waited(), phase="pull")
