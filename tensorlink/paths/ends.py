"""One side of a path, and its ways out to the network. They depend on that side alone, so each is found once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from tensorlink.paths.model import Hop, Way
from tensorlink.topology import Device, Topology
from tensorlink.types import Link


@dataclass(frozen=True)
class End:
    """One side of a path. A value; keep it, since what it has found out about its ways is kept with it."""

    host: str
    """Identity of the host: equal where it is the same."""
    links: tuple[Link, ...]
    """What its transports say of themselves."""
    topology: Topology | None = None
    device: str = "cpu"
    """Where the bytes lie: a CPU or an accelerator of the topology, `CPU1`, `GPU0`; `cpu`: memory of no known CPU."""

    def __hash__(self) -> int:
        """Of what is small: a topology has hundreds of parts, and is compared only where all this is equal."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.host, self.device, self.links))

    def __getstate__(self) -> dict[str, Any]:
        """What was found out stays here: a hash of text means nothing in another process."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self)}

    @cached_property
    def by_transport(self) -> Mapping[str, tuple[Link, ...]]:
        return {
            name: tuple(link for link in self.links if link.transport == name)
            for name in dict.fromkeys(link.transport for link in self.links)
        }

    @cached_property
    def place(self) -> Device | None:
        """The device in the topology; None: there is no topology, or it may be any of several CPUs.

        Raises: KeyError: the topology has no such device.
        """
        if self.topology is None:
            return None
        if self.device != "cpu":
            return self.topology.device(self.device)
        cpus = self.topology.of_kind("cpu")
        return cpus[0] if len(cpus) == 1 else None

    @cached_property
    def kind(self) -> str:
        """Of its memory: `cpu` or `gpu`. Raises: KeyError: as `place`; ValueError: such a device has no memory."""
        kind = self.place.kind if self.place is not None else "cpu" if self.device.lower().startswith("cpu") else "gpu"
        if kind not in ("cpu", "gpu"):
            raise ValueError(f"a path begins and ends at a cpu or a gpu, and {self.device} is a {kind}")
        return kind

    @cached_property
    def leaving(self) -> tuple[Way, Way]:
        """The ways to the network: over one NIC, and over all that are equally near."""
        near = self._nics
        fastest = sorted(near, key=lambda nic: -(nic.bytes_per_s or 0))[:1]  # of those the first in the graph's order
        return self._out(fastest), self._out(near)

    @cached_property
    def arriving(self) -> tuple[Way, Way]:
        """The same ways from the network to the device."""
        one, every = self.leaving
        return _turned(one), _turned(every)

    @cached_property
    def _nics(self) -> Sequence[Device]:
        """The real NICs that are nearest. Where nothing says which are, all that can be."""
        if self.topology is None:
            return ()
        cpus = self.topology.of_kind("cpu")
        devices = [self.place] if self.place is not None else cpus
        found = {nic.name: nic for device in devices for nic in self.topology.nearest(device.name)}
        return list(found.values()) or [nic for nic in self.topology.of_kind("nic") if not nic.virtual]

    def _out(self, nics: Sequence[Device]) -> Way:
        if not nics:
            return Way((Hop(f"{self.device} - network"),))
        names = tuple(nic.name for nic in nics)
        said = "+".join(names)
        first = Hop(f"{self.device} - {said}", self._class_to(nics), self._rate_to(nics))
        rates = [nic.bytes_per_s for nic in nics]
        return Way((first, Hop(f"{said} - network", None, _sum(rates))), names)

    def _class_to(self, nics: Sequence[Device]) -> str | None:
        """The class of the way to these NICs, if it is one and the same."""
        if self.topology is None or self.place is None:
            return None
        ways = [self.topology.between(self.place.name, nic.name) for nic in nics]
        classes = {way.link_class if way is not None else None for way in ways}
        return classes.pop() if len(classes) == 1 else None

    def _rate_to(self, nics: Sequence[Device]) -> float | None:
        """To several NICs the ways of a CPU add up; those of an accelerator share its own wire, so the widest counts."""
        if self.topology is None or self.place is None:
            return None
        ways = [self.topology.between(self.place.name, nic.name) for nic in nics]
        rates = [way.bytes_per_s if way is not None else None for way in ways]
        if self.kind == "cpu":
            return _sum(rates)
        known = [rate for rate in rates if rate is not None]
        return max(known) if len(known) == len(rates) else None


def _sum(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if len(known) == len(rates) else None


def _turned(way: Way) -> Way:
    hops = []
    for hop in reversed(way.hops):
        a, _, b = hop.what.rpartition(" - ")
        hops.append(Hop(f"{b} - {a}", hop.link_class, hop.bytes_per_s))
    return Way(tuple(hops), way.nics)
