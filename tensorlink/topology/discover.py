"""The machine that this process runs on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tensorlink.settings import Settings
from tensorlink.topology import fabric, nvml, pci, sysfs
from tensorlink.topology.fabric import Wire
from tensorlink.topology.graph import Device, Link, Topology, unique
from tensorlink.topology.labels import platform_labels
from tensorlink.topology.nvml import NvmlGpu
from tensorlink.topology.pci import Place
from tensorlink.topology.sysfs import PciDevice
from tensorlink.topology.text import Warnings

_NVIDIA = "0x10de"
_MAX_DEVICES = 1024


def discover(root: str | Path = "/", labels: Mapping[str, str] | None = None) -> Topology:
    """What the machine has, and how it hangs together, from `/sys`, `/proc` and, for GPUs of NVIDIA, NVML.

    Blocks while it reads some files and the driver answers; needs no privileges; any thread may call it. What cannot be
    found out is None, and what is not there is no error.

    Args:
        root: a folder with a recorded `sys` and `proc`; NVML is asked only of the real one.
        labels: what the machine is labelled with; default: `TENSORLINK_LABELS`, before what the platform tells.

    Raises:
        ValueError: a `TENSORLINK_*` variable cannot be parsed.
    """
    root = Path(root)
    real = root == Path("/")
    warnings = Warnings()
    own = Settings.load().labels if labels is None else labels
    host = {**platform_labels(root, os.environ if real else {}), **own}
    on_pci = sysfs.pci_devices(root)
    seen = nvml.gpus(warnings) if real else []
    cpus = sysfs.cpus(root)
    devices = [*cpus, *_gpus(on_pci, seen), *sysfs.nics(root, on_pci)][:_MAX_DEVICES]
    if len(cpus) == 1:
        devices = [replace(one, numa_node=cpus[0].numa_node) if one.numa_node is None else one for one in devices]
    switches = _switches(devices, on_pci)
    devices, renamed = unique([*devices, *switches.values()])
    if renamed is not None:
        warnings.add(renamed)
    links, more = _links(devices, switches, on_pci, seen, warnings)
    return Topology(
        devices=tuple(replace(one, labels={**host, **one.labels}) for one in [*devices, *more]),
        links=tuple(links),
        source="this machine" if real else str(root),
        labels=host,
        limits=sysfs.limits(root),
        warnings=warnings.all(),
    )


def _gpus(on_pci: Mapping[str, PciDevice], seen: Sequence[NvmlGpu]) -> list[Device]:
    """The GPUs that NVML shows, and those of others on PCI; with no NVML those of NVIDIA on PCI too."""
    found = []
    for gpu in seen:
        on = on_pci.get(gpu.device.pci or "")
        found.append(replace(gpu.device, numa_node=on.place.numa_node, pcie=on.pcie) if on is not None else gpu.device)
    for address, on in sorted(on_pci.items()):
        if on.is_gpu and not (seen and on.vendor == _NVIDIA):
            name, node = f"GPU{len(found)}", on.place.numa_node
            found.append(Device(name=name, kind="gpu", pci=address, numa_node=node, pcie=on.pcie))
    return found


def _switches(devices: Sequence[Device], on_pci: Mapping[str, PciDevice]) -> dict[str, Device]:
    """The PCIe switches above GPUs and NICs, by the address of their port upwards.

    From the top, bridges are a root port, then of each switch the port upwards and the one downwards.
    """
    found: dict[str, Device] = {}
    for device in devices:
        on = on_pci.get(device.pci or "")
        bridges = on.place.bridges if on is not None else ()
        for index in range(1, len(bridges) - 1, 2):
            up = on_pci.get(bridges[index])
            if up is not None and bridges[index] not in found:
                name, node = f"SWITCH{len(found)}", up.place.numa_node
                found[up.address] = Device(name=name, kind="switch", pci=up.address, numa_node=node, pcie=up.pcie)
    return found


def _links(
    devices: list[Device],
    switches: Mapping[str, Device],
    on_pci: Mapping[str, PciDevice],
    seen: Sequence[NvmlGpu],
    warnings: Warnings,
) -> tuple[list[Link], list[Device]]:
    """All links, and the NVSwitches that some of them lead to."""
    links, more = _nvlinks(devices, seen, warnings)
    ends = [device for device in devices if device.kind in ("gpu", "nic") and device.pci in on_pci]
    places = {device.name: on_pci[device.pci].place for device in ends if device.pci is not None}
    nodes = {device.numa_node for device in devices if device.kind == "cpu"}
    places = {name: replace(place, numa_node=_node(name, devices)) for name, place in places.items()}
    wires: dict[str, int | None] = {address: on.bytes_per_s for address, on in on_pci.items()}
    wires |= {device.name: on_pci[device.pci].bytes_per_s for device in ends if device.pci is not None}
    joined = frozenset(frozenset((link.a, link.b)) for link in links)
    links += pci.ways(ends, places, wires, ports=1, nodes=len(nodes), but=joined)
    links += _cpu_ways([device for device in devices if device.kind != "switch"], places, wires)
    links += _switch_wires(ends, switches, places, on_pci)
    return links, more


def _node(name: str, devices: Sequence[Device]) -> int | None:
    return next(device.numa_node for device in devices if device.name == name)


def _nvlinks(devices: Sequence[Device], seen: Sequence[NvmlGpu], warnings: Warnings) -> tuple[list[Link], list[Device]]:
    names = {device.pci: device.name for device in devices if device.kind == "gpu" and device.pci is not None}
    switches: dict[str | None, Device] = {}
    wires = []
    for gpu in seen:
        for (kind, address), count in gpu.nvlinks.items():
            other = names.get(address) if address is not None else None
            if other is None and kind == "switch":
                if address not in switches:
                    name = fabric.switch_name([*devices, *switches.values()])
                    switches[address] = Device(name=name, kind="switch", pci=address)
                other = switches[address].name
            if other is None:
                warnings.add(f"{gpu.device.name} has {count} NVLinks to what this process can't see")
            else:
                wires.append(Wire(gpu=gpu.device.name, other=other, kind="nvlink", count=count, rate=gpu.rate))
    more = list(switches.values())
    return fabric.links(wires, {switch.name for switch in more}, warnings), more


def _cpu_ways(devices: Sequence[Device], places: Mapping[str, Place], wires: Mapping[str, int | None]) -> list[Link]:
    """Ways between a CPU and all else, by NUMA node: `PHB` at its own, `SYS` at another's."""
    found = []
    for index, a in enumerate(devices):
        for b in devices[index + 1 :]:
            if (
                a.kind == "cpu"
                and a.numa_node is not None
                and b.numa_node is not None
                and (b.kind == "cpu" or b.name in places)
            ):
                near = a.numa_node == b.numa_node
                passed = [wires.get(name) for name in (b.name, *places[b.name].bridges)] if b.name in places else [None]
                rate = (
                    min((one for one in passed if one is not None), default=None)
                    if near and None not in passed
                    else None
                )
                found.append(Link(a=a.name, b=b.name, link_class="PHB" if near else "SYS", bytes_per_s=rate))
    return found


def _switch_wires(
    ends: Sequence[Device],
    switches: Mapping[str, Device],
    places: Mapping[str, Place],
    on_pci: Mapping[str, PciDevice],
) -> list[Link]:
    """Wires between a switch and what hangs below it."""
    found = []
    below: list[tuple[tuple[str, ...], Device]] = [(places[device.name].bridges, device) for device in ends]
    below += [(on_pci[address].place.bridges, switch) for address, switch in switches.items()]
    for bridges, device in below:
        above = next((switches[address] for address in reversed(bridges) if address in switches), None)
        if above is not None and device.pci is not None:
            rate = on_pci[device.pci].bytes_per_s
            found.append(Link(a=above.name, b=device.name, link_class=device.pcie or "PCIe", bytes_per_s=rate))
    return found
