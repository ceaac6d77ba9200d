"""Where the table lies in a text: its header, and its rows with what stands in each. What it means is `table`'s part.

A row is a name with classes behind it, wherever that is in a line: what stands before belongs to a log. A line without a
name continues the row above. The header is what stands above the first row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

from tensorlink.errors import TopologyError
from tensorlink.topology import affinity, words
from tensorlink.topology.classes import SELF, UNKNOWN, Vocabulary
from tensorlink.topology.text import Line, Warnings
from tensorlink.topology.words import Word

MAX_COLUMNS = 512
_MAX_WORDS = MAX_COLUMNS * (MAX_COLUMNS + 8)
_MAX_SEAMS = 4
_MAX_HEADER_LINES = 16
_MAX_HEADER = 16 << 10  # characters
_STRANGE_CLASS = re.compile(r"[A-Z][A-Z0-9_*]{1,11}")
_NO_CLASS = ("CPU", "NUMA", "GPU", "NIC", "ID")
_SELF = ("x", "S")  # other tools' words for X


@dataclass
class Row:
    label: Word
    parts: list[list[Word]] = field(default_factory=list)
    """The words behind the label, of this line and of each that continues it."""
    seams: list[bool] = field(default_factory=list)
    """Whether the word at the end of a line and the one at the begin of the next may be one."""


@dataclass
class Cells:
    """What stands in a row: a class a column as far as they go, then the affinities."""

    texts: list[str | None]
    places: list[Word]
    tail: list[Word]
    strange: str | None = None
    """The first word that is neither."""


@dataclass
class Found:
    header: list[str]
    captions: list[str]
    starts: list[int] | None
    """Where captions begin on the screen, if that can be told."""
    columns_at: dict[str, int]
    rows: list[Row]
    cut_within: bool = False
    """The header ends within a caption."""
    cut_at: int | None = None
    """Where it ends on the screen, if it may have been cut there: some caption is missing, or cut."""


def find(lines: Sequence[Line], ends: Collection[int], vocabulary: Vocabulary, warnings: Warnings) -> Found:
    """The first table of a text. `ends`: numbers of lines that belong to legends.

    Raises:
        TopologyError: there is none.
    """
    rows: list[Row] = []
    above: list[Line] = []
    labels: set[str] = set()
    previous: Line | None = None
    count = 0
    for line in lines:
        row_words = words.words_of(line)
        count += len(row_words)
        if count > _MAX_WORDS:
            raise TopologyError(f"a table has at most {_MAX_WORDS} words", line=line.number, column=1)
        starts = _row_starts(row_words, vocabulary)
        if rows and (_begins_another(row_words, starts, labels) or _left_behind(ends, rows[-1], line, starts)):
            warnings.add("another table begins here: only the first one is read", line.number)
            break
        if starts and not rows and _header_words(row_words[: starts[0]]):
            above.append(Line(line.number, line.text[: row_words[starts[0]].at]))
        if not starts and rows:
            _continue(rows[-1], row_words, previous, line, vocabulary)
        elif not starts:
            above.append(line)
        for start, stop in zip(starts, [*starts[1:], len(row_words)], strict=False):
            rows.append(Row(row_words[start], [row_words[start + 1 : stop]]))
            labels.add(row_words[start].text)
        previous = line
    if not rows or len(rows) > MAX_COLUMNS:
        why = (
            f"a table has at most {MAX_COLUMNS} rows"
            if rows
            else "there is no topology table: no line has a device and link classes"
        )
        raise TopologyError(why, line=rows[-1].label.line if rows else lines[-1].number if lines else 1, column=1)
    return _with_header(above, rows, vocabulary)


def _row_starts(row: Sequence[Word], vocabulary: Vocabulary) -> list[int]:
    """Where rows begin in a line: one, or several where line breaks were lost."""
    has_self = any(word.text == SELF or word.text in _SELF for word in row)
    found = []
    for index, (word, following) in enumerate(pairwise(row)):
        if word.caption or following.caption or not words.is_name(word.text) or word.text in vocabulary:
            continue
        if any(not rest for _, rest in vocabulary.split(word.text)):
            continue
        cell = bool(vocabulary.split(following.text)) or following.text in _SELF or following.text in UNKNOWN
        if cell or (has_self and _is_strange_class(following.text)):
            found.append(index)
    header = {word.text for word in row[: found[0]]} if found else set()
    numbered = [index for index in found if words.is_numbered(row[index].text) or row[index].text in header]
    if has_self or any(row[index + 1].text not in UNKNOWN for index in found):
        return numbered or found[:1]
    return []


def _is_strange_class(text: str) -> bool:
    return _STRANGE_CLASS.fullmatch(text) is not None and not text.startswith(_NO_CLASS) and not words.is_numbered(text)


def _begins_another(row: Sequence[Word], starts: Sequence[int], labels: Collection[str]) -> bool:
    """Whether a line repeats a row, or is a header below rows."""
    if starts:
        return any(row[start].text in labels for start in starts)
    names = [word.text for word in row if words.is_numbered(word.text)]
    return len(names) > 0 and _is_header(row)


def _left_behind(ends: Collection[int], last: Row, line: Line, starts: Sequence[int]) -> bool:
    """Whether a legend lies between a row and the row before it."""
    return bool(starts) and any(last.label.line < end < line.number for end in ends)


def _continue(row: Row, more: list[Word], previous: Line | None, line: Line, vocabulary: Vocabulary) -> None:
    """Adds to a row what its next line has, if that can belong to it."""
    if not more or previous is None or row.parts[-1][-1:] == [] or previous.number != row.parts[-1][-1].line:
        return
    good = [_is_word(word.text, vocabulary) for word in more]
    # The words at both ends may be halves of others, and look like anything.
    joined = _is_word(row.parts[-1][-1].text + more[0].text, vocabulary)
    if all(good[1:-1]) and (any(good) or joined):
        row.parts.append([word._replace(aligned=False) for word in more])
        row.seams.append(not previous.text[-1:].isspace() and not line.text[:1].isspace())


def _is_word(text: str, vocabulary: Vocabulary) -> bool:
    return affinity.is_tail(text) or any(not rest or affinity.is_tail(rest) for _, rest in vocabulary.split(text))


def unglue(row: Row, columns: Collection[str], vocabulary: Vocabulary) -> Row:
    """A row whose name grew together with its first classes, `NIC10SYS`, as what it was."""
    text = row.label.text
    names = [name for name in columns if text.startswith(name)] if text not in columns else []
    name = max(names, key=len, default=text)
    if name == text or not any(not rest for _, rest in vocabulary.split(text[len(name) :])):
        return row
    first = row.label._replace(text=text[len(name) :], at=row.label.at + len(name))
    return Row(row.label._replace(text=name), [[first, *row.parts[0]], *row.parts[1:]], row.seams)


def ways_to_join(row: Row, vocabulary: Vocabulary) -> Iterable[list[Word]]:
    """The words of a row, for each way to put the halves at its seams together; the likeliest first."""
    choices: list[tuple[bool, ...]] = []
    open_seams = 0
    for seam, part, following in zip(row.seams, row.parts, row.parts[1:], strict=False):
        apart = _is_word(part[-1].text, vocabulary) and _is_word(following[0].text, vocabulary)
        joined = seam and _is_word(_joined(part[-1], following[0]), vocabulary)
        open_seams += apart and joined
        choices.append((False, True) if apart and joined and open_seams <= _MAX_SEAMS else (joined and not apart,))
    for way in product(*choices):
        found = list(row.parts[0])
        for join, part in zip(way, row.parts[1:], strict=False):
            if join:
                last = found.pop()
                found.append(Word(_joined(last, part[0]), last.at, last.line, None, False))
            found += part[1:] if join else part
        yield found


def _joined(last: Word, first: Word) -> str:
    """Two halves as one word; the comma at the end of a list had been taken off."""
    return last.text + ("," if last.goes_on else "") + first.text


def cells_of(row: Sequence[Word], count: int, vocabulary: Vocabulary) -> Cells:
    """Takes up to `count` cells from the words of a row; what follows is its tail."""
    cells = Cells([], [], [])
    for index, word in enumerate(row):
        room = count - len(cells.texts)
        if cells.tail or not room:
            if not affinity.is_tail(word.text):
                cells.strange = word.text
                break
            cells.tail.append(word)
            continue
        pieces, rest = _pieces(word.text, room, vocabulary, [other.text for other in row[index + 1 :]])
        cells.texts += pieces
        cells.places += [word] * len(pieces)
        if rest:
            cells.tail.append(Word(rest, word.at, word.line, None, False))
    return cells


def _pieces(text: str, room: int, vocabulary: Vocabulary, after: Sequence[str]) -> tuple[list[str | None], str]:
    """A word as cells and what begins the tail; a word that is no class is one cell that says nothing."""
    if text in vocabulary:
        return [text], ""
    if text in _SELF:
        return [SELF], ""
    ways = [
        (pieces, rest)
        for pieces, rest in vocabulary.split(text)
        if (not rest and len(pieces) <= room) or (len(pieces) == room and affinity.is_tail(rest))
    ]
    if len(ways) == 1:
        return list(ways[0][0]), ways[0][1]
    if len(ways) > 1:
        return [None], ""
    if text in UNKNOWN and any(other in vocabulary for other in after):
        return [None], ""
    if affinity.is_tail(text):
        return [], text
    return [text if _is_strange_class(text) else None], ""


def _with_header(above: Sequence[Line], rows: list[Row], vocabulary: Vocabulary) -> Found:
    """The header that fits the rows best, of the lines above the first."""
    labels = [row.label.text for row in rows]
    lines = _header_lines(above, vocabulary)
    best: list[Word] = []
    for joints in product(("", " "), repeat=min(max(len(lines) - 1, 0), _MAX_SEAMS)):
        text = "".join(line.text + joint for line, joint in zip(lines, [*joints, *[""] * len(lines)], strict=False))
        header = _header_words(words.words_of(Line(lines[0].number, text))) if lines else []
        if not best or _names(header, labels) == labels:
            best = header
        if _names(best, labels) == labels:
            break
    captions: list[str] = []
    starts = []
    for word in best:
        caption = word.caption
        if caption and caption not in captions:
            captions.append(caption)
            starts.append(word.at)
    cut = _cut_caption(best)
    if cut and cut not in captions:
        captions.append(cut)
        starts.append(best[-1].at)
    on_screen = len(lines) == 1 and all(word.aligned for word in best)
    columns_at = {word.text: word.at for word in best if not word.caption} if on_screen else {}
    found = Found(_names(best, labels), captions, starts if on_screen else None, columns_at, rows, cut is not None)
    if on_screen and best and len(captions) < len(words.CAPTIONS) + (cut is not None):
        found.cut_at = best[-1].at + len(best[-1].text)
    return found


def _header_lines(above: Sequence[Line], vocabulary: Vocabulary) -> list[Line]:
    """The last lines above the rows that make a header: several if it was broken, even within a word."""
    found: list[Line] = []
    complete = False
    size = 0
    for line in reversed(above):
        if not line.text.strip():
            if found:
                break
            continue
        line_words = words.words_of(line)
        if any(word.text in vocabulary for word in line_words):  # a row that lost its name
            if complete:
                break
            continue
        header = _header_words(line_words)
        odd = [word for word in header[:-1] if not word.caption and not words.is_name(word.text)]
        size += len(line.text)
        if (complete and (odd or not header)) or len(found) >= _MAX_HEADER_LINES or size > _MAX_HEADER:
            break
        complete = complete or len(header) > 0
        found.insert(0, line)
    while found and not any(words.is_accelerator(word.text) for word in words.words_of(found[0])):
        found.pop(0)
    return found


def _header_words(header: Sequence[Word]) -> list[Word]:
    """Without what a log puts before: a header begins with an accelerator."""
    first = next(
        (index for index, word in enumerate(header) if words.split_names(word.text, ()) is not None), len(header)
    )
    return list(header[first:])


def _is_header(line: Sequence[Word]) -> bool:
    header = _header_words(line)
    fragments = [word for word in header if not word.caption and not words.is_name(word.text)]
    return len(header) > 0 and (
        not fragments or words.cut_caption(" ".join(word.text for word in fragments)) is not None
    )


def _names(header: Sequence[Word], labels: Collection[str]) -> list[str]:
    found: list[str] = []
    for word in header:
        if word.caption is None:
            found += words.split_names(word.text, labels) or ([word.text] if words.is_name(word.text) else [])
    return found


def _cut_caption(header: Sequence[Word]) -> str | None:
    """The last caption of a header that was cut within it."""
    at = len(header)
    while at and header[at - 1].caption is None and not words.is_name(header[at - 1].text):
        at -= 1
    return words.cut_caption(" ".join(word.text for word in header[at:]))
