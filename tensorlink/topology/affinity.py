"""The last columns of a `topo -m` row: which CPUs and NUMA nodes are near. They may be blank, cut or grown together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import combinations, product

from tensorlink.topology.classes import UNKNOWN
from tensorlink.topology.words import CPU, GPU_NUMA, NUMA, Word

Values = dict[str, str | None]

_LIST = re.compile(r"\d{1,5}(?:-\d{1,5})?(?:,\d{1,5}(?:-\d{1,5})?)*")
_MAX_LIST = 4096
_MAX_RANGED_NODE = 32  # a list of NUMA nodes beyond this is one of CPUs


def ranges(text: str) -> list[tuple[int, int]] | None:
    """`0-3,8` as [(0, 3), (8, 8)]; None if it isn't an ascending list."""
    if len(text) > _MAX_LIST or not _LIST.fullmatch(text):
        return None
    found: list[tuple[int, int]] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        pair = int(low), int(high or low)
        if pair[1] < pair[0] or (found and pair[0] <= found[-1][1]):
            return None
        found.append(pair)
    return found


def is_tail(text: str) -> bool:
    """Whether a word may stand in these columns at all."""
    return text in UNKNOWN or (text[0].isdecimal() and (ranges(text) is not None or len(_grown(text, 3)) > 0))


def fits(text: str, caption: str) -> bool:
    if text in UNKNOWN:
        return True
    pairs = ranges(text)
    if pairs is None or caption == CPU:
        return pairs is not None
    return text.isdecimal() if caption == GPU_NUMA else text.isdecimal() or pairs[-1][1] < _MAX_RANGED_NODE


def value(text: str | None) -> str | None:
    return None if text is None or text in UNKNOWN else text


def assign(words: Sequence[Word], captions: Sequence[str], starts: Sequence[int] | None) -> Values:
    """Each caption's value as far as the words leave no doubt; a caption that is missing here is in doubt.

    `starts`: where the captions begin on the screen, if this row is aligned with them.
    """
    texts = [word.text for word in words]
    if starts and len(texts) < len(captions):
        by_place = _by_place(words, captions, starts)
        if by_place is not None:
            return by_place
    ways = []
    for chosen in combinations(range(len(captions)), min(len(texts), len(captions))):
        if all(fits(text, captions[index]) for text, index in zip(texts, chosen, strict=False)):
            way: Values = dict.fromkeys(captions)
            way.update({captions[index]: value(text) for text, index in zip(texts, chosen, strict=False)})
            ways.append(way)
    if not ways or len(texts) > len(captions):
        return {}
    return {caption: ways[0][caption] for caption in captions if all(way[caption] == ways[0][caption] for way in ways)}


def _by_place(words: Sequence[Word], captions: Sequence[str], starts: Sequence[int]) -> Values | None:
    found: Values = dict.fromkeys(captions)
    for word in words:
        before = [index for index, start in enumerate(starts) if word.at >= start - 2]
        if not before or found[captions[before[-1]]] is not None or not fits(word.text, captions[before[-1]]):
            return None
        found[captions[before[-1]]] = word.text
    return {caption: value(text) for caption, text in found.items()}


def separate(texts: Sequence[str], captions: Sequence[str], others: Iterable[str]) -> list[str] | None:
    """What grew together, `0-47,96-1430N/A`, taken apart: the one way that fits the captions and looks like CPUs.

    CPU lists look right if all ranges are equally long, or another row has the same or one that begins where this ends.
    None: there is no such way, or more than one.
    """
    if not texts or len(texts) >= len(captions):
        return None
    known = [pairs for pairs in (ranges(text) for text in others) if pairs]
    found: list[list[str]] = []
    ways = [_grown(text, len(captions)) if _is_grown(text, captions, known) else [[text]] for text in texts]
    for parts in product(*ways):
        way = [piece for part in parts for piece in part]
        if len(way) == len(captions) and all(map(fits, way, captions)):
            cpus = ranges(way[list(captions).index(CPU)]) if CPU in captions else None
            if cpus is None or _plausible(cpus, known):
                found.append(way)
    return found[0] if len(found) == 1 else None


def _is_grown(text: str, captions: Sequence[str], known: list[list[tuple[int, int]]]) -> bool:
    """Whether a word is no value as it is, or a list that doesn't look like CPUs."""
    pairs = ranges(text)
    if pairs is None:
        return not any(fits(text, caption) for caption in captions)
    return (len(pairs) > 1 or len(known) > 0) and "-" in text and not _plausible(pairs, known)


def _plausible(cpus: list[tuple[int, int]], known: list[list[tuple[int, int]]]) -> bool:
    if cpus in known:
        return True
    if len(cpus) > 1:
        return cpus[0][1] > cpus[0][0] and len({high - low for low, high in cpus}) == 1
    return any(cpus[0][1] + 1 == pairs[0][0] or pairs[0][1] + 1 == cpus[0][0] for pairs in known)


def _grown(text: str, most: int) -> list[list[str]]:
    """All ways to cut a word into at most `most` values: unknowns at its end, and digits before them."""
    tail: list[str] = []
    while text.endswith("N/A"):
        text, tail = text[:-3], ["N/A", *tail]
    if not text:
        return [tail] if len(tail) <= most else []
    if len(tail) > most - 1 or len(text) > _MAX_LIST:
        return []
    ways = [[text, *tail]] if ranges(text) else []
    if len(tail) < most - 1:
        # What was appended is a node of one to three digits, or a list of nodes after it: only single ones are told.
        ways += [
            [text[:-digits], text[-digits:], *tail]
            for digits in (1, 2, 3)
            if text[-digits:].isdecimal() and str(int(text[-digits:])) == text[-digits:] and ranges(text[:-digits])
        ]
    return ways


__all__ = ["CPU", "GPU_NUMA", "NUMA", "Values", "assign", "fits", "is_tail", "ranges", "separate", "value"]
