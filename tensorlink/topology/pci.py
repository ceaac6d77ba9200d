"""Ways through a tree of PCI bridges: which class each is of, and how wide its narrowest wire."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorlink.topology.graph import Device, Link

ADDRESS = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")


@dataclass(frozen=True)
class Place:
    """Where a device hangs: below which host bridge or CPU, and behind which bridges, from there on."""

    root: str
    bridges: tuple[str, ...] = ()
    numa_node: int | None = None


def address(text: str | None) -> str | None:
    """A PCI address in the form of Linux, `0000:1b:00.0`, of the forms that tools write it in; None if it is none."""
    match = ADDRESS.fullmatch(text or "")
    return f"{int(match[1] or '0', 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower() if match else None


def way(a: Place, b: Place, ports: int, nodes: int | None) -> str | None:
    """The class of the way between two devices, by the words of `nvidia-smi topo`.

    `ports`: how many bridges of one switch a way passes below the one that both share: 1 where each port of a switch is a
    bridge, as in Linux, 0 where a whole switch is one, as in NCCL's files. `nodes`: how many NUMA nodes there are.
    """
    if a.root != b.root:
        if a.numa_node is None or b.numa_node is None:
            return "NODE" if nodes == 1 else None
        return "NODE" if a.numa_node == b.numa_node else "SYS"
    shared = _shared(a, b)
    if not shared:
        return "PHB"
    return "PIX" if max(len(a.bridges), len(b.bridges)) - shared <= ports else "PXB"


def _shared(a: Place, b: Place) -> int:
    count = 0
    for one, other in zip(a.bridges, b.bridges, strict=False):
        if one != other:
            break
        count += 1
    return count


def _hops(a: Place, b: Place) -> int:
    """How many bridges there are between two devices, the shared one counted once."""
    shared = _shared(a, b)
    return len(a.bridges) + len(b.bridges) - 2 * shared + (shared > 0)


def narrowest(a: Device, b: Device, places: Mapping[str, Place], wires: Mapping[str, int | None]) -> int | None:
    """The rate of the narrowest wire between two devices of one root. `wires`: what each hangs by, if it does."""
    shared = _shared(places[a.name], places[b.name])
    passed = [a.name, b.name, *places[a.name].bridges[shared:], *places[b.name].bridges[shared:]]
    rates = [wires[name] for name in passed if name in wires]
    known = [rate for rate in rates if rate is not None]
    return min(known) if known and len(known) == len(rates) else None


def ways(
    devices: Sequence[Device],
    places: Mapping[str, Place],
    wires: Mapping[str, int | None],
    ports: int,
    nodes: int | None,
    but: frozenset[frozenset[str]] = frozenset(),
) -> list[Link]:
    """Links for all pairs of devices that have a place, without those pairs that a better one joins already."""
    placed = [device for device in devices if device.name in places]
    found = []
    for index, a in enumerate(placed):
        for b in placed[index + 1 :]:
            if frozenset((a.name, b.name)) in but:
                continue
            link_class = way(places[a.name], places[b.name], ports, nodes)
            if link_class is not None:
                near = places[a.name].root == places[b.name].root
                rate = narrowest(a, b, places, wires) if near else None
                hops = _hops(places[a.name], places[b.name])
                found.append(Link(a=a.name, b=b.name, link_class=link_class, bytes_per_s=rate, hops=hops))
    return found
