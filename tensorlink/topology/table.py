"""`nvidia-smi topo -m` and the tables that other vendors' tools print like it.

A row has its own name, an X in its own column, and says of each pair what the other's row says too. What was damaged on
the way is found by that, and filled in from the other row; where the two differ both are kept, each for its direction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tensorlink.errors import TopologyError
from tensorlink.topology import affinity, rates, rows, words
from tensorlink.topology.classes import SELF, UNKNOWN, Vocabulary, numbered
from tensorlink.topology.graph import Device, Kind, Link, Topology
from tensorlink.topology.rows import Cells, Found, Row
from tensorlink.topology.text import Warnings, lines_of
from tensorlink.topology.words import CPU, Legends, Word

Matrix = dict[tuple[str, str], str]


@dataclass
class _Parts:
    """Cells by row and column: of rows that have all theirs, and of others."""

    whole: dict[str, dict[str, str]] = field(default_factory=dict)
    damaged: dict[str, dict[str, str]] = field(default_factory=dict)


def read(text: str) -> Topology:
    """The machine that a table shows. What is damaged beyond doubt is left out, with a warning that names the line.

    A NIC keeps the name of its column, `NIC0`, and has the system's name from the legend as its `device`; a column that is
    called `mlx5_0` is both.

    Raises:
        TopologyError: there is no table, or its rows don't fit its header.
    """
    warnings = Warnings()
    legends, rest, ends = words.read_legends(lines_of(_unfold(text)))
    vocabulary = Vocabulary.of(legends.classes)
    found = rows.find(rest, ends, vocabulary, warnings)
    found.rows = _distinct([rows.unglue(row, found.header, vocabulary) for row in found.rows], warnings)
    columns = _columns(found, vocabulary, warnings)
    parts = _Parts()
    tails: dict[str, Cells] = {}
    for row in found.rows:
        if row.label.text in columns:
            cells = _best_way(row, columns, found.captions, vocabulary)
            _take_row(row, cells, columns, parts, warnings)
            tails[row.label.text] = cells
        else:
            warnings.add(f"the header has no column {row.label.text!r}: its row is left out", row.label.line)
    for column in columns:
        if column not in tails:
            warnings.add(f"there is no row of {column}: what the other rows say of it is all that is known")
    facts = _affinities(found, tails, warnings)
    devices = _devices(columns, facts, legends, vocabulary, warnings)
    links = _links(devices, _matrix(parts, warnings), vocabulary, warnings)
    return Topology(devices=tuple(devices), links=tuple(links), source="topo -m", warnings=warnings.all())


def _distinct(found: Sequence[Row], warnings: Warnings) -> list[Row]:
    kept: dict[str, Row] = {}
    for row in found:
        if kept.setdefault(row.label.text, row) is not row:
            warnings.add(f"the row {row.label.text} comes again: left out", row.label.line)
    return list(kept.values())


def _unfold(text: str) -> str:
    """Line breaks before legends and what they say, where a text has hardly any."""
    if text.strip().count("\n") > 2 or text.count("\\n") > 2:
        return text
    return re.sub(r"\s(?=(?:NIC )?Legend:|NIC\d{1,4}:\s|[A-Z]{1,8}#? {0,4}= )", "\n", text)


def _columns(found: Found, vocabulary: Vocabulary, warnings: Warnings) -> list[str]:
    """The names of the columns, by the header if it fits the rows, else by the rows if each has its X where it belongs.

    Raises:
        TopologyError: neither does.
    """
    labels = [row.label.text for row in found.rows]
    header, first = found.header, found.rows[0].label
    if len(header) > rows.MAX_COLUMNS:
        raise TopologyError(f"a table has at most {rows.MAX_COLUMNS} columns", line=first.line, column=1)
    distinct = len(set(header)) == len(header)
    if distinct and set(labels) <= set(header):
        if not _is_subsequence(labels, header):
            warnings.add("the rows are in another order than the columns", first.line)
        return header
    for known in (header, header[:-1]):  # the last name may be cut too
        after = labels[len(known) :]
        if known and labels[: len(known)] == known and (known is header or (after and after[0].startswith(header[-1]))):
            warnings.add(f"the header ends with {known[-1]}: the columns after it are taken to be the rows", first.line)
            return labels
    if distinct and len(header) >= len(labels) and 2 * sum(label in header for label in labels) > len(labels):
        return header
    for index, row in enumerate(found.rows):
        if not any(
            rows.cells_of(way, rows.MAX_COLUMNS, vocabulary).texts[index : index + 1] == [SELF]
            for way in rows.ways_to_join(row, vocabulary)
        ):
            why = f"the rows don't fit the header: no X in column {index + 1} of the row {row.label.text}"
            raise TopologyError(why, line=row.label.line, column=row.label.at + 1)
    said = "there is no header" if not header else "the header doesn't name all rows"
    warnings.add(f"{said}: the columns are taken to be the rows", first.line)
    return labels


def _is_subsequence(part: Sequence[str], whole: Sequence[str]) -> bool:
    left = iter(whole)
    return all(one in left for one in part)


def _best_way(row: Row, columns: Sequence[str], captions: Sequence[str], vocabulary: Vocabulary) -> Cells:
    """The cells of a row; of one that was broken into lines, by the way to join them that makes it whole."""
    own = columns.index(row.label.text)
    first = None
    for joined in rows.ways_to_join(row, vocabulary):
        cells = rows.cells_of(joined, len(columns), vocabulary)
        first = first or cells
        whole = len(cells.texts) == len(columns) and cells.texts[own] == SELF
        if whole and len(cells.tail) in (0, len(captions)):
            return cells
    assert first is not None
    return first


def _take_row(row: Row, cells: Cells, columns: Sequence[str], parts: _Parts, warnings: Warnings) -> None:
    """Takes those cells of a row whose columns are beyond doubt, by their distance from the row's X."""
    label, count = row.label, len(columns)
    own = columns.index(label.text)
    at = cells.texts.index(SELF) if SELF in cells.texts else None
    if cells.texts[own : own + 1] == [SELF]:
        at = own
    whole = len(cells.texts) == count and at == own
    ends_here = not cells.tail and cells.strange is None
    left = own if at == own else len(cells.texts) if at is None and len(cells.texts) <= own and ends_here else 0
    right = len(cells.texts) - at - 1 if at is not None else 0
    if right != count - own - 1 and not (at == own and ends_here):
        right = 0
    taken = list(zip(columns[:left], cells.texts[:left], strict=False))
    if at is not None:
        taken += zip(columns[own + 1 :], cells.texts[at + 1 : at + 1 + right], strict=False)
    for column, text in taken:
        if text == SELF:
            warnings.add(f"the row {label.text} has an X in column {column}: left out", label.line)
    kept = {column: text for column, text in taken if text is not None and text != SELF}
    (parts.whole if whole else parts.damaged)[label.text] = kept
    if not whole:
        said = f"{len(cells.texts)} of {count} cells" + ("" if at == own else ", and no X in its own column")
        warnings.add(f"column {label.at + 1}: the row {label.text} has {said}; {len(kept)} are used", label.line)
    elif cells.strange is not None:
        warnings.add(f"the row {label.text} ends with {cells.strange[:40]!r}, which is left out", label.line)
    for text, place in zip(cells.texts, cells.places, strict=True):
        if text is None and place.text not in UNKNOWN:
            warnings.add(f"column {place.at + 1}: {place.text[:40]!r} is no link class", place.line)


