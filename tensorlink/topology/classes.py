"""The vocabulary of link classes: which there are, how near each is, and how words that lost their blanks come apart."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

SELF = "X"
UNKNOWN = ("N/A", "NA", "n/a", "-")
"""What tables print where they don't know the class."""
FABRICS = ("XGMI", "HCCS", "HCCS_SW", "SIO", "MX", "MDF", "C2C", "XL*")
"""Wires between accelerators that are no PCIe, of several vendors; `NUMBERED` are others that say how many."""
NUMBERED = ("NV", "XL", "MT")
PCI_CLASSES = {"PIX": 1, "PXB": 2, "PHB": 3, "PCIE": 4, "NODE": 4, "SYS": 5, "SOC": 5}
"""The nearer the smaller. `SOC` is what SYS was called once; `PCIE` is any way of ROCm that isn't XGMI."""

_WIRE = re.compile(r"PCIe(\d?x\d{1,2})?")
_MAX_WORD = 512
_MAX_COUNT = 3  # digits of NV18


def closeness(link_class: str | None) -> int | None:
    """0 for wires between the two, then the larger the farther; None: nobody knows."""
    if link_class is None:
        return None
    if link_class in FABRICS or numbered(link_class) is not None:
        return 0
    if _WIRE.fullmatch(link_class):
        return 1
    return PCI_CLASSES.get(link_class)


def numbered(link_class: str) -> int | None:
    """How many wires a class such as NV18 bonds; None: its name has no number."""
    for prefix in NUMBERED:
        digits = link_class.removeprefix(prefix)
        if digits != link_class and digits.isdecimal() and digits.isascii() and len(digits) <= _MAX_COUNT:
            return int(digits)
    return None


@dataclass(frozen=True)
class Vocabulary:
    """The classes that a table may use: the known ones and those that its legend defines."""

    names: frozenset[str]
    prefixes: frozenset[str]

    @classmethod
    def of(cls, legend: Iterable[str] = ()) -> Vocabulary:
        """With what a legend defines: `MX`, or `NV#` and `XL[laneCount]`, which stand for names with a number."""
        names, prefixes = {SELF, *FABRICS, *PCI_CLASSES}, set(NUMBERED)
        for name in legend:
            stem = re.sub(r"#.*|\[.*", "", name)
            if stem != name and stem:
                prefixes.add(stem)
            elif stem == name and name not in UNKNOWN:
                names.add(name)
        return cls(frozenset(names), frozenset(prefixes))

    def __contains__(self, word: str) -> bool:
        return word in self.names or any(
            word.startswith(prefix) and 0 < len(word) - len(prefix) <= _MAX_COUNT and word[len(prefix) :].isdecimal()
            for prefix in self.prefixes
        )

    def ends(self, word: str, start: int) -> list[int]:
        """Where a class that begins at `start` may end, the longest first."""
        found = {start + len(name) for name in self.names if word.startswith(name, start)}
        for prefix in self.prefixes:
            if word.startswith(prefix, start):
                at = start + len(prefix)
                limit = min(at + _MAX_COUNT, len(word))
                while at < limit and word[at].isdecimal():
                    at += 1
                    found.add(at)
        return sorted(found, reverse=True)

    def split(self, word: str) -> list[tuple[list[str], str]]:
        """All ways to read a word as classes and a rest that no class begins: `SYSSYS0-55` is (SYS, SYS) and `0-55`.

        Numbers have several: `NV180-55` may be NV18 and `0-55`, or NV1 and `80-55`, or NV180 and `-55`.
        """
        if len(word) > _MAX_WORD:
            return []
        found: list[tuple[list[str], str]] = []
        todo: list[tuple[list[str], int]] = [([], 0)]
        while todo and len(found) < 16:
            pieces, at = todo.pop()
            ends = self.ends(word, at)
            if not ends and pieces:
                found.append((pieces, word[at:]))
            # A name that is a part of another gives way to it, numbers don't: so the ways stay few.
            longest = ends[:1] if ends and not word[ends[0] - 1].isdecimal() else ends
            todo += [([*pieces, word[at:end]], end) for end in reversed(longest)]
        return found
