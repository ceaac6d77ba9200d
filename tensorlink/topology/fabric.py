"""Wires between GPUs that are no PCIe, counted by whoever sees one end, made into links."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tensorlink.topology.graph import Device, Link
from tensorlink.topology.text import Warnings


@dataclass(frozen=True, kw_only=True)
class Wire:
    """So many wires from a GPU to another device, as the GPU's side tells."""

    gpu: str
    other: str
    kind: str
    """`nvlink` or `xgmi`."""
    count: int
    rate: int | None
    """Of one of them, bytes per second in one direction."""


def switch_name(devices: Collection[Device]) -> str:
    """A name for one more NVSwitch, that nobody has."""
    taken = {device.name for device in devices}
    return next(name for number in range(len(taken) + 1) if (name := f"NVSWITCH{number}") not in taken)


def links(wires: Sequence[Wire], switches: Collection[str], warnings: Warnings) -> list[Link]:
    """A link for each pair that wires join, directly or by as many to the same switches."""
    sums: dict[tuple[str, str], Wire] = {}
    for wire in wires:
        before = sums.get((wire.gpu, wire.other))
        count = wire.count + (before.count if before is not None else 0)
        sums[wire.gpu, wire.other] = Wire(gpu=wire.gpu, other=wire.other, kind=wire.kind, count=count, rate=wire.rate)
    found: list[Link] = []
    done: set[tuple[str, str]] = set()
    for (a, b), wire in sums.items():
        back = sums.get((b, a))
        differs = back is not None and back.count != wire.count
        if back is not None and differs and (a, b) < (b, a):
            warnings.add(
                f"{a} has {wire.count} links to {b}, which has {back.count}: both are kept, each for its direction"
            )
        if differs or (b, a) not in done:
            done.add((a, b))
            found.append(_link(a, b, wire.count, wire))
    through = _through(sums, switches)
    found += [_link(a, b, count, wire) for (a, b), (count, wire) in through.items() if (a, b) not in sums]
    return found


def _through(
    sums: Mapping[tuple[str, str], Wire], switches: Collection[str]
) -> dict[tuple[str, str], tuple[int, Wire]]:
    """Pairs of GPUs by how many wires each has to switches that both have."""
    by_gpu: dict[str, dict[str, Wire]] = {}
    for (gpu, other), wire in sums.items():
        if other in switches:
            by_gpu.setdefault(gpu, {})[other] = wire
    found = {}
    gpus = list(by_gpu)
    for index, a in enumerate(gpus):
        for b in gpus[index + 1 :]:
            shared = [switch for switch in by_gpu[a] if switch in by_gpu[b]]
            count = sum(min(by_gpu[a][switch].count, by_gpu[b][switch].count) for switch in shared)
            if count:
                found[a, b] = count, by_gpu[a][shared[0]]
    return found


def _link(a: str, b: str, count: int, wire: Wire) -> Link:
    link_class = "XGMI" if wire.kind == "xgmi" else f"NV{count}"
    return Link(
        a=a, b=b, link_class=link_class, bytes_per_s=wire.rate * count if wire.rate and count else None, count=count
    )
