"""Latency and bandwidth of the ways to a peer, measured by a peer of a made-up name, which joins and leaves again.

What is read is an object that the other endpoint gives to whoever asks (`tensorlink.scratch`), into memory that is reused, so
each read moves all its bytes; it is what `get(ref, out=...)` does, over one transport after the other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tensorlink.control import Certificates, PeerClient, find_peer, host_identity
from tensorlink.endpoint import Endpoint, open_endpoint
from tensorlink.errors import CorruptTransferError, NoPathError, PoolExhaustedError, TensorLinkError
from tensorlink.links import Links
from tensorlink.measured import BULK_NBYTES, OFF, SMALL_NBYTES, Measured
from tensorlink.scratch import MOST_NBYTES
from tensorlink.settings import Settings
from tensorlink.transports.base import Connection
from tensorlink.types import Figure, PeerInfo, TensorRef

SIZES = (1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20, 256 << 20)
_MOST_READS = 1000


@dataclass(frozen=True)
class Timing:
    """Reads of one size over one transport."""

    transport: str
    nbytes: int
    seconds: float
    """The median."""
    reads: int

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds


@dataclass
class Report:
    """What was measured of the ways to a peer. `missing` says of what wasn't measured why, for people."""

    peer: str
    here: str
    there: str
    max_bytes_per_s: int = 0
    """What the peer's own setting lets one peer on another host have; 0: as fast as it goes."""
    timings: list[Timing] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    broken: bool = False
    """Whether a way failed, or the peer did, while it was measured."""
    limited: set[str] = field(default_factory=set)
    """Transports whose figures are those of that setting rather than of the way."""
    notes: list[str] = field(default_factory=list)

    def of(self, transport: str, nbytes: int) -> Timing | None:
        return next((one for one in self.timings if (one.transport, one.nbytes) == (transport, nbytes)), None)

    def figures(self) -> dict[str, Figure]:
        """By transport; those left out had no small or no large size."""
        found = {}
        for name in dict.fromkeys(one.transport for one in self.timings):
            sizes = sorted((one for one in self.timings if one.transport == name), key=lambda one: one.nbytes)
            small, most = [one.seconds for one in sizes if one.nbytes <= SMALL_NBYTES], sizes[-1]
            if small and most.nbytes >= BULK_NBYTES:
                by_bytes = max(most.seconds - min(small), most.seconds / 2)
                found[name] = Figure(min(small), most.nbytes / by_bytes, sum(one.reads for one in sizes))
        return found

    def save(self, measured: Measured) -> str | None:
        """Keeps the figures of the ways as such. None: they are on disk; else why they aren't."""
        kept = {name: figure for name, figure in self.figures().items() if name not in self.limited}
        if measured.path is None:
            return "TENSORLINK_MEASURED is off"
        if self.broken:
            return "a way broke off"
        if not kept:
            return "it takes sizes up to 16K and from 1M, of a way that nothing limits"
        for name, figure in kept.items():
            measured.put(self.here, self.there, name, figure)
        return None if measured.save() else f"{measured.path} can't be written"


def bench(
    peer: str,
    settings: Settings,
    *,
    sizes: Sequence[int] = SIZES,
    seconds: float = 3.0,
    timeout: float = 5.0,
) -> Report:
    """Measures every transport that reaches the peer, and that the settings allow; blocks for about `seconds` for each.

    A size of which two reads would take longer than `seconds` is left out. Others see a peer come and go meanwhile, and
    the measured one keeps one object of up to 256 MiB in its pool. Starts no coordinator.

    Raises: PeerUnknownError: nobody has joined under that name; NoPathError: no transport could be measured, and the message
    says why of each; what `init` does; ValueError: a size is none.
    """
    if not sizes or any(not 0 < size < 1 << 40 for size in sizes):
        raise ValueError(f"sizes are positive numbers of bytes, not {list(sizes)}")
    info = find_peer(peer, settings, timeout)
    me = f"bench-{os.getpid()}-{secrets.token_hex(3)}"
    with open_endpoint(me, replace(settings, timeout=timeout, flight="off", measured=OFF)) as endpoint:
        client = PeerClient(
            info.address,
            peer=peer,
            me=endpoint.id,
            token=endpoint.settings.token,
            certificates=Certificates.load(endpoint.settings),
        )
        with contextlib.closing(client):
            session = _Session(endpoint, client, info, timeout)
            try:
                return session.run(sorted(set(sizes)), seconds)
            finally:
                session.close()


