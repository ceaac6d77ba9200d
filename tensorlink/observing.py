"""Reads from other hosts show what a way gives: that refines its figures, and tells of one that gives far too little."""

from __future__ import annotations

import contextlib
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tensorlink import network
from tensorlink.measured import BULK_NBYTES, SMALL_NBYTES, Measured
from tensorlink.types import Figure, Link, PeerId, PeerInfo

log = logging.getLogger("tensorlink")

_EVERY = 64
"""Of small reads one in so many is observed: a way needs few of them, and they are the ones for which time counts."""
_LARGE_NBYTES = 16 << 20
_SEVERAL = 4
_FAR_LESS = 0.25
_MOST_WAYS = 1024


@dataclass
class _Busy:
    """From a bulk read over a transport until none is in progress: reads that overlap share the way, so they count as one."""

    began: float
    hosts: set[str] = field(default_factory=set)
    reading: int = 0
    nbytes: int = 0
    failed: bool = False


class Observing:
    """What is called around reads from other hosts. Thread-safe; never raises, whatever it finds out."""

    def __init__(
        self, measured: Measured, here: str, links: Iterable[Link], known: Callable[[str], PeerInfo | None]
    ) -> None:
        self._measured = measured
        self._here = here
        self._known = known
        self._declared: dict[str, float] = {}
        self._lock = threading.Lock()
        self._busy: dict[str, _Busy] = {}
        self._slow: dict[tuple[str, str], list[float]] = {}
        self._told: set[tuple[str, str]] = set()
        self._small = 0
        for link in links:
            if link.bytes_per_s > self._declared.get(link.transport, 0.0):
                self._declared[link.transport] = link.bytes_per_s
                measured.declare(link.transport, Figure(link.latency_s, link.bytes_per_s))

    def due(self, nbytes: int) -> bool:
        """Whether a read of that size is to be observed: each large one, and now and then a small one. Costs next to nothing."""
        if nbytes >= BULK_NBYTES:
            return True
        if nbytes > SMALL_NBYTES:
            return False
        self._small += 1  # threads may lose one: that is as good
        return self._small % _EVERY == 0

    @contextlib.contextmanager
    def read(self, peer: PeerId, transport: str, nbytes: int, max_bytes_per_s: int) -> Iterator[None]:
        """Around a read. One that fails, or that the peer's own limit holds back, shows nothing of the way."""
        info = self._known(peer.name)
        if max_bytes_per_s or info is None or info.id != peer:
            yield
        elif nbytes < BULK_NBYTES:
            began = time.perf_counter()
            yield
            seconds = time.perf_counter() - began
            if transport not in self._busy:
                self._measured.observe(self._here, info.host, transport, nbytes, seconds)
        else:
            busy = self._begin(transport, info.host)
            failed = True
            try:
                yield
                failed = False
            finally:
                self._end(busy, info, transport, nbytes, failed)

    def _begin(self, transport: str, host: str) -> _Busy:
        with self._lock:
            busy = self._busy.get(transport)
            if busy is None:
                busy = self._busy[transport] = _Busy(time.perf_counter())
            busy.reading += 1
            busy.hosts.add(host)
            return busy

    def _end(self, busy: _Busy, info: PeerInfo, transport: str, nbytes: int, failed: bool) -> None:
        now = time.perf_counter()
        with self._lock:
            busy.reading -= 1
            busy.nbytes += nbytes
            busy.failed |= failed
            if busy.reading:
                return
            del self._busy[transport]
        if busy.failed or len(busy.hosts) > 1:
            return
        seconds = now - busy.began
        self._measured.observe(self._here, info.host, transport, busy.nbytes, seconds)
        if busy.nbytes >= _LARGE_NBYTES:
            self._compare(info, transport, busy.nbytes / seconds)

    def _compare(self, info: PeerInfo, transport: str, rate: float) -> None:
        """Tells, once for each peer and transport, if the last few large reads were all far slower than they should be."""
        way = (info.name, transport)
        if way in self._told:
            return
        with self._lock:
            if rate >= _FAR_LESS * self._declared.get(transport, 0.0):
                self._slow.pop(way, None)
                return
        expected = self._expected(info, transport)
        with self._lock:
            if expected is None or rate >= _FAR_LESS * expected:
                self._slow.pop(way, None)
                return
            if len(self._slow) >= _MOST_WAYS:
                self._slow.clear()
            rates = self._slow.setdefault(way, [])
            rates.append(rate)
            if len(rates) < _SEVERAL or way in self._told:
                return
            if len(self._told) >= _MOST_WAYS:
                self._told.clear()
            self._told.add(way)
            del self._slow[way]
        log.warning(
            "expected %.2g GB/s over %s to %s, got %.2g: the last %d large reads were all that slow, held back by the network "
            "between, its end of it, or what else the hosts do; see `tensorlink doctor %s`",
            *(expected / 1e9, transport, info.name, statistics.median(rates) / 1e9, len(rates), info.name),
        )

    def _expected(self, info: PeerInfo, transport: str) -> float | None:
        """What the transport can do at best, and the interface towards the peer. None: that tells nothing of itself, and then
        the network is what it is."""
        with contextlib.suppress(ValueError):  # the peer gave that address
            host, _ = network.split_address(info.address.rpartition(",")[2])
            speed = network.speed_towards(host) if network.is_ip(host) else None
            return None if speed is None else min(speed, self._declared[transport])
        return None
