"""The values of a path: a hop, a way of several, and a transport with what is predicted of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tensorlink.types import Figure


@dataclass(frozen=True)
class Hop:
    """One part of a way."""

    what: str
    """From where to where, `GPU0 - mlx5_0`; or what both ends share, `memory`."""
    link_class: str | None = None
    """As the topology names it, `NV18` or `PIX`; None: not known, or there is no such name."""
    bytes_per_s: float | None = None
    """One direction; None: nobody knows, so it narrows nothing."""


@dataclass(frozen=True)
class Way:
    """Hops one after the other."""

    hops: tuple[Hop, ...]
    nics: tuple[str, ...] = ()
    """The NICs of the side that it begins at."""

    @cached_property
    def bytes_per_s(self) -> float:
        """Of its narrowest hop, as far as they are known; infinite if none is."""
        return min((hop.bytes_per_s for hop in self.hops if hop.bytes_per_s), default=math.inf)


@dataclass(frozen=True)
class Candidate:
    """A transport between two ends. What is not usable has a reason, and neither way nor figures."""

    transport: str
    usable: bool
    reason: str
    """Why it isn't chosen, in plain words; empty for the one that is."""
    hops: tuple[Hop, ...] = ()
    nics: tuple[str, ...] = ()
    """NICs of this side that its bytes pass."""
    latency_s: float | None = None
    bytes_per_s: float | None = None
    """With `latency_s` what the prediction is made of: declared by both sides and the way between them, or `measured`."""
    setup_s: float | None = None
    """Of a connection, whether or not there is one already."""
    measured: Figure | None = None
    seconds: float | None = None
    """Predicted for the bytes in question."""