def expected(before: Sequence[Timing], nbytes: int) -> float:
    """Seconds of a read of that size, by the timings of smaller ones: each byte more as those between the last two sizes.

    One size alone doesn't tell bytes from latency, nor how much was for either.
    """
    if len(before) < 2:
        return before[-1].seconds if before else 0.0
    one, last = before[-2:]
    per_byte = max(0.0, last.seconds - one.seconds) / (last.nbytes - one.nbytes)
    return last.seconds + per_byte * (nbytes - last.nbytes)


class _Session:
    """A connection by each transport, which take turns at each size: what else the machines do meets them alike."""

    def __init__(self, endpoint: Endpoint, client: PeerClient, info: PeerInfo, timeout: float) -> None:
        self._endpoint, self._client, self._info, self._timeout = endpoint, client, info, timeout
        self._connections: dict[str, Connection] = {}
        hello = client.hello({}, timeout)
        self._report = Report(
            info.name, host_identity(), info.host, hello.max_bytes_per_s, missing={**self._links.ways.rejected}
        )
        try:
            self._connect(hello.connect)
        except BaseException:
            self.close()
            raise

    @property
    def _links(self) -> Links:
        return self._endpoint._links

    def _connect(self, addresses: Mapping[str, bytes]) -> None:
        for name, transport in self._links.transports.items():
            try:
                why = "the peer doesn't have it" if name not in addresses else None
                if why := why or transport.reaches(transport.address(), addresses[name]):
                    self._report.missing[name] = why
                    continue
                connection = transport.connect(self._info.id, addresses[name], None, self._timeout)
            except TensorLinkError as error:
                self._report.missing[name] = error.message
                continue
            self._connections[name] = connection
            lane = connection.lane()
            if self._report.max_bytes_per_s and (lane is None or not lane.pid):
                self._report.limited.add(name)

    def run(self, sizes: Sequence[int], seconds: float) -> Report:
        report, share = self._report, seconds / len(sizes)
        due = list(self._connections)
        for nbytes in sizes:
            due = [name for name in due if name in self._connections and self._in_time(name, nbytes, seconds)]
            ref = self._scratch(nbytes) if due else None
            if ref is None:
                break
            out = np.zeros(nbytes, np.uint8)
            for name in due:
                try:
                    report.timings.append(self._time(name, ref, out, share))
                except TensorLinkError as error:
                    report.missing[name], report.broken = error.message, True
                    self._connections.pop(name).close()
        if not report.timings:
            reasons = "; ".join([*report.notes, *(f"{name}: {why}" for name, why in report.missing.items())])
            hint = f"See `tensorlink doctor {self._info.name}`"
            raise NoPathError(f"no way to {self._info.name} could be measured ({reasons})", hint=hint)
        return report

    def _in_time(self, name: str, nbytes: int, seconds: float) -> bool:
        """Whether two reads, the fewest that there are of a size, will end in time, as it looks."""
        if 2 * expected([one for one in self._report.timings if one.transport == name], nbytes) <= seconds:
            return True
        self._report.notes.append(f"{name}: reads of {nbytes} bytes and more would take longer than {seconds:g} s")
        return False

    def _scratch(self, nbytes: int) -> TensorRef | None:
        """Something of that size to read; None: the peer has no room for it."""
        try:
            ref = TensorRef.from_bytes(self._client.scratch(nbytes, self._timeout))
        except TensorLinkError as error:
            if not self._report.timings:
                raise
            self._report.notes.append(
                f"{nbytes} bytes and more weren't to be had from {self._info.name}: {error.message}"
            )
            self._report.broken |= not isinstance(error, PoolExhaustedError)
            return None
        if ref.nbytes < nbytes:
            self._report.notes.append(
                f"{self._info.name} lends {ref.nbytes} bytes at most, so {nbytes} and more weren't measured: "
                f"a quarter of what is free in its pool, and never more than {MOST_NBYTES >> 20} MiB"
            )
            return None
        if ref.nbytes > nbytes or ref.owner != self._info.id:
            raise CorruptTransferError(f"{self._info.name} gave another handle than was asked for")
        return ref

    def _time(self, name: str, ref: TensorRef, out: np.ndarray[tuple[int], np.dtype[np.uint8]], share: float) -> Timing:
        times: list[float] = []
        connection, read = self._connections[name], self._endpoint._objects._read
        read(connection, ref, out, None, self._timeout, None)  # opens the stream, and touches the pages
        began = time.perf_counter()
        while not times or (len(times) < _MOST_READS and time.perf_counter() - began + times[-1] < share):
            start = time.perf_counter()
            read(connection, ref, out, None, self._timeout, None)
            times.append(time.perf_counter() - start)
        return Timing(name, ref.nbytes, statistics.median(times), len(times))

    def close(self) -> None:
        with contextlib.suppress(TensorLinkError):
            self._client.scratch(0, self._timeout)
        for connection in self._connections.values():
            connection.close()