def _matrix(parts: _Parts, warnings: Warnings) -> Matrix:
    """All cells. A damaged row counts where no other contradicts it: if one does, its cells may be shifted."""
    matrix = {(a, b): text for a, row in parts.whole.items() for b, text in row.items()}
    for a, row in parts.damaged.items():
        back = {b: parts.whole.get(b, {}).get(a) for b in row}
        wrong = [b for b in row if back[b] is not None and back[b] != row[b]]
        if wrong:
            warnings.add(
                f"the damaged row of {a} says {row[wrong[0]]} of {wrong[0]}, whose row says {back[wrong[0]]}: it is left out"
            )
            continue
        last = next(reversed(row), None)
        for b, text in row.items():
            if b == last and back[b] is None and text[-1:].isdecimal():  # NV1 may be what is left of NV18
                warnings.add(f"the damaged row of {a} ends with {text}, which may be cut: it is left out")
            else:
                matrix[a, b] = text
    return matrix


def _affinities(found: Found, tails: Mapping[str, Cells], warnings: Warnings) -> dict[str, affinity.Values]:
    """What the last columns say, by device."""
    if not found.captions:
        return {}
    full = [cells.tail for cells in tails.values() if len(cells.tail) == len(found.captions)]
    lists = []
    if CPU in found.captions:
        lists = [tail[found.captions.index(CPU)].text for tail in full]
    facts: dict[str, affinity.Values] = {}
    for name, cells in tails.items():
        if not cells.tail:
            continue
        texts, line = [word.text for word in cells.tail], cells.tail[0].line
        apart = affinity.separate(texts, found.captions, lists)
        if apart is not None and apart != texts:
            warnings.add(f"{' '.join(texts)!r} is read as {' '.join(apart)!r}", line)
            facts[name] = dict(zip(found.captions, map(affinity.value, apart), strict=True))
            continue
        values = affinity.assign(cells.tail, found.captions, _starts(found, name, cells))
        begins = found.captions[-1] == CPU and any(one != texts[-1] and one.startswith(texts[-1]) for one in lists)
        if begins or _may_be_cut(found, cells.tail, len(full) > 0):
            values = {key: one for key, one in values.items() if one != texts[-1]}
        facts[name] = values
        short = len(texts) < len(found.captions) and any(text not in UNKNOWN for text in texts)
        if short or set(values) != set(found.captions):
            warnings.add(
                f"column {cells.tail[0].at + 1}: {' '.join(texts)!r} leaves the affinities of {name} unclear", line
            )
    return facts


