"""What a choice looks like: a table in plain words, or JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tensorlink.paths.model import Candidate, Hop


@dataclass(frozen=True)
class PathReport:
    """Every path to a peer for so many bytes, and which is taken. `str()` is a table."""

    peer: str
    nbytes: int
    candidates: tuple[Candidate, ...]
    """The chosen one first, then by predicted time, then those that are not usable, by name."""
    chosen: Candidate | None = None
    """None: no transport is usable."""
    used: str | None = None
    """The transport of the connection that stands; None: there is none."""

    columns: ClassVar[tuple[str, ...]] = ("", "transport", "predicted", "latency", "bandwidth", "way", "why not")

    def __str__(self) -> str:
        rows = [self.columns, *self.rows()]
        wide = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip() for row in rows]
        return "\n".join((self.headline(), *lines))

    def headline(self) -> str:
        """The answer in one line: `trainer, 1.0 MiB: shm, 54.4 µs predicted; connected by shm`."""
        found = "no path"
        if self.chosen is not None and self.chosen.seconds is not None:
            found = f"{self.chosen.transport}, {duration(self.chosen.seconds)} predicted"
        connected = f"connected by {self.used}" if self.used else "not connected"
        if self.used and self.chosen is not None and self.chosen.transport != self.used:
            connected += ", which stays while it works: connections are chosen for 1 MiB"
        return f"{self.peer or 'peer'}, {size(self.nbytes)}: {found}; {connected}"

    def rows(self) -> list[tuple[str, ...]]:
        """A row a candidate, with the cells that `columns` names."""
        return [
            (
                "*" if candidate is self.chosen else "",
                candidate.transport,
                duration(candidate.seconds) if candidate.seconds is not None else "-",
                duration(candidate.latency_s) if candidate.latency_s is not None else "-",
                _rate(candidate),
                _way(candidate.hops),
                candidate.reason,
            )
            for candidate in self.candidates
        ]

    def to_json(self) -> dict[str, Any]:
        """All of it in dicts, lists, text, numbers and None; `chosen` is the name of the transport. A hop's class has the key
        `class`."""
        plain = dataclasses.asdict(self)
        plain["chosen"] = self.chosen.transport if self.chosen is not None else None
        plain["candidates"] = [{**row, "hops": list(map(_renamed, row["hops"]))} for row in plain["candidates"]]
        return plain


def _renamed(hop: dict[str, Any]) -> dict[str, Any]:
    return {("class" if key == "link_class" else key): hop[key] for key in hop}


def _rate(candidate: Candidate) -> str:
    if candidate.bytes_per_s is None:
        return "-"
    source = "declared" if candidate.measured is None else f"measured, {candidate.measured.samples} times"
    return f"{candidate.bytes_per_s / 1e9:.3g} GB/s {source}"


def _way(hops: Sequence[Hop]) -> str:
    return ", ".join(f"{hop.what} ({hop.link_class})" if hop.link_class else hop.what for hop in hops)


def duration(seconds: float) -> str:
    """A time for people: `54.4 µs`, `5.2 ms`, `120 s`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return _number(seconds / scale) + " " + unit
    return f"{seconds * 1e9:.3g} ns"


def size(nbytes: int) -> str:
    """A number of bytes for people: `64 bytes`, `1.0 MiB`."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return _number(nbytes / scale) + " " + unit
    return f"{nbytes} bytes"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
