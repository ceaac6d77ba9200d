"""What a file of the flight recorder says.

The engine writes it (`csrc/flight.h` says how it is laid out). Nothing in it is trusted: it may be of another version, torn by
the death of its writer, or no such file at all.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tensorlink.errors import CorruptTransferError

MAX_NBYTES = 256 << 10
NAME = re.compile(r"flight-(\d{1,10})-[0-9a-f]{8}")
_MAGIC = b"TLFLIGHT"
_VERSION = 1
_HEADER = struct.Struct("<8s6IQqqQQqQQQ40s808s")
_RECORD = struct.Struct("<QqqQQQII12s20s8s16s48s96s")
_UNWHOLE = (b"\0" * 8, b"\xff" * 8)  # the numbers of a record that is empty, and of one that was being written
_MAX_NS = 1 << 62

# What each phase waits for, and how it goes on before a name or tag and before the peer.
_PHASES = {
    "message": "a message",
    "bytes": "bytes",
    "taking": "the taking of bytes",
    "answer": "an answer",
    "stream": "a stream",
    "handshake": "the handshake",
    "mapping": "the memory",
    "room": "room in the pool",
    "credit": "room in the inbox",
    "version": "a version",
    "copy": "the copy",
    "hello": "the hello",
    "name": "the joining",
    "publisher": "a publisher",
    "work": "the end of what was begun",
    "coordinator": "the coordinator",
}
_NAMED = {"message": "with tag", "version": "of", "publisher": "of", "credit": "for tag", "handshake": "at"}
_WHOSE = {"bytes": "from", "copy": "from", "taking": "by", "stream": "to", "room": "held by"}


@dataclass(frozen=True)
class Record:
    """Something in flight, or an event. Times are of CLOCK_MONOTONIC, in seconds."""

    number: int
    began: float
    news: float | None
    """Something in flight: when the peer was last heard of, or a byte moved; an event: when it happened."""
    done: int
    total: int
    """Bytes; 0: they aren't known, or there are none."""
    incarnation: int
    thread: int
    failed: bool
    what: str
    outcome: str
    transport: str
    phase: str
    peer: str
    note: str

    @property
    def progress(self) -> str:
        """Such as `12.0 of 64.0 MiB`; empty where no bytes are to move."""
        return _bytes(self.done, self.total) if self.total else ""

    @property
    def wanted(self) -> str:
        """What it waits for, such as `a message with tag 'x'`."""
        note = f" {_NAMED.get(self.phase, '')} {self.note!r}".replace("  ", " ") if self.note else ""
        return f"{_PHASES.get(self.phase, self.phase)}{note}".strip()

    def told(self, now: float) -> str:
        """At the time `now`: `waited 5.0 s for bytes from 'b' over tcp: 12.0 of 64.0 MiB; last news 4.9 s ago`."""
        whom = f" {_WHOSE.get(self.phase, 'of')} '{self.peer}'" if self.peer else ""
        over = f" over {self.transport}" if self.transport else ""
        progress = f": {self.progress}" if self.progress else ""
        news = f"; last news {duration(now - self.news)} ago" if self.news is not None else ""
        return f"waited {duration(now - self.began)} for {self.wanted}{whom}{over}{progress}{news}"


@dataclass(frozen=True)
class Flight:
    """One file: an endpoint, and what it did."""

    path: Path
    pid: int
    name: str
    incarnation: int
    alive: bool
    """Whether its process is there. By pid and start time, so a later process with that pid is not taken for it."""
    left: bool
    """It had shut down."""
    now: float
    """The last moment that it can tell of: of a process that has ended, its last sign of life."""
    beat: float
    """When its progress thread last ran: one that is well does so every second."""
    wall: float
    """Add it to a time to get seconds since the epoch."""
    failures: int
    operations: tuple[Record, ...]
    """What is, or was, in flight; the oldest first."""
    events: tuple[Record, ...]
    """The oldest first."""

    @property
    def state(self) -> str:
        """`alive`, `silent` (its process is there and its progress thread did not run for a while), `left`, `died`."""
        if self.left:
            return "left"
        if not self.alive:
            return "died"
        return "silent" if self.now - self.beat > 3 else "alive"


