"""The graph itself: devices, links between them, and what one asks of it. Values only; nothing here reads anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from tensorlink.topology.classes import closeness

Kind = Literal["cpu", "gpu", "nic", "switch"]
KINDS: tuple[Kind, ...] = ("cpu", "gpu", "nic", "switch")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Links of its own kind that a GPU has, as a source counts them, whether or not their other ends are in the graph."""

    kind: str
    """`nvlink` or `xgmi`."""
    total: int
    by_target: Mapping[str, int] = field(hash=False)
    """Number of links by PCI address of the other end; empty where that isn't known."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A CPU with its memory (one a NUMA node), an accelerator, a NIC or a switch. What a source doesn't tell is None."""

    name: str
    """As the source calls it, and unique in the graph: `GPU0`, `CPU1`, `mlx5_0`, or `NIC3` where a table names it so."""
    kind: Kind
    pci: str | None = None
    """PCI address as `0000:1b:00.0`, in small letters. With `uuid` the identity that outlasts names."""
    uuid: str | None = None
    model: str | None = None
    device: str | None = None
    """What the operating system calls a NIC, `mlx5_0`: of a NIC that a table names `NIC0`, what its legend says."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces of a NIC, `eth0`."""
    numa_node: int | None = None
    numa_affinity: int | str | None = None
    """As stated: a node, or a list such as `0-1`, of which `numa_node` says nothing."""
    cpu_affinity: str | None = None
    """CPUs that are near, or those of a CPU device: `0-31,64-95`."""
    gpu_numa_id: int | None = None
    """The NUMA node that the GPU's own memory is."""
    memory_bytes: int | None = None
    bytes_per_s: int | None = None
    """Rate of a NIC towards the network, one direction."""
    speed_mbps: int | None = None
    """That rate as a source states it, in Mbit/s, however unlikely."""
    pcie: str | None = None
    """Its own PCIe link as it runs now: `PCIe4x16`."""
    virtual: bool = False
    """A NIC that is only software: a bridge, a tunnel, one end of a container's cable."""
    bundle: Bundle | None = None
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True)
class Link:
    """How two devices reach each other. It goes both ways, unless there is another from `b` to `a` that differs.

    A link is a wire, or several bonded ones (`NV18`, `XGMI`, `PCIe5x16`), or a way over several: `PIX` through one PCIe
    switch, `PXB` through several, `PHB` through a host bridge, `NODE` between host bridges of a NUMA node, `SYS` between
    NUMA nodes.
    """

    a: str
    b: str
    link_class: str | None
    bytes_per_s: int | None = None
    """One direction, of all wires together: the public figure, or the narrowest of the way. None where a part has none."""
    count: int | None = None
    """How many wires are bonded."""
    hops: int | None = None
    """How many bridges a way over PCI passes; what ROCm calls hops."""
    weight: int | None = None
    """Distance in the unit of the source."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the cgroups of this process leave it of the machine; None: no limit."""

    cpus: float | None = None
    """CPU time per time."""
    cpuset: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Topology:
    """An immutable machine. Methods are pure and safe from any thread; a device may be named by name, PCI address or UUID."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    source: str = ""
    """What it was read from: `this machine`, `topo -m`, `showtopo`, `NCCL XML`."""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    limits: Limits | None = None
    warnings: tuple[str, ...] = ()
    """What the source says unclearly, and what was left out for that."""

    @cached_property
    def _by_name(self) -> dict[str, Device]:
        found: dict[str, Device] = {}
        for device in self.devices:  # a name goes before the PCI address that several ports of one NIC share
            found[device.name] = device
        for device in self.devices:
            for other in (device.uuid, device.pci, device.device):
                if other:
                    found.setdefault(other, device)
        return found

    @cached_property
    def _by_ends(self) -> dict[str, dict[str, Link]]:
        found: dict[str, dict[str, Link]] = {device.name: {} for device in self.devices}
        for link in self.links:
            found[link.a][link.b] = link
        for link in self.links:
            found[link.b].setdefault(link.a, link)
        return found

    def device(self, name: str) -> Device:
        """Raises: KeyError: there is none of this name, PCI address, UUID or system name."""
        return self._by_name[name]

    def of_kind(self, kind: Kind) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.kind == kind)

    def between(self, a: str, b: str) -> Link | None:
        """The link from `a` to `b`, or None where nothing is known of it. Raises: KeyError: no such device."""
        return self._by_ends[self.device(a).name].get(self.device(b).name)

    def links_of(self, a: str) -> Mapping[str, Link]:
        """All links of a device by the name of the other end. Raises: KeyError: no such device."""
        return self._by_ends[self.device(a).name]

    def nearest(self, a: str, kind: Kind = "nic") -> tuple[Device, ...]:
        """Those of a kind to which the way from `a` is of the nearest class and has the fewest hops, in the graph's order.

        Empty if nothing is known of any. Virtual NICs are left out: whatever rate they claim, they pass through another one.

        Raises:
            KeyError: no such device.
        """
        found: dict[tuple[int, int], list[Device]] = {}
        ends = self.links_of(a)
        for device in self.of_kind(kind):
            link = ends.get(device.name)
            rank = closeness(link.link_class) if link is not None else None
            if link is not None and rank is not None and not device.virtual:
                found.setdefault((rank, link.hops or 0), []).append(device)
        return tuple(found[min(found)]) if found else ()

    def islands(self) -> tuple[tuple[str, ...], ...]:
        """Names of GPUs that reach each other without PCIe (NVLink, XGMI and their like), in groups of two or more."""
        left = {device.name for device in self.of_kind("gpu")}
        groups = []
        for device in self.of_kind("gpu"):
            group, todo = [], [device.name]
            while todo:
                name = todo.pop()
                if name in left:
                    left.remove(name)
                    group.append(name)
                    todo += [other for other, link in self._by_ends[name].items() if closeness(link.link_class) == 0]
            if len(group) > 1:
                groups.append(tuple(sorted(group, key=[one.name for one in self.devices].index)))
        return tuple(groups)

    def to_json(self) -> dict[str, Any]:
        """All of it in dicts, lists, text, numbers and None. A link's class has the key `class`."""
        plain = dataclasses.asdict(self)
        plain["links"] = [
            {("class" if key == "link_class" else key): link[key] for key in link} for link in plain["links"]
        ]
        return plain


def unique(devices: Sequence[Device]) -> tuple[list[Device], str | None]:
    """The devices with a number added to a name that was taken before, `eth0#2`, and a warning if there was one."""
    taken: dict[str, int] = {}
    kept = []
    for device in devices:
        count = taken[device.name] = taken.get(device.name, 0) + 1
        kept.append(device if count == 1 else dataclasses.replace(device, name=f"{device.name}#{count}"))
    again = [name for name, count in taken.items() if count > 1]
    if not again:
        return kept, None
    more = f" and {len(again) - 3} more" if len(again) > 3 else ""
    return kept, f"{', '.join(again[:3])}{more} come several times: the others have a # and a number behind the name"
