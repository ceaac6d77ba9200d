"""Words of a `topo -m` table: names of devices, captions of columns, and what its legends define."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tensorlink.topology.text import Line, Warnings

CPU, NUMA, GPU_NUMA = "cpu_affinity", "numa_affinity", "gpu_numa_id"
CAPTIONS = (CPU, NUMA, GPU_NUMA)

_ACCELERATOR = r"(?:[A-Z]PU|MLU|DCU|HCU|GCU)"  # GPU, NPU, XPU and those of other letters
_CAPTION = (
    rf"(?P<{CPU}>CPUs?[ \t_-]{{0,8}}Affinity)"
    rf"|(?P<{NUMA}>(?:NUMA|Node)[ \t_-]{{0,8}}Affinity)"
    rf"|(?P<{GPU_NUMA}>{_ACCELERATOR}[ \t_-]{{0,8}}NUMA[ \t_-]{{0,8}}ID)"
)
_WORD = re.compile(
    rf"{_CAPTION}|(?P<word>\S+?(?=\s|$|CPUs?[ \t_-]{{0,8}}Affinity|(?:NUMA|Node)[ \t_-]{{0,8}}Affinity))", re.IGNORECASE
)
_PLAIN_WORD = re.compile(r"(?P<word>\S+)")
_HINT = re.compile(r"affinity|numa", re.IGNORECASE)
_BLANK_IN_NAME = re.compile(rf"\b({_ACCELERATOR}|NIC)[ ](\d{{1,4}}(?:/\d{{1,3}})?)(?=\s|$)", re.ASCII)
_NUMBERED = re.compile(rf"({_ACCELERATOR}|NIC)\d{{1,4}}(?:/\d{{1,3}})?", re.ASCII)
_NAME = re.compile(r"[A-Za-z][\w./-]{0,63}", re.ASCII)
_CUT_CAPTIONS = ((CPU, "cpuaffinity"), (NUMA, "numaaffinity"), (GPU_NUMA, "gpunumaid"))

_CLASS_LINE = re.compile(r"(?:^|\s)([A-Z][A-Z0-9_*]{0,15}(?:#|\[\w{1,32}\])?)\s{0,16}=\s{0,16}(?=[A-Z])")
_CLASS_LINE_COLON = re.compile(r"^\s*([A-Z][A-Z0-9_*]{0,15}(?:#|\[\w{1,32}\])?)\s{0,16}:\s{1,16}(?=[A-Z]\w*\s)")
_NIC_LINE = re.compile(r"\b(NIC\d{1,4})\s{0,16}:")
_LEGEND = re.compile(r"\bLegend\s{0,8}:?\s*$", re.IGNORECASE)
_MODEL_LINE = re.compile(r"\bGPU (\d{1,4}): (.{1,80}?) \(UUID: (GPU-[0-9a-fA-F-]{8,64})\)")
_MAX_CLASSES = 64


class Word(NamedTuple):
    text: str
    at: int
    """Where it begins in its line, from 0."""
    line: int
    caption: str | None = None
    aligned: bool = True
    """Whether `at` means a place on a screen: the line has no tabs and isn't the continuation of another."""
    goes_on: bool = False
    """A comma behind it says that a list was cut."""


@dataclass
class Legends:
    """What stands below a table, or above it."""

    classes: dict[str, None] = field(default_factory=dict)
    devices: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By column, what its legend says and in which line, unchecked."""
    models: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Model and UUID by `GPU0`, of the lines that `nvidia-smi -L` prints."""


def words_of(line: Line) -> list[Word]:
    text = _BLANK_IN_NAME.sub(r"\1\2 ", line.text)
    found = []
    pattern = _WORD if _HINT.search(text) else _PLAIN_WORD
    for match in pattern.finditer(text):
        caption = match.lastgroup if match.lastgroup != "word" else None
        word = match[0].rstrip(",;") if caption is None else match[0]
        if word:
            goes_on = match[0].endswith(",") and word[-1].isdecimal()
            found.append(Word(word, match.start(), line.number, caption, "\t" not in text, goes_on))
    return found


