"""`rocm-smi --showtopo` and its relatives (`hy-smi`, `amd-smi topology`): one table each of weights, hops and link types."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tensorlink.errors import TopologyError
from tensorlink.topology.classes import UNKNOWN
from tensorlink.topology.graph import Device, Link, Topology
from tensorlink.topology.text import Line, Warnings, lines_of

MAX_GPUS = 512

_TITLES = (  # what a line says that begins a table; the others are of no use here
    ("type", re.compile(r"link\s{0,4}type", re.IGNORECASE)),
    ("weight", re.compile(r"weight", re.IGNORECASE)),
    ("hops", re.compile(r"\bhops\b", re.IGNORECASE)),
    ("other", re.compile(r"\b(access|coherent|atomics|dma|bandwidth|bw|bi-directional)\b|end of", re.IGNORECASE)),
)
_TITLE = re.compile(r"\bbetween two \w{2,8}\b|\bTABLE:\s{0,8}$", re.IGNORECASE)
_BEGIN = re.compile(r"\bSystem Management Interface\b")
_END = re.compile(r"\bEnd of\b.{0,32}\bLog\b")  # what stands below all that began like that
_NAME = re.compile(r"[A-Z]{2,4}\d{1,4}|[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_NUMA = re.compile(
    r"\b([A-Z]{2,4})\s{0,4}\[?\s{0,4}(\d{1,4})\s{0,4}\]?\s{0,32}:.{0,32}?\bNuma (Node|Affinity)\s{0,8}:\s{0,8}(-?\d{1,6}|N/A)",
    re.IGNORECASE,
)
_TYPE = re.compile(r"[A-Z][A-Z0-9_]{0,15}")

Values = dict[tuple[str, str], str]


@dataclass
class _Table:
    kind: str
    columns: list[str] = field(default_factory=list)
    missing: dict[str, None] = field(default_factory=dict)
    """Columns whose row hasn't come, in order."""
    whole: bool = False
    """Whether the last row that came has all its cells."""


@dataclass
class _Tables:
    names: dict[str, None] = field(default_factory=dict)
    values: dict[str, Values] = field(default_factory=dict)
    numa: dict[str, dict[str, int | None]] = field(default_factory=dict)


class _Facts(NamedTuple):
    link_class: str | None = None
    hops: int | None = None
    weight: int | None = None


def recognises(text: str) -> bool:
    """Whether a text looks like one of these."""
    return (
        re.search(r"\bbetween two [A-Z]{2,4}s\b|\(Topology\) Numa|\b(?:WEIGHT|HOPS|LINK TYPE) TABLE:", text) is not None
    )


def read(text: str) -> Topology:
    """The machine that the tables show. Weight and hops of a link are its `weight` and `hops`.

    Raises:
        TopologyError: no table names a GPU, or there are too many, or the text ends before its tables do.
    """
    warnings = Warnings()
    lines = lines_of(text)
    _check_end(lines)
    tables = _tables(lines, warnings)
    if not tables.names:
        raise TopologyError("no table of weights, hops or link types names a GPU", line=lines[-1].number, column=1)
    names = list(tables.names)
    devices = []
    for name in names:
        facts = tables.numa.get(name, {})
        pci = name.lower() if ":" in name else None
        devices.append(
            Device(name=name, kind="gpu", pci=pci, numa_node=facts.get("node"), numa_affinity=facts.get("affinity"))
        )
    links = []
    for index, a in enumerate(names):
        for b in names[index + 1 :]:
            links += _links(a, b, tables.values, warnings)
    return Topology(devices=tuple(devices), links=tuple(links), source="showtopo", warnings=warnings.all())


def _check_end(lines: Sequence[Line]) -> None:
    """Raises: TopologyError: the log of a tool begins and doesn't end."""
    open_since = None
    for line in lines:
        if _END.search(line.text):
            open_since = None
        elif _BEGIN.search(line.text):
            open_since = line.number
    if open_since is not None:
        raise _cut(lines, f"the log that begins in line {open_since} has no line that ends it")


def _cut(lines: Sequence[Line], why: str) -> TopologyError:
    last = next((line for line in reversed(lines) if line.text.strip()), lines[-1])
    return TopologyError(f"{why}: the text seems cut off", line=last.number, column=len(last.text.rstrip()) + 1)


