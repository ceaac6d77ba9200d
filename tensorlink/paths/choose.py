"""The selector: every transport between two ends with what is predicted of it, the fastest first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tensorlink.paths.ends import End
from tensorlink.paths.model import Candidate
from tensorlink.paths.offers import Offer, offers
from tensorlink.paths.report import PathReport, duration
from tensorlink.types import Figure

EXPECTED_USES = 100
"""Transfers that a connection is expected to serve: each bears that share of what it costs to set it up."""

_NONE: Mapping[str, Any] = MappingProxyType({})


def choose(
    local: End,
    remote: End,
    nbytes: int,
    *,
    reasons: Mapping[str, str] = _NONE,
    measured: Mapping[str, Figure] = _NONE,
    connected: Collection[str] = (),
    allowed: Callable[[str], bool] | None = None,
) -> PathReport:
    """Every transport for `nbytes` bytes between two ends, the chosen one first.

    Predicted are `latency + nbytes / bandwidth + set-up / EXPECTED_USES` seconds; the set-up counts nothing for those that
    are `connected`. What both sides declare and the narrowest hop bound the bandwidth; a figure in `measured` replaces
    latency and bandwidth. What takes equally long is ordered by name, so both sides choose alike.

    Args:
        reasons: transports that are known not to work, and why.
        allowed: whether a transport may be used; default: any.

    Raises:
        KeyError: an end's device isn't in its topology.
        ValueError: `nbytes` is negative, or an end is neither a cpu nor a gpu.
    """
    if nbytes < 0:
        raise ValueError(f"a path is chosen for 0 bytes or more, not for {nbytes}")
    known = offers(local, remote)
    usable: list[tuple[float, str, Offer, Figure | None]] = []
    unusable: list[Candidate] = []
    for name in known if known.keys() >= reasons.keys() else sorted({*known, *reasons}):
        if why := reasons.get(name):
            unusable.append(Candidate(name, False, why))
        elif isinstance(found := known[name], Candidate):
            unusable.append(found)
        elif allowed is not None and not allowed(name):
            unusable.append(Candidate(name, False, "it isn't allowed"))
        else:
            usable.append(_predict(name, found, nbytes, measured.get(name), name in connected))
    usable.sort()  # names differ, so no two are compared further
    candidates = (*_told(usable), *unusable)
    return PathReport("", nbytes, candidates, candidates[0] if usable else None)


def _predict(
    name: str, found: Sequence[Offer], nbytes: int, figure: Figure | None, connected: bool
) -> tuple[float, str, Offer, Figure | None]:
    """Seconds by the fastest of a transport's ways."""
    best, least = found[0], None
    if figure is not None and not figure.bytes_per_s > 0:
        figure = None
    for offer in found:
        fact = figure or offer
        seconds = fact.latency_s + nbytes / fact.bytes_per_s + (0.0 if connected else offer.setup_s / EXPECTED_USES)
        if least is None or seconds < least:
            best, least = offer, seconds
    assert least is not None
    return least, name, best, figure


def _told(usable: Sequence[tuple[float, str, Offer, Figure | None]]) -> list[Candidate]:
    """Candidates, each but the first with the reason why it isn't chosen."""
    told: list[Candidate] = []
    for seconds, name, offer, figure in usable:
        fact, way = figure or offer, offer.way
        why = _slower(seconds, *usable[0][:2]) if told else ""
        facts = (fact.latency_s, fact.bytes_per_s, offer.setup_s, figure, seconds)
        told.append(Candidate(name, True, why, way.hops, way.nics, *facts))
    return told


def _slower(seconds: float, least: float, first: str) -> str:
    if seconds == least:
        return f"no faster than {first}, whose name comes first"
    return f"{duration(seconds)} against {duration(least)} by {first}"
