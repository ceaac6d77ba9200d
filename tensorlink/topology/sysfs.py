"""What Linux tells of a machine under `/sys` and `/proc`. Each reader takes the root folder, so that a recorded one will do."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tensorlink.settings import memory_limit_bytes
from tensorlink.topology import rates
from tensorlink.topology.graph import Device, Limits
from tensorlink.topology.pci import ADDRESS, Place

_MAX_FILE = 1 << 16
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_DISPLAY = "0x0300"
_GPU_MAKERS = ("0x10de", "0x1002", "0x8086")
"""Of those whose class is a mere display, only these compute: others draw the console of a server."""
_GPU_CLASSES = ("0x0302", "0x0380", "0x1200")
_NIC_CLASS = "0x02"
_LOOPBACK = "772"


@dataclass(frozen=True)
class PciDevice:
    """A device on PCI, and where it hangs."""

    address: str
    pci_class: str
    vendor: str
    place: Place
    pcie: str | None
    bytes_per_s: int | None
    """Of its link upwards: the fastest that both ends can, at the width it has. It isn't the speed of now, which an idle
    GPU lowers."""

    @property
    def is_gpu(self) -> bool:
        return self.pci_class.startswith(_GPU_CLASSES) or (
            self.pci_class.startswith(_DISPLAY) and self.vendor in _GPU_MAKERS
        )


def text(path: Path) -> str | None:
    """A file's text without its last line break; None where there is none to be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE).decode(errors="replace").strip()
    except OSError:
        return None


def number(path: Path) -> int | None:
    """A file's whole number; None where there is none, or it is negative, which stands for "unknown" there."""
    said = text(path) or ""
    return int(said) if said.isascii() and said.isdecimal() and len(said) < 19 else None


def cpus(root: Path) -> list[Device]:
    """A device a NUMA node that has CPUs; one for the whole machine where Linux knows of none.

    Nodes of memory alone are none: they are the memory of GPUs (eight a GPU on Grace), or behind CXL.
    """
    folder = root / "sys/devices/system/node"
    found = []
    for node in sorted(_numbers(folder, "node")):
        one = folder / f"node{node}"
        total = re.search(r"MemTotal:\s*(\d{1,15}) kB", text(one / "meminfo") or "")
        near = text(one / "cpulist") or None
        memory = int(total[1]) << 10 if total else None
        if near:
            found.append(Device(name=f"CPU{node}", kind="cpu", numa_node=node, cpu_affinity=near, memory_bytes=memory))
    online = text(root / "sys/devices/system/cpu/online") or None
    return found or [Device(name="CPU0", kind="cpu", cpu_affinity=online)]


def _numbers(folder: Path, prefix: str) -> list[int]:
    return [int(name.removeprefix(prefix)) for name in names(folder) if re.fullmatch(rf"{prefix}\d{{1,6}}", name)]