def is_numbered(word: str) -> bool:
    """Whether it is a name that tables give by number: GPU0, NPU1, NIC2."""
    return _NUMBERED.fullmatch(word) is not None


def is_accelerator(word: str) -> bool:
    return is_numbered(word) and not word.startswith(("NIC", "CPU"))


def is_name(word: str) -> bool:
    """Whether it may name a device: a word with a number in it, such as mlx5_0."""
    return _NAME.fullmatch(word) is not None and any(map(str.isdecimal, word))


def split_names(word: str, known: Collection[str]) -> list[str] | None:
    """Names that lost the blank between them, `NIC16NIC17`; `known` are names that stand alone elsewhere."""
    if is_numbered(word) or word in known:
        return [word]
    found, at = [], 0
    while at < len(word):
        match = _NUMBERED.match(word, at)
        name = match[0] if match else max((one for one in known if word.startswith(one, at)), key=len, default="")
        if not name:
            return None
        found.append(name)
        at += len(name)
    return found


def cut_caption(text: str) -> str | None:
    """The caption of which a cut header shows the beginning: `NUMA Aff`."""
    plain = re.sub(r"[\s_-]", "", text).lower()
    return next((name for name, whole in _CUT_CAPTIONS if len(plain) > 2 and whole.startswith(plain)), None)


def read_legends(lines: Iterable[Line]) -> tuple[Legends, list[Line], set[int]]:
    """All legends, the other lines, and the numbers of the lines before which a table has ended."""
    legends, rest, ends = Legends(), [], set()
    below = False
    for line in lines:
        models = _MODEL_LINE.search(line.text)
        nics = list(_NIC_LINE.finditer(line.text))
        classes = _CLASS_LINE.search(line.text) or (_CLASS_LINE_COLON.search(line.text) if below else None)
        if models:
            legends.models[f"GPU{models[1]}"] = (models[2], models[3])
        elif nics:
            for one, following in zip(nics, [*nics[1:], None], strict=True):
                end = following.start() if following else len(line.text)
                legends.devices.setdefault(one[1], (line.text[one.end() : end].strip(), line.number))
        elif _LEGEND.search(line.text):
            below = True
        elif classes:
            if len(legends.classes) < _MAX_CLASSES:
                legends.classes.setdefault(classes[1])
        else:
            rest.append(line)
            continue
        ends.add(line.number)
    return legends, rest, ends


def device_name(said: str, columns: Collection[str], classes: Collection[str]) -> str | None:
    """The system's name of a NIC, if what the legend says can be one: the tool itself prints bytes of its table at times."""
    if not is_name(said) or len(said) < 3 or said in columns or said in classes or is_numbered(said):
        return None
    plain = said.lower()
    return None if any(plain in whole or whole in plain for _, whole in _CUT_CAPTIONS) or plain == "affinity" else said


def odd_devices(
    legends: Legends, columns: Collection[str], classes: Collection[str], warnings: Warnings
) -> dict[str, str]:
    """System names by column, of those that the legend says; a warning for each that it doesn't say properly."""
    found: dict[str, str] = {}
    all_said = {said for said, _ in legends.devices.values()}
    for column, (said, line) in legends.devices.items():
        name = device_name(said, columns, classes)
        if column not in columns:
            warnings.add(f"the legend names {column}, which the table hasn't", line)
        elif name is None or name.endswith("_") or any(other.startswith(f"{name}_") for other in all_said):
            warnings.add(f"the legend of {column} is {said[:40]!r}, which is no device's name: left out", line)
        elif name in found.values():
            warnings.add(f"the legend gives {name} to {column} too: left out", line)
        else:
            found[column] = name
    nameless = [column for column in columns if column.startswith("NIC") and column not in legends.devices]
    if nameless:
        warnings.add(f"the legend doesn't name {', '.join(nameless[:8])}{' and others' if len(nameless) > 8 else ''}")
    return found
