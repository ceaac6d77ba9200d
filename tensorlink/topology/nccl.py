"""Topology files of NCCL and RCCL: what `NCCL_TOPO_DUMP_FILE` writes, and what clouds hand out for `NCCL_TOPO_FILE`.

There a `<pci>` with others below is a switch, ports and all; a `<cpu>` is a NUMA node; the others are told apart by what they
contain, `<gpu>` or `<nic>`, or else by their PCI class. Two GPUs with NVLinks to the same NVSwitches are joined by as many.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tensorlink.errors import TopologyError
from tensorlink.topology import fabric, pci, rates, xml
from tensorlink.topology.fabric import Wire
from tensorlink.topology.graph import Bundle, Device, Kind, Link, Topology, unique
from tensorlink.topology.pci import Place
from tensorlink.topology.text import Warnings
from tensorlink.topology.xml import Element

MAX_DEVICES = 512

_GPU_CLASSES = ("0x03", "0x12")
_NIC_CLASS = "0x02"
_BRIDGE_CLASS = "0x0604"
_CPU_TARGET = "0x068001"  # the CPU's end of an NVLink
_SWITCH_TARGET = "0x0680"
_WIRES = ("nvlink", "xgmi")
_PARENTS = {"cpu": {"system"}, "pci": {"cpu", "pci"}, "gpu": {"pci"}, "nic": {"cpu", "pci"}, "net": {"nic"}}
"""Which elements an element may stand in."""
_NIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,63}")


@dataclass
class _Machine:
    warnings: Warnings
    devices: list[Device] = field(default_factory=list)
    places: list[Place | None] = field(default_factory=list)
    """Of each device; None: it isn't on PCI."""
    rates: list[int | None] = field(default_factory=list)
    """Of the wire that each device hangs by."""
    parents: list[int | None] = field(default_factory=list)
    wires: list[tuple[int, Element]] = field(default_factory=list)
    """Elements of NVLinks and XGMI, by the GPU they are of."""
    elements: dict[int, Element] = field(default_factory=dict)

    def add(self, device: Device, place: Place | None, rate: int | None, parent: int | None, element: Element) -> int:
        if len(self.devices) >= MAX_DEVICES:
            raise TopologyError(f"a machine has at most {MAX_DEVICES} devices here", line=element.line, column=1)
        self.devices.append(device)
        self.places.append(place)
        self.rates.append(rate)
        self.parents.append(parent)
        self.elements[len(self.devices) - 1] = element
        return len(self.devices) - 1

    def count(self, kind: Kind, prefix: str) -> int:
        return sum(device.kind == kind and device.name.startswith(prefix) for device in self.devices)


def read(text: str) -> Topology:
    """The machine of a file. Names are `CPU0` by NUMA node, `GPU0` by the file's `dev`, and a NIC's own.

    Raises:
        TopologyError: it isn't such a file, or isn't well-formed XML, as where it was cut off, or a link has no count; it
            names line and column.
    """
    root = xml.parse(text)
    if root.tag != "system":
        what = (
            "a file of NCCL's graphs, not of a topology" if root.tag == "graphs" else f"no topology: <{root.tag[:40]}>"
        )
        raise TopologyError(f"this is {what}", line=root.line, column=1)
    machine = _Machine(Warnings())
    for index, cpu in enumerate(root.of("cpu")):
        _cpu(cpu, index, machine)
    _misplaced(root, machine)
    if not machine.devices:
        raise TopologyError("the file has no <cpu>, so no device has a place", line=root.line, column=1)
    machine.devices, renamed = unique(machine.devices)
    if renamed is not None:
        machine.warnings.add(renamed)
    links = _links(machine)
    return Topology(
        devices=tuple(machine.devices), links=tuple(links), source="NCCL XML", warnings=machine.warnings.all()
    )


def _cpu(element: Element, index: int, machine: _Machine) -> None:
    node = element.number("numaid")
    mask = cpu_list(element.get("affinity"))
    if mask is None and element.get("affinity"):
        machine.warnings.add("the affinity of a CPU is no mask of CPUs: left out", element.line)
    name = f"CPU{index if node is None else node}"
    device = Device(name=name, kind="cpu", numa_node=node, cpu_affinity=mask or None)
    root = f"cpu {index}"
    parent = machine.add(device, Place(root, (), node), None, None, element)
    _below(element, Place(root, (), node), parent, machine)


