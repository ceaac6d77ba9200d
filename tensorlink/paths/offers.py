"""What each transport offers between two ends, whatever the size: found once for a pair of ends, and kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from tensorlink.paths.ends import End
from tensorlink.paths.model import Candidate, Way
from tensorlink.paths.route import medium, route
from tensorlink.types import Link


@dataclass(frozen=True)
class Offer:
    """A way of a transport, with what both sides and the way itself declare."""

    way: Way
    latency_s: float
    bytes_per_s: float
    setup_s: float


@lru_cache(maxsize=256)
def offers(local: End, remote: End) -> Mapping[str, tuple[Offer, ...] | Candidate]:
    """By the name of the transport, in order: its ways, or that it has none, and why.

    Raises: KeyError, ValueError: as `choose`.
    """
    names = sorted({*local.by_transport, *remote.by_transport})
    return {name: _offers(local, remote, name) for name in names}


def _offers(local: End, remote: End, name: str) -> tuple[Offer, ...] | Candidate:
    found = list(_tried(local, remote, name))
    good = tuple(one for one in found if isinstance(one, Offer))
    return good or next(Candidate(name, False, one) for one in found if isinstance(one, str))


def _tried(local: End, remote: End, name: str) -> Iterator[Offer | str]:
    ours, theirs = local.by_transport.get(name, ()), remote.by_transport.get(name, ())
    if not ours or not theirs:
        yield "this side doesn't have it" if not ours else "the other side doesn't have it"
        return
    fits = [(a, b) for a in ours for b in theirs if a.reach == b.reach and medium(a) == medium(b)]
    if not fits:
        yield "the two sides use it in different ways"
    for a, b in fits:
        yield _hindrance(local, remote, a, b) or _offer(local, remote, a, b)


def _hindrance(local: End, remote: End, a: Link, b: Link) -> str | None:
    """Why these links of two ends make no path."""
    if a.unavailable or b.unavailable:
        return a.unavailable or f"not at the other side: {b.unavailable}"
    if a.reach != "network" and local.host != remote.host:
        return "it is on another host"
    for end, link in ((local, a), (remote, b)):
        if end.kind not in link.devices:
            return f"it moves {' and '.join(link.devices)} memory only, and {end.device} is a {end.kind}"
    if not min(a.bytes_per_s, b.bytes_per_s) > 0:
        return "it claims no bandwidth"
    return None


def _offer(local: End, remote: End, a: Link, b: Link) -> Offer:
    way = route(local, remote, a if b.stripes else b)  # it stripes where both can
    bandwidth = min(a.bytes_per_s, b.bytes_per_s, way.bytes_per_s)
    return Offer(way, max(a.latency_s, b.latency_s), bandwidth, max(a.setup_s, b.setup_s))