def _may_be_cut(found: Found, tail: Sequence[Word], others_full: bool) -> bool:
    """Whether the last word of a row may be what is left of a longer one: the row is short of words, or both it and the
    header end at the same place of the screen, or within a caption."""
    last = tail[-1]
    if last.text in UNKNOWN or last.goes_on:
        return last.goes_on
    if len(tail) < len(found.captions):
        return others_full or found.cut_at is not None
    return found.cut_within or (last.aligned and found.cut_at == last.at + len(last.text))


def _starts(found: Found, name: str, cells: Cells) -> Sequence[int] | None:
    """Where the captions begin on the screen, if this row's X stands below its own column."""
    own = next((place for text, place in zip(cells.texts, cells.places, strict=True) if text == SELF), None)
    if own is None or not own.aligned or name not in found.columns_at:
        return None
    return found.starts if abs(own.at - found.columns_at[name]) <= 4 else None


def _devices(
    columns: Sequence[str],
    facts: Mapping[str, affinity.Values],
    legends: Legends,
    vocabulary: Vocabulary,
    warnings: Warnings,
) -> list[Device]:
    names = words.odd_devices(legends, columns, vocabulary.names, warnings)
    found = []
    for column in columns:
        kind: Kind = "nic"
        if words.is_numbered(column) and not column.startswith("NIC"):
            kind = "cpu" if column.startswith("CPU") else "gpu"
        values = facts.get(column, {})
        node, own = values.get("numa_affinity"), values.get("gpu_numa_id")
        model, uuid = legends.models.get(column, (None, None))
        found.append(
            Device(
                name=column,
                kind=kind,
                uuid=uuid,
                model=model,
                device=(names.get(column) if column.startswith("NIC") else column) if kind == "nic" else None,
                numa_node=int(node) if node is not None and node.isdecimal() else None,
                numa_affinity=int(node) if node is not None and node.isdecimal() else node,
                cpu_affinity=values.get("cpu_affinity"),
                gpu_numa_id=int(own) if own is not None and own.isdecimal() else None,
            )
        )
    return found


def _links(devices: Sequence[Device], matrix: Matrix, vocabulary: Vocabulary, warnings: Warnings) -> list[Link]:
    found = []
    for index, one in enumerate(devices):
        for other in devices[index + 1 :]:
            there = _stated(one.name, other.name, matrix, vocabulary, warnings)
            back = _stated(other.name, one.name, matrix, vocabulary, warnings)
            if there is not None and back is not None and there != back:
                warnings.add(
                    f"{one.name} to {other.name} is {there}, and back {back}: both are kept, each for its direction"
                )
                found.append(_link(other, one, back))
            if there is not None or back is not None:
                found.append(_link(one, other, there or back or ""))
            else:
                warnings.add(f"nothing is known of {one.name} to {other.name}")
    return found


def _stated(a: str, b: str, matrix: Matrix, vocabulary: Vocabulary, warnings: Warnings) -> str | None:
    """What the row of `a` says of `b`; a class that nobody explains counts if the row of `b` says the same."""
    text = matrix.get((a, b))
    if text is None or text in UNKNOWN or text in vocabulary:
        return text if text not in UNKNOWN else None
    if text == matrix.get((b, a)):
        warnings.add(f"no legend explains the class {text}, and it is none that is known")
        return text
    warnings.add(f"{a} to {b}: {text} is no link class, and the row of {b} doesn't say so: left out")
    return None


def _link(a: Device, b: Device, link_class: str) -> Link:
    count = numbered(link_class)
    models = {device.model for device in (a, b)}
    rate = rates.nvlink(model=models.pop()) if len(models) == 1 and link_class.startswith("NV") else None
    bytes_per_s = rate * count if rate is not None and count is not None else None
    return Link(a=a.name, b=b.name, link_class=link_class, bytes_per_s=bytes_per_s, count=count)
