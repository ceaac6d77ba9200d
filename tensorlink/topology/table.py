"""`nvidia-smi topo -m` and the tables that other vendors' tools print like it.

A row has its own name, an X in its own column, and says of each pair what the other's row says too. What was damaged on
the way is found by that, and filled in from the other row; where the two differ both are kept, each for its direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorlink.errors import TopologyError
from tensorlink.topology import affinity, rates, rows, words
from tensorlink.topology.classes import SELF, UNKNOWN, Vocabulary, numbered
from tensorlink.topology.graph import Device, Kind, Link, Topology
from tensorlink.topology.rows import Cells, Found, Row
from tensorlink.topology.text import Warnings, lines_of
from tensorlink.topology.words import CPU, Legends

Matrix = dict[tuple[str, str], str]


def read(text: str) -> Topology:
    """The machine that a table shows. What is damaged beyond doubt is left out, with a warning that names the line.

    A NIC keeps the name of its column, `NIC0`, and has the system's name from the legend as its `device`; a column that is
    called `mlx5_0` is both.

    Raises:
        TopologyError: there is no table, or its rows don't fit its header.
    """
    warnings = Warnings()
    legends, rest, ends = words.read_legends(lines_of(text))
    vocabulary = Vocabulary.of(legends.classes)
    found = rows.find(rest, ends, vocabulary, warnings)
    columns = _columns(found, vocabulary, warnings)
    matrix: Matrix = {}
    tails: dict[str, Cells] = {}
    for row in found.rows:
        if row.label.text in columns:
            cells = _best_way(row, columns, found.captions, vocabulary)
            _take_row(row, cells, columns, matrix, warnings)
            tails[row.label.text] = cells
        else:
            warnings.add(f"the header has no column {row.label.text!r}: its row is left out", row.label.line)
    for column in columns:
        if column not in tails:
            warnings.add(f"there is no row of {column}: what the other rows say of it is all that is known")
    facts = _affinities(found, tails, warnings)
    devices = _devices(columns, facts, legends, vocabulary, warnings)
    links = _links(devices, matrix, vocabulary, warnings)
    return Topology(devices=tuple(devices), links=tuple(links), source="topo -m", warnings=warnings.all())


def _columns(found: Found, vocabulary: Vocabulary, warnings: Warnings) -> list[str]:
    """The names of the columns, by the header if it fits the rows, else by the rows if each has its X where it belongs.

    Raises:
        TopologyError: neither does.
    """
    labels = [row.label.text for row in found.rows]
    header = found.header
    if len(header) > rows.MAX_COLUMNS:
        raise TopologyError(f"a table has at most {rows.MAX_COLUMNS} columns", line=found.rows[0].label.line, column=1)
    if len(set(header)) == len(header) and _is_subsequence(labels, header):
        return header
    if len(set(header)) == len(header) and labels[: len(header)] != header and set(labels) & set(header):
        known = [label for label in labels if label in header]
        if len(known) > len(labels) // 2 and _is_subsequence(known, header) and len(header) >= len(labels):
            return header
    for index, row in enumerate(found.rows):
        cells = rows.cells_of(row.parts[0], rows.MAX_COLUMNS, vocabulary)
        if cells.texts[index : index + 1] != [SELF]:
            word = row.label
            why = f"the rows don't fit the header: no X in column {index + 1} of the row {word.text}"
            raise TopologyError(why, line=word.line, column=word.at + 1)
    said = "there is no header" if not header else "the header doesn't name all rows"
    warnings.add(f"{said}: the columns are taken to be the rows", found.rows[0].label.line)
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


def _take_row(row: Row, cells: Cells, columns: Sequence[str], matrix: Matrix, warnings: Warnings) -> None:
    """Puts those cells of a row into the matrix whose columns are beyond doubt, by their distance from the row's X."""
    label, count = row.label, len(columns)
    own = columns.index(label.text)
    at = cells.texts.index(SELF) if SELF in cells.texts else None
    if at is not None and cells.texts[own : own + 1] == [SELF]:
        at = own
    ends_here = not cells.tail and cells.strange is None
    left = own if at == own or (at is None and len(cells.texts) <= own and ends_here) else 0
    after = len(cells.texts) - (own + 1 if at == own else (at or 0) + 1)
    whole_right = at is not None and after == count - own - 1
    right = after if at is not None and (whole_right or (at == own and ends_here)) else 0
    taken = list(zip(columns[:left], cells.texts[:left], strict=False))
    if at is not None:
        taken += zip(columns[own + 1 :], cells.texts[at + 1 : at + 1 + right], strict=False)
    for column, text in taken:
        if text == SELF:
            warnings.add(f"the row {label.text} has an X in column {column}: left out", label.line)
        elif text is not None:
            matrix[label.text, column] = text
    if len(cells.texts) != count or at != own:
        said = f"{len(cells.texts)} of {count} cells" + ("" if at == own else ", and no X in its own column")
        warnings.add(f"column {label.at + 1}: the row {label.text} has {said}; {len(taken)} are used", label.line)
    elif cells.strange is not None:
        warnings.add(f"the row {label.text} ends with {cells.strange[:40]!r}, which is left out", label.line)
    for text, place in zip(cells.texts, cells.places, strict=True):
        if text is None and place.text not in UNKNOWN:
            warnings.add(f"column {place.at + 1}: {place.text[:40]!r} is no link class", place.line)
    if len(cells.texts) < count and taken and ends_here:  # a class that was cut may look like another: NV1 of NV18
        matrix[label.text, f"cut {taken[-1][0]}"] = ""


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
        if apart is not None and not all(text in UNKNOWN for text in texts):
            warnings.add(f"{' '.join(texts)!r} is read as {' '.join(apart)!r}", line)
            facts[name] = dict(zip(found.captions, map(affinity.value, apart), strict=True))
            continue
        values = affinity.assign(cells.tail, found.captions, _starts(found, name, cells))
        cut = len(full) > 0 and len(texts) < len(found.captions) and texts[-1] not in UNKNOWN
        facts[name] = {key: one for key, one in values.items() if not (cut and one == texts[-1])}
        if set(facts[name]) != set(found.captions):
            warnings.add(
                f"column {cells.tail[0].at + 1}: {' '.join(texts)!r} leaves the affinities of {name} unclear", line
            )
    return facts


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
    """What the row of `a` says of `b`, unless that is doubtful: a strange class, or one that was cut, of which the other
    row says something else."""
    text, back = matrix.get((a, b)), matrix.get((b, a))
    if text is None or text == back:
        if text is not None and text not in vocabulary:
            warnings.add(f"no legend explains the class {text}, and it is none that is known")
        return None if text in UNKNOWN else text
    if (a, f"cut {b}") in matrix and (back is not None or text not in vocabulary):
        return None
    if text not in vocabulary:
        warnings.add(f"{a} to {b}: {text} is no link class, and the row of {b} doesn't say so: left out")
        return None
    return text


def _link(a: Device, b: Device, link_class: str) -> Link:
    count = numbered(link_class)
    models = {device.model for device in (a, b)}
    rate = rates.nvlink(model=models.pop()) if len(models) == 1 and link_class.startswith("NV") else None
    bytes_per_s = rate * count if rate is not None and count is not None else None
    return Link(a=a.name, b=b.name, link_class=link_class, bytes_per_s=bytes_per_s, count=count)