def names(folder: Path) -> list[str]:
    """What a folder has, in order; nothing if there is none."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def pci_devices(root: Path) -> dict[str, PciDevice]:
    """All devices on PCI by address."""
    folder = root / "sys/bus/pci/devices"
    return {name: _pci_device(folder, name) for name in names(folder) if ADDRESS.fullmatch(name)}


def _pci_device(folder: Path, name: str) -> PciDevice:
    path = Path(os.path.realpath(folder / name))
    bridges = tuple(part for part in path.parent.parts if ADDRESS.fullmatch(part))
    host = next((part for part in path.parts if _HOST_BRIDGE.fullmatch(part)), "")
    pcie, rate = _pcie(path, path.parent if bridges else None)
    place = Place(host, bridges, number(path / "numa_node"))
    return PciDevice(name, text(path / "class") or "", text(path / "vendor") or "", place, pcie, rate)


def _pcie(path: Path, above: Path | None) -> tuple[str | None, int | None]:
    """Class and rate of the link between a device and the bridge above."""
    width = text(path / "current_link_width")
    speeds = [text(end / "max_link_speed") for end in (path, above) if end is not None]
    options = [option for option in (rates.pcie(speed, width) for speed in speeds) if option[1] is not None]
    return min(options, key=lambda option: option[1] or 0) if options else (None, None)


def pci_address(path: Path) -> str | None:
    """The PCI device that a folder of `/sys/class/*/*` belongs to; None: it is virtual, or on another bus."""
    found = [part for part in Path(os.path.realpath(path)).parts if ADDRESS.fullmatch(part)]
    return found[-1] if found else None


def nics(root: Path, found: Mapping[str, PciDevice]) -> list[Device]:
    """RDMA devices under their own names, with the interfaces on the same PCI device; then interfaces that have none.

    Virtual interfaces come only where nothing else leads out, as in most containers; the loopback never does.
    """
    interfaces = [_interface(root / "sys/class/net" / name) for name in names(root / "sys/class/net")]
    named = [one for one in interfaces if one is not None]
    devices = []
    taken: set[str] = set()
    for name in names(root / "sys/class/infiniband"):
        folder = root / "sys/class/infiniband" / name
        address = pci_address(folder)
        own = tuple(one.name for one in named if address is not None and one.pci == address)
        taken.update(own)
        mbps = _infiniband_mbps(folder)
        device = Device(
            name=name,
            kind="nic",
            device=name,
            pci=address,
            interfaces=own,
            speed_mbps=mbps,
            bytes_per_s=rates.network(mbps),
        )
        devices.append(device)
    devices += [one for one in named if not one.virtual and one.name not in taken]
    return [_placed(device, found) for device in devices or [one for one in named if one.virtual]]


def _placed(device: Device, found: Mapping[str, PciDevice]) -> Device:
    on = found.get(device.pci or "")
    return device if on is None else replace(device, numa_node=on.place.numa_node, pcie=on.pcie)


def _interface(folder: Path) -> Device | None:
    if text(folder / "type") in (None, _LOOPBACK):
        return None
    mbps = number(folder / "speed") or None
    name, address = folder.name, pci_address(folder)
    virtual = "/devices/virtual/" in os.path.realpath(folder)
    return Device(
        name=name,
        kind="nic",
        device=name,
        pci=address,
        interfaces=(name,),
        speed_mbps=mbps,
        bytes_per_s=None if virtual else rates.network(mbps),
        virtual=virtual,
    )


def _infiniband_mbps(folder: Path) -> int | None:
    """All ports that are up together."""
    total = 0
    for port in names(folder / "ports"):
        rate = re.match(r"(\d{1,5}(?:\.\d)?) Gb/sec", text(folder / "ports" / port / "rate") or "")
        if rate and "ACTIVE" in (text(folder / "ports" / port / "state") or ""):
            total += int(float(rate[1]) * 1000)
    return total or None


def limits(root: Path) -> Limits:
    """What the cgroups of this process leave it. Memory is that of the machine where nothing limits it."""
    groups = root / "sys/fs/cgroup"
    status = text(root / "proc/self/status") or ""
    allowed = re.search(r"^Cpus_allowed_list:\s*([\d,-]{1,4096})$", status, re.MULTILINE)
    memory = memory_limit_bytes(groups, root / "proc/self/cgroup")
    return Limits(cpus=_cpu_quota(root, groups), cpuset=allowed[1] if allowed else None, memory_bytes=memory)


def _cpu_quota(root: Path, groups: Path) -> float | None:
    """The smallest quota of the cgroups that this process lies in, in CPUs."""
    found = []
    for line in (text(root / "proc/self/cgroup") or "0::/").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        own = groups / ("cpu" if controllers else "") / path.lstrip("/")
        found += [_quota(folder) for folder in (own, *own.parents) if folder.is_relative_to(groups)]
    return min((quota for quota in found if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    both = (text(folder / "cpu.max") or "").split()  # version 2, then 1
    both = both or [text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    return int(both[0]) / int(both[1]) if len(both) == 2 and all(map(str.isdecimal, both)) and int(both[1]) else None