def _tables(lines: Sequence[Line], warnings: Warnings) -> _Tables:
    tables = _Tables()
    table: _Table | None = None
    for line in lines:
        numa = _NUMA.search(line.text)
        if numa:
            name = f"{numa[1].upper()}{int(numa[2])}"
            node = int(numa[4]) if numa[4].isdecimal() else None
            tables.numa.setdefault(name, {})[numa[3].lower()] = node
            tables.names.setdefault(name)
        elif _is_title(line.text):
            _ended(table, line, warnings)
            kind = next((kind for kind, pattern in _TITLES if pattern.search(line.text)), None)
            table = _Table(kind) if kind not in (None, "other") else None
        elif table is not None:
            _row(table, line, tables, warnings)
        if len(tables.names) > MAX_GPUS:
            raise TopologyError(f"a machine has at most {MAX_GPUS} GPUs here", line=line.number, column=1)
    if table is not None and (table.missing or not table.whole):
        missing = ", ".join(list(table.missing)[:4]) or "cells of its last row"
        raise _cut(lines, f"the table of {table.kind} lacks {missing}")
    return tables


def _ended(table: _Table | None, line: Line, warnings: Warnings) -> None:
    """Warns of rows that a table before `line` hasn't: the rows of the others say the same, the other way around."""
    if table is not None and table.missing:
        missing = ", ".join(list(table.missing)[:4])
        warnings.add(f"the table of {table.kind} above has no row {missing}", line.number)


def _row(table: _Table, line: Line, tables: _Tables, warnings: Warnings) -> None:
    """A line of a table: its columns, or a row."""
    words = line.text.split()
    names = [word for word in words if _NAME.fullmatch(word)]
    if len(names) > 1 or (names and len(words) == 1 and not table.columns):
        table.columns, table.whole = names, False
        table.missing = dict.fromkeys(names)
        tables.names.update(dict.fromkeys(names))
    elif names:
        cells = words[words.index(names[0]) + 1 :]
        table.whole = len(cells) >= len(table.columns)
        table.missing.pop(names[0], None)
        _take(table.kind, names[0], cells, table.columns, tables, line, warnings)


def _is_title(text: str) -> bool:
    """`===== Hops between two GPUs =====`, `HOPS TABLE:`, and whatever else stands between lines of `=`."""
    plain = text.strip()
    return _TITLE.search(plain) is not None or (plain.startswith("===") and plain.endswith("==="))


def _take(
    kind: str, name: str, cells: Sequence[str], columns: Sequence[str], tables: _Tables, line: Line, warnings: Warnings
) -> None:
    at = line.text.index(name) + 1
    if name not in columns:
        warnings.add(f"column {at}: the table of {kind} has no column {name}: its row is left out", line.number)
    elif len(cells) != len(columns):
        said = f"column {at}: the row {name} has {len(cells)} of {len(columns)} cells: it is left out"
        warnings.add(said, line.number)
    else:
        values = tables.values.setdefault(kind, {})
        for column, cell in zip(columns, cells, strict=True):
            if column != name:
                values[name, column] = cell


def _links(a: str, b: str, values: Mapping[str, Values], warnings: Warnings) -> list[Link]:
    """The link of two GPUs; two where the rows of both say different things."""
    there, back = _facts(a, b, values, warnings), _facts(b, a, values, warnings)
    if there is None and back is None:
        if values:
            warnings.add(f"nothing is known of {a} to {b}")
        return []
    if there is None or back is None or there == back:
        return [_link(a, b, there or back or _Facts())]
    warnings.add(f"{a} to {b} differs from {b} to {a}: both are kept, each for its direction")
    return [_link(a, b, there), _link(b, a, back)]


def _facts(a: str, b: str, values: Mapping[str, Values], warnings: Warnings) -> _Facts | None:
    """What the row of `a` says, and of what it doesn't say the row of `b`."""
    said = {kind: table.get((a, b), table.get((b, a))) for kind, table in values.items()}
    if all(text is None for text in said.values()):
        return None
    link_class = said.get("type")
    if link_class is not None and (link_class in UNKNOWN or not _TYPE.fullmatch(link_class)):
        if link_class not in UNKNOWN:
            warnings.add(f"{a} to {b}: {link_class[:40]!r} is no link type")
        link_class = None
    return _Facts(link_class, _number(said.get("hops")), _number(said.get("weight")))


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and text.isascii() and len(text) < 7 else None


def _link(a: str, b: str, facts: _Facts) -> Link:
    return Link(a=a, b=b, link_class=facts.link_class, hops=facts.hops, weight=facts.weight)
