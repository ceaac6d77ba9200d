"""Rounds, medians and rows.

Contenders take turns (A B C, A B C, ...), so that what else the machine does meets them alike; a ratio is the median of
the ratios of the rounds, which forgives a host that is faster at one time than at another.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

OURS = "tensorlink"
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "7"))


@dataclass(frozen=True)
class Row:
    """One line of the table. `ratio` is ours to theirs in the sense in which more is better, unless `at_most` is set."""

    group: str
    what: str
    figure: float
    unit: str
    against: str
    reference: float
    ratio: float
    target: float | None
    """What the ratio must reach; None: for orientation only."""
    at_most: bool = False
    """The ratio is a share, and must stay below the target."""

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


class Race:
    """Contenders that take turns. Each entry is a function that measures once and returns one figure."""

    def __init__(self, benchmark: BenchmarkFixture, group: str, unit: str) -> None:
        self._benchmark = benchmark
        self._group = group
        self._unit = unit
        self._entries: dict[str, Callable[[], float]] = {}
        self.figures: dict[str, list[float]] = {}
        benchmark.group = group
        benchmark.extra_info.update(unit=unit, figures=self.figures, rows=[], notes=[])

    def enter(self, name: str, measure: Callable[[], float]) -> None:
        self._entries[name] = measure
        self.figures[name] = []

    def run(self, rounds: int) -> None:
        """pytest-benchmark times our own turn; the others' come in the set-up of each of its rounds."""
        for measure in self._entries.values():  # warm-up
            measure()

        def others() -> None:
            for name in self._entries:
                if name != OURS:
                    self._turn(name)

        self._benchmark.pedantic(self._turn, args=(OURS,), setup=others, rounds=rounds, iterations=1)  # type: ignore[no-untyped-call]

    def _turn(self, name: str) -> None:
        self.figures[name].append(self._entries[name]())

    def median(self, name: str) -> float:
        return statistics.median(self.figures[name])

    def versus(
        self, against: str, *, what: str, target: float | None = None, ours: str = OURS, at_most: bool = False
    ) -> Row:
        """A row that compares two entries. Figures are times, so more is better in `theirs / ours`."""
        pairs = zip(self.figures[ours], self.figures[against], strict=True)
        ratio = statistics.median(a / b if at_most else b / a for a, b in pairs)
        return self.add(
            Row(self._group, what, self.median(ours), self._unit, against, self.median(against), ratio, target, at_most)
        )

    def limit(self, name: str, limit: float, *, what: str, unit: str | None = None, target: float | None = 1.0) -> Row:
        """A row that compares an entry with a fixed figure that it must not exceed."""
        figure = self.median(name)
        return self.add(
            Row(self._group, what, figure, unit or self._unit, "limit", limit, figure / limit, target, True)
        )

    def rate(self, name: str, nbytes: int, *, what: str) -> Row:
        """A row that says how many bytes a second an entry moves; its figures are milliseconds."""
        figure = nbytes / self.median(name) / 1e6
        return self.add(Row(self._group, what, figure, "GB/s", "1 GB/s", 1.0, figure, None))

    def note(self, text: str) -> None:
        """Something that the reader of the table should know, such as who couldn't take part."""
        self._benchmark.extra_info["notes"].append(text)

    def add(self, row: Row) -> Row:
        self._benchmark.extra_info["rows"].append({**asdict(row), "met": row.met})
        return row


def each(action: Callable[[], Any], count: int, after: Callable[[], Any] | None = None) -> float:
    """Median seconds of `action`, over `count` calls after a first one that isn't counted. `after` runs untimed."""
    times = []
    for _ in range(count + 1):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
        if after is not None:
            after()
    return statistics.median(times[1:])