def _misplaced(root: Element, machine: _Machine) -> None:
    """Warns of devices that stand where none can: they are in no graph."""
    for parent in root.all():
        for child in parent.of(*_PARENTS):
            if parent.tag not in _PARENTS[child.tag]:
                said = f"a <{child.tag}> inside <{parent.tag[:40]}> has no place: left out"
                machine.warnings.add(f"column {child.column}: {said}", child.line)


def _bridge(index: int) -> str:
    """What a switch is called among wires: no name of a device has a blank."""
    return f"switch {index}"


def _below(element: Element, place: Place, parent: int, machine: _Machine) -> None:
    """Adds what hangs below a CPU or a switch."""
    for child in element.children:
        if child.tag == "nic":
            for net in child.of("net"):
                _net(net, None, place, parent, machine)
        elif child.tag == "pci":
            _pci(child, place, parent, machine)


def _pci(element: Element, place: Place, parent: int, machine: _Machine) -> None:
    busid = pci.address(element.get("busid"))
    if busid is None:
        machine.warnings.add(f"{(element.get('busid') or '')[:40]!r} is no PCI address", element.line)
    pcie, rate = rates.pcie(element.get("link_speed"), element.get("link_width"))
    pci_class = element.get("class") or ""
    gpus, nics = list(element.of("gpu")), list(element.of("nic"))
    plain = Device(name="", kind="switch", pci=busid, numa_node=place.numa_node, pcie=pcie)
    if gpus or (pci_class.startswith(_GPU_CLASSES) and not nics):
        _gpu(element, gpus[0] if gpus else None, plain, place, rate, parent, machine)
    elif nics or pci_class.startswith(_NIC_CLASS):
        nets = [net for nic in nics for net in nic.of("net")]
        for net in nets:
            _net(net, plain, place, parent, machine, rate)
        if not nets:
            nic = dataclasses.replace(plain, name=f"NIC{machine.count('nic', 'NIC')}", kind="nic")
            machine.add(nic, place, rate, parent, element)
    elif pci_class.startswith(_BRIDGE_CLASS) or any(element.of("pci")):
        switch = dataclasses.replace(plain, name=f"SWITCH{machine.count('switch', 'SWITCH')}")
        own = machine.add(switch, place, rate, parent, element)
        below = Place(place.root, (*place.bridges, _bridge(own)), place.numa_node)
        _below(element, below, own, machine)
    elif not pci_class:
        said = f"column {element.column}: a <pci> without a class and with nothing in it is left out"
        machine.warnings.add(said, element.line)


def _gpu(
    element: Element, gpu: Element | None, plain: Device, place: Place, rate: int | None, parent: int, machine: _Machine
) -> None:
    number = gpu.number("dev") if gpu is not None else None
    name = f"GPU{machine.count('gpu', 'GPU') if number is None else number}"
    bundle = _bundle(gpu) if gpu is not None else None
    device = dataclasses.replace(plain, name=name, kind="gpu", bundle=bundle)
    own = machine.add(device, place, rate, parent, gpu if gpu is not None else element)
    machine.wires += [(own, wire) for wire in gpu.of(*_WIRES)] if gpu is not None else []


def _bundle(gpu: Element) -> Bundle | None:
    wires = list(gpu.of(*_WIRES))
    targets: Counter[str] = Counter()
    for wire in wires:
        targets[pci.address(wire.get("target")) or "?"] += wire.needed("count")
    return Bundle(kind=wires[0].tag, total=sum(targets.values()), by_target=dict(targets)) if wires else None


def _net(
    net: Element, port: Device | None, place: Place, parent: int, machine: _Machine, rate: int | None = None
) -> None:
    """A port of a NIC, or, with no PCI device around it, what has none: a virtual interface as a rule."""
    speed = net.number("speed")
    known = rates.network(speed)
    name = net.get("name") or ""
    if not _NIC_NAME.fullmatch(name):
        name = f"NIC{machine.count('nic', 'NIC')}"
        machine.warnings.add(f"a NIC has no proper name: it is called {name}", net.line)
    if known is None:
        machine.warnings.add(f"{name}: no port has {net.get('speed')} Mbit/s, so its rate is unknown", net.line)
    base = port or Device(name="", kind="nic", numa_node=place.numa_node, virtual=True)
    device = dataclasses.replace(base, name=name, kind="nic", device=name, bytes_per_s=known, speed_mbps=speed)
    machine.add(device, place if port else None, rate, parent, net)