def read(path: Path) -> Flight:
    """What a file says, as of now. Its process may be writing: what isn't whole is left out.

    Raises: CorruptTransferError: it is no flight file; OSError: it cannot be read.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CorruptTransferError(f"{path} is no flight file")
        first = os.pread(file.fileno(), MAX_NBYTES + 1, 0)
        second = os.pread(file.fileno(), MAX_NBYTES + 1, 0)
    return parse(first, second, path)


def parse(first: bytes, second: bytes, path: Path) -> Flight:
    """What a file says that was read twice: a record counts if nobody began to write it in between.

    Raises: CorruptTransferError: it is no flight file.
    """
    head = _Header.of(first, len(first), path)
    if len(second) != len(first):
        raise CorruptTransferError(f"{path} is no flight file: it changes its size")
    at, size = head.header_size, head.record_size
    operations = [*_records(first, second, at, head.operations, size)]
    ring = [*_records(first, second, at + head.operations * size, head.events, size)]
    slots = [(slot, record) for slot, record in ring if (record.number - 1) % head.events == slot]
    events = [record for _, record in slots if head.next - head.events < record.number <= head.next]
    alive = _runs(head.pid, head.start_ticks, head.boot)
    times = [head.alive, *(event.news or 0.0 for event in events), *(row.news or 0.0 for _, row in operations)]
    return Flight(
        path=path,
        pid=head.pid,
        name=head.name,
        incarnation=head.incarnation,
        alive=alive,
        left=head.closed,
        now=time.monotonic() if alive else max(times),
        beat=head.alive,
        wall=head.made_real - head.made,
        failures=head.failures,
        operations=tuple(sorted((record for _, record in operations), key=lambda record: record.began)),
        events=tuple(sorted(events, key=lambda record: record.number)),
    )


@dataclass(frozen=True)
class _Header:
    header_size: int
    record_size: int
    operations: int
    events: int
    pid: int
    start_ticks: int
    made_real: float
    made: float
    incarnation: int
    next: int
    alive: float
    failures: int
    closed: bool
    boot: str
    name: str

    @classmethod
    def of(cls, data: bytes, size: int, path: Path) -> _Header:
        """That of a file of this size which begins with `data`. Raises: CorruptTransferError: it has none that can be."""

        def refuse(why: str) -> CorruptTransferError:
            return CorruptTransferError(f"{path} is no flight file: {why}")

        if len(data) < _HEADER.size:
            raise refuse("it is too short")
        (magic, version, header_size, record_size, operations, events, pid, ticks, made_real, made, *rest) = (
            _HEADER.unpack_from(data)
        )
        incarnation, next_event, alive, failures, _, closed, boot, name = rest
        if magic != _MAGIC:
            raise refuse("its first bytes are others")
        if version != _VERSION:
            raise CorruptTransferError(f"{path} is a flight file of version {version}, and this reads {_VERSION}")
        whole = header_size + (operations + events) * record_size
        if header_size < _HEADER.size or record_size != _RECORD.size or not events or whole != size:
            raise refuse("its sizes do not add up")
        if not 0 < pid < 1 << 31 or not all(0 <= at < _MAX_NS for at in (made_real, made, alive)):
            raise refuse("its times or its pid cannot be")
        return cls(
            header_size,
            record_size,
            operations,
            events,
            pid,
            ticks,
            made_real / 1e9,
            made / 1e9,
            incarnation,
            next_event,
            alive / 1e9,
            failures,
            bool(closed),
            _text(boot),
            _text(name),
        )


def _records(first: bytes, second: bytes, at: int, count: int, size: int) -> Iterator[tuple[int, Record]]:
    for slot in range(count):
        offset = at + slot * size
        number = first[offset : offset + 8]
        whole = number == second[offset : offset + 8] and number not in _UNWHOLE
        if whole and (record := _record(first, offset)):
            yield slot, record


def _record(data: bytes, offset: int = 0) -> Record | None:
    """The record there; None: that cannot be one."""
    number, began, news, done, total, incarnation, thread, failed, *words = _RECORD.unpack_from(data, offset)
    if not 0 < began < _MAX_NS or not 0 <= news < _MAX_NS:
        return None
    what, outcome, transport, phase, peer, note = map(_text, words)
    return Record(
        number,
        began / 1e9,
        news / 1e9 if news else None,
        done,
        total,
        incarnation,
        thread,
        bool(failed),
        what,
        outcome,
        transport,
        phase,
        peer,
        note,
    )


def _text(field: bytes) -> str:
    """What a field says; never anything that a terminal would obey."""
    text, end, _ = field.partition(b"\0")
    words = text.decode(errors="replace")
    if not end:  # it filled the field: the rest of it was cut, maybe within a letter
        words = words.rstrip("\ufffd") + "…"
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in words)


def _runs(pid: int, start_ticks: int, boot: str) -> bool:
    try:
        if boot != Path("/proc/sys/kernel/random/boot_id").read_text().strip():
            return False
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return state not in "ZX" and int(fields[18]) == start_ticks
    except (OSError, ValueError, IndexError):
        return False


def circles(flights: Iterable[Flight]) -> list[list[str]]:
    """Names of live endpoints that wait for each other's messages all round, and for nothing else: none of them can go on."""
    waits: dict[str, set[str]] = {}
    for flight in flights:
        if flight.alive and not flight.left and flight.operations:
            whom = {row.peer for row in flight.operations if row.phase in ("message", "credit")}
            if len(whom) == 1 and all(row.phase in ("message", "credit") for row in flight.operations):
                waits[flight.name] = whom
    found: list[list[str]] = []
    for start in sorted(waits):
        chain = [start]
        while (after := next(iter(waits.get(chain[-1], {""})))) not in chain and after in waits:
            chain.append(after)
        if after == start and start == min(chain):
            found.append(chain)
    return found


def over(path: Path) -> bool:
    """Whether its process has ended. Reads no more than the header: hundreds of peers may start at once."""
    with suppress(CorruptTransferError), open(path, "rb") as file:
        head = _Header.of(file.read(_HEADER.size), os.fstat(file.fileno()).st_size, path)
        return not _runs(head.pid, head.start_ticks, head.boot)
    # Between the making of a file and its first word, too, its process is there.
    match = NAME.fullmatch(path.name)
    return match is None or not Path(f"/proc/{match[1]}").exists()


def waited(phase: str, began: float, peer: str, note: str) -> str:
    """The same of something that has no record."""
    record = Record(0, began, None, 0, 0, 0, 0, False, "", "", "", phase, peer, note)
    return record.told(time.monotonic())


def told(record: bytes | None) -> str | None:
    """What a record of this process says, in one sentence."""
    parsed = _record(record) if record else None
    return None if parsed is None else parsed.told(time.monotonic())


def _bytes(done: int, total: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if total >= unit:
            return f"{done / unit:.1f} of {total / unit:.1f} {name}"
    return f"{done} of {total} bytes"


def duration(seconds: float) -> str:
    """Such as `0.3 s`, `4 min`, `3.2 h`."""
    if seconds < 120:
        return f"{max(seconds, 0.0):.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
