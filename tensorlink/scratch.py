"""Scratch objects: what a peer reads that measures the way to this process, with no help of the application here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensorlink.errors import PoolExhaustedError
from tensorlink.hooks import Hooks
from tensorlink.types import PeerId, PeerInfo, TensorRef

MOST_NBYTES = 256 << 20
MOST_CALLERS = 4
_SHARE = 4  # one part in so many of what the application leaves free
_TTL_S = 60.0


@dataclass(frozen=True)
class _Given:
    caller: PeerId
    ref: TensorRef
    until: float


class Scratch:
    """Zeros in the pool, one object for each caller, few and bounded in all. Thread-safe; blocks to copy, never for room.

    Who calls is known by a name that it gives itself, so what many names can have is bounded by what is counted for all.
    An object ends when its caller asks again or leaves, and after a minute in any case.
    """

    def __init__(self, put: Callable[..., TensorRef], usage: Callable[[], dict[str, Any]], hooks: Hooks) -> None:
        self._put = put
        self._usage = usage
        self._hooks = hooks
        self._given: dict[str, _Given] = {}
        self._lock = threading.Lock()
        self._listens = False

    def give(self, caller: PeerId, nbytes: int) -> bytes:
        """The handle of an object of that size, or of what there is room for; nothing for 0. What the caller had is released.

        Raises: PoolExhaustedError: there is no room at all, or too many others have one.
        """
        with self._lock:
            self._release(caller.name)
            for name in [name for name, given in self._given.items() if given.until < time.monotonic()]:
                self._release(name)
            if nbytes == 0:
                return b""
            if len(self._given) >= MOST_CALLERS:
                raise PoolExhaustedError(
                    f"{', '.join(self._given)} measure the ways to this peer already", hint="Wait until one has ended"
                )
            size = min(nbytes, MOST_NBYTES, self._room())
            if size <= 0:
                raise PoolExhaustedError("there is no room in the pool for anything to measure with")
            # What a block held before is nobody's business. No patience: the application needs the room more.
            ref = self._put(np.zeros(size, np.uint8), True, None, _TTL_S, False, 0.0)
            self._given[caller.name] = _Given(caller, ref, time.monotonic() + _TTL_S)
            self._listen()
            return ref.to_bytes()

    def _room(self) -> int:
        pool, mine = self._usage(), sum(given.ref.nbytes for given in self._given.values())
        return int((pool["budget_bytes"] - pool["used_bytes"] + mine) // _SHARE - mine)

    def _release(self, name: str) -> None:
        given = self._given.pop(name, None)
        if given is not None:
            given.ref.release()

    def _listen(self) -> None:
        """From the first object on: most endpoints never have one, and need no thread for that."""
        if not self._listens:
            self._listens = True
            self._hooks.on("peer_down", self._left)

    def _left(self, peer: PeerInfo, reason: str) -> None:
        with self._lock:
            given = self._given.get(peer.name)
            if given is not None and given.caller.incarnation <= peer.incarnation:
                self._release(peer.name)