def cpu_list(mask: str | None) -> str | None:
    """`0000000f,ff000000` as `24-35`; empty for a mask of none; None if it is no mask."""
    bits = 0
    if mask is None or len(mask) > 4096:
        return None
    for word in mask.split(","):
        if not 0 < len(word) <= 8 or not all(char in "0123456789abcdefABCDEF" for char in word):
            return None
        bits = bits << 32 | int(word, 16)
    parts, at = [], 0
    while bits >> at:
        if bits >> at & 1:
            end = at
            while bits >> end + 1 & 1:
                end += 1
            parts.append(str(at) if at == end else f"{at}-{end}")
            at = end
        at += 1
    return ",".join(parts)


def _links(machine: _Machine) -> list[Link]:
    links = _fabric(machine)
    names = [device.name for device in machine.devices]
    joined = frozenset(frozenset((link.a, link.b)) for link in links)
    for index, (device, place, parent) in enumerate(zip(machine.devices, machine.places, machine.parents, strict=True)):
        if parent is None:
            continue
        if place is None:
            links.append(Link(a=names[parent], b=device.name, link_class=None))
        elif "switch" in (device.kind, machine.devices[parent].kind):
            link = Link(
                a=names[parent], b=device.name, link_class=device.pcie or "PCIe", bytes_per_s=machine.rates[index]
            )
            links.append(link)
    ends = [device for device in machine.devices if device.kind != "switch"]
    places = {name: place for name, place in zip(names, machine.places, strict=True) if place is not None}
    wires: dict[str, int | None] = dict(zip(names, machine.rates, strict=True))
    for index, device in enumerate(machine.devices):
        wires[_bridge(index)] = machine.rates[index]
        if device.kind == "cpu":
            wires.pop(device.name)
    nodes = {device.numa_node for device in machine.devices if device.kind == "cpu"}
    for link in pci.ways(ends, places, wires, ports=0, nodes=len(nodes), but=joined):
        links.append(link)
    return links


def _fabric(machine: _Machine) -> list[Link]:
    """Links of NVLink and XGMI: to other GPUs, to switches and what is joined through these, to CPUs."""
    by_address = {device.pci: device.name for device in machine.devices if device.kind == "gpu" and device.pci}
    switches: dict[str, str] = {}
    wires = []
    for index, element in machine.wires:
        name = machine.devices[index].name
        other = _other_end(machine, index, element, by_address, switches)
        if other is not None:
            rate = _wire_rate(element.tag, machine.elements[index])
            wires.append(Wire(gpu=name, other=other, kind=element.tag, count=element.needed("count"), rate=rate))
    return fabric.links(wires, set(switches.values()), machine.warnings)


def _other_end(
    machine: _Machine, index: int, wire: Element, by_address: Mapping[str, str], switches: dict[str, str]
) -> str | None:
    """The name of what a wire leads to. A switch that it is the first to name becomes a device."""
    device, tclass = machine.devices[index], wire.get("tclass") or ""
    target = pci.address(wire.get("target")) or "?"
    if target == device.pci:
        machine.warnings.add(f"{device.name} has links to itself: where they lead isn't known", wire.line)
    elif target in by_address:
        return by_address[target]
    elif tclass.startswith(_CPU_TARGET):
        parent = machine.parents[index]
        while parent is not None and machine.devices[parent].kind != "cpu":
            parent = machine.parents[parent]
        return machine.devices[parent].name if parent is not None else None
    elif tclass.startswith(_SWITCH_TARGET) and target != "?":
        if target not in switches:
            switches[target] = fabric.switch_name(machine.devices)
            machine.add(Device(name=switches[target], kind="switch", pci=target), None, None, None, wire)
        return switches[target]
    else:
        machine.warnings.add(f"{device.name} has links to {target}, which isn't in the file", wire.line)
    return None


def _wire_rate(kind: str, gpu: Element) -> int | None:
    return rates.xgmi(gpu.get("gcn")) if kind == "xgmi" else rates.nvlink(capability=gpu.number("sm"))
