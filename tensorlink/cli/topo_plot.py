"""The drawing of `tensorlink topo --plot`: a box a NUMA node, GPUs in it, below each the NIC that is next to it.

What joins GPUs without PCIe is green and above them, as one bar where all are joined alike. The way between NUMA nodes, the slow
hop, is red and below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorlink.topology import Device, Link, Topology
from tensorlink.topology.classes import closeness

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = ("#2e8b57", "#1f77b4", "#1f77b4", "#c9a000", "#e07b00", "#c62828")
_FAR = 4  # from this closeness on, a NIC isn't next to its GPU
_UNKNOWN = "#888888"
_NOT_KNOWN = "NUMA node not known"
_NICS_A_GPU = 2
_GAP, _MARGIN = 1.4, 0.7
_GPU_Y, _NIC_Y, _CPU_Y, _TOP = 2.0, 0.8, -0.2, 2.7


@dataclass
class _Box:
    """A NUMA node: its GPUs and what is drawn with them."""

    title: str
    gpus: list[Device] = field(default_factory=list)
    nics: list[Device] = field(default_factory=list)
    hidden: int = 0
    """NICs that there is no room for."""
    left: float = 0.0
    width: float = 0.0


def draw(found: Topology, path: Path) -> None:
    """Draws a machine into a file of the kind that its ending names.

    Raises:
        ModuleNotFoundError: matplotlib isn't installed.
        OSError: the file can't be written.
        ValueError: it is of no kind that can be drawn.
    """
    import matplotlib
    from matplotlib.figure import Figure

    boxes = _boxes(found)
    at = _place(boxes)
    right = boxes[-1].left + boxes[-1].width if boxes else 4.0
    arcs = 0.0 if _bars(found, at) is not None else 0.5
    figure = Figure(figsize=(max(5.0, min(right * 0.85, 60.0)), 4.6 + arcs), layout="tight")
    axes = figure.add_subplot()
    axes.set_xlim(-0.3, max(right, 4.0) + 0.3)
    axes.set_ylim(-1.9, _TOP + 1.1 + arcs)
    axes.set_axis_off()
    for box in boxes:
        _draw_box(axes, box)
    _draw_nics(axes, found, boxes, at)
    _draw_fabric(axes, found, at)
    _draw_slow_hop(axes, found, boxes)
    for device in [*found.of_kind("gpu"), *(nic for box in boxes for nic in box.nics)]:
        _draw_device(axes, device, at[device.name])
    _draw_legend(axes, found)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tensorlink"}):
        figure.savefig(path, dpi=110)


def _boxes(found: Topology) -> list[_Box]:
    boxes: dict[str, _Box] = {}
    owner: dict[str, str] = {}
    for device in found.of_kind("cpu") + found.of_kind("gpu"):
        boxes.setdefault(_node(device), _Box(_node(device)))
        if device.kind == "gpu":
            boxes[_node(device)].gpus.append(device)
            for nic in found.nearest(device.name):
                best = owner.setdefault(nic.name, device.name)
                if _rank(found, device.name, nic.name) < _rank(found, best, nic.name):
                    owner[nic.name] = device.name
    for nic in found.of_kind("nic"):
        if nic.virtual:
            continue
        near = owner.get(nic.name)
        node = _node(found.device(near)) if near is not None else _node(nic)
        box = boxes.setdefault(node, _Box(node))
        if (near is not None or not box.gpus) and len(box.nics) < _NICS_A_GPU * max(len(box.gpus), 2):
            box.nics.append(nic)
        else:
            box.hidden += 1
    for box in boxes.values():
        order = {gpu.name: index for index, gpu in enumerate(box.gpus)}
        box.nics.sort(key=lambda nic: order.get(owner.get(nic.name, ""), len(order)))
    return list(boxes.values())


def _node(device: Device) -> str:
    """What its box is called: by its NUMA node or, where nobody says that, by its CPUs."""
    node = device.numa_node if device.numa_node is not None else device.numa_affinity
    if node is None and device.cpu_affinity is not None and device.kind != "cpu":
        return f"CPUs {device.cpu_affinity[:40]}"
    return _NOT_KNOWN if node is None else f"NUMA node {node}"


def _rank(found: Topology, a: str, b: str) -> int:
    link = found.between(a, b)
    rank = closeness(link.link_class) if link is not None else None
    return 9 if rank is None else rank


def _place(boxes: Sequence[_Box]) -> dict[str, tuple[float, float]]:
    """Where each device goes, and by that how wide the boxes are."""
    at: dict[str, tuple[float, float]] = {}
    left = 0.0
    for box in boxes:
        box.left = left
        box.width = max(2.6, (max(len(box.gpus), len(box.nics), 1) - 1) * _GAP + 2 * _MARGIN)
        for row, y in ((box.gpus, _GPU_Y), (box.nics, _NIC_Y)):
            step = (box.width - 2 * _MARGIN) / max(len(row) - 1, 1)
            for index, device in enumerate(row):
                x = box.left + (_MARGIN + index * step if len(row) > 1 else box.width / 2)
                at[device.name] = x, y
        left += box.width + 1.0
    return at


def _draw_box(axes: Axes, box: _Box) -> None:
    _rectangle(axes, box.left, -0.55, box.width, _TOP + 0.45, "#f4f6f8", "#b0b8c0", zorder=0)
    _rectangle(axes, box.left + 0.2, _CPU_Y - 0.2, box.width - 0.4, 0.4, "#dfe4ea", "#8a94a0", zorder=1)
    more = f"  (+{box.hidden} more NICs)" if box.hidden else ""
    _write(axes, box.left + box.width / 2, _CPU_Y, box.title + more, size=9)


def _draw_device(axes: Axes, device: Device, at: tuple[float, float]) -> None:
    x, y = at
    gpu = device.kind == "gpu"
    _rectangle(axes, x - 0.55, y - 0.22, 1.1, 0.44, "#d8f0e0" if gpu else "#dbe9f8", "#39424e", zorder=4)
    rate = f"{device.bytes_per_s * 8 / 1e9:g} Gbit/s" if device.bytes_per_s and not gpu else None
    below = rate or (device.device if device.device != device.name else None)
    size = 9 if len(device.name) < 9 else 6.5
    _write(axes, x, y + (0.07 if below else 0), device.name, size=size, weight="bold" if gpu else "normal")
    if below:
        _write(axes, x, y - 0.12, below, size=6.5)


def _draw_nics(axes: Axes, found: Topology, boxes: Sequence[_Box], at: dict[str, tuple[float, float]]) -> None:
    """A line from each GPU to its nearest NICs: whole and thick where these are next to it, dashed where they are far."""
    for gpu in (gpu for box in boxes for gpu in box.gpus):
        near = [nic for nic in found.nearest(gpu.name) if nic.name in at]
        for nic in near:
            link = found.between(gpu.name, nic.name)
            rank = _rank(found, gpu.name, nic.name)
            (x, y), (nx, ny) = at[gpu.name], at[nic.name]
            far = rank >= _FAR
            style: dict[str, Any] = {"linestyle": "--", "linewidth": 0.8, "alpha": 0.6} if far else {"linewidth": 2.5}
            axes.plot([x, nx], [y - 0.22, ny + 0.22], color=_color(link), zorder=2, **style)
        if near:
            link = found.between(gpu.name, near[0].name)
            _write(
                axes,
                at[gpu.name][0] + 0.06,
                _GPU_Y - 0.36,
                _class(link),
                size=7,
                color=_color(link),
                align="left",
                pad=True,
            )


def _bars(found: Topology, at: dict[str, tuple[float, float]]) -> list[tuple[tuple[str, ...], Link]] | None:
    """Each island with the link that joins all its pairs; None if one is joined in several ways or only in part, or if
    another lies between its GPUs."""
    bars = []
    end = float("-inf")
    for island in found.islands():
        links = [found.between(a, b) for index, a in enumerate(island) for b in island[index + 1 :]]
        first = links[0]
        if first is None or any(link is None or link.link_class != first.link_class for link in links):
            return None
        if min(at[name][0] for name in island) < end:
            return None
        end = max(at[name][0] for name in island)
        bars.append((island, first))
    return bars


def _draw_fabric(axes: Axes, found: Topology, at: dict[str, tuple[float, float]]) -> None:
    bars = _bars(found, at)
    if bars is None:
        _draw_arcs(axes, found, at)
        return
    for island, link in bars:
        xs = [at[name][0] for name in island]
        left, right = min(xs) - 0.55, max(xs) + 0.55
        _rectangle(axes, left, _TOP + 0.25, right - left, 0.38, _COLORS[0], _COLORS[0], zorder=3)
        for x in xs:
            axes.plot([x, x], [_GPU_Y + 0.22, _TOP + 0.25], color=_COLORS[0], linewidth=4, zorder=3)
        rate = f", {link.bytes_per_s / 1e9:.0f} GB/s" if link.bytes_per_s else ""
        many = f"{link.link_class} between all {len(island)}{rate}" if len(island) > 2 else f"{link.link_class}{rate}"
        _write(axes, (left + right) / 2, _TOP + 0.44, many, size=9, color="white", weight="bold")


def _draw_arcs(axes: Axes, found: Topology, at: dict[str, tuple[float, float]]) -> None:
    """One arc a pair, the thicker the more wires, the higher the farther apart."""
    from matplotlib.patches import FancyArrowPatch

    pairs = [link for link in found.links if closeness(link.link_class) == 0 and link.a in at and link.b in at]
    widest = max((link.count or 1 for link in pairs), default=1)
    span = max((abs(at[link.a][0] - at[link.b][0]) for link in pairs), default=1.0)
    for link in pairs:
        a, b = sorted((at[link.a][0], at[link.b][0]))
        height = 0.35 + 1.5 * (b - a) / span
        width = 1.0 + 2.5 * (link.count or 1) / widest
        bend = f"arc3,rad={-min(height / max(b - a, 0.1), 0.9):.3f}"
        start, end = (a, _GPU_Y + 0.22), (b, _GPU_Y + 0.22)
        arc = FancyArrowPatch(
            start, end, connectionstyle=bend, arrowstyle="-", color=_COLORS[0], linewidth=width, alpha=0.75, zorder=3
        )
        axes.add_patch(arc)
        if len(pairs) <= 24:
            _write(axes, (a + b) / 2, _GPU_Y + 0.22 + height / 2, _class(link), size=6.5, color=_COLORS[0], pad=True)


def _draw_slow_hop(axes: Axes, found: Topology, boxes: Sequence[_Box]) -> None:
    """The way between one NUMA node and the next, by the class that its GPUs or NICs have across it."""
    for one, other in pairwise(box for box in boxes if box.title != _NOT_KNOWN):
        links = [
            link
            for a in [*one.gpus, *one.nics]
            for b in [*other.gpus, *other.nics]
            if (link := found.between(a.name, b.name)) is not None and (closeness(link.link_class) or 0) > 0
        ]
        link = max(links, key=lambda link: closeness(link.link_class) or 0, default=None)
        if link is not None:
            left, right = one.left + one.width - 0.2, other.left + 0.2
            axes.plot([left, right], [_CPU_Y, _CPU_Y], color=_color(link), linewidth=5, zorder=5)
            _write(
                axes,
                (left + right) / 2,
                _CPU_Y + 0.22,
                _class(link),
                size=9,
                color=_color(link),
                weight="bold",
                pad=True,
            )


def _draw_legend(axes: Axes, found: Topology) -> None:
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=_COLORS[0], linewidth=4, label="GPU to GPU, not by PCIe"),
        Line2D([], [], color=_COLORS[1], linewidth=3, label="PIX, PXB: through PCIe switches"),
        Line2D([], [], color=_COLORS[3], linewidth=3, label="PHB: through the CPU"),
        Line2D([], [], color=_COLORS[4], linewidth=1, linestyle="--", label="NODE: within a NUMA node"),
        Line2D([], [], color=_COLORS[5], linewidth=1, linestyle="--", label="SYS: between NUMA nodes"),
    ]
    axes.legend(handles=lines, loc="lower center", ncol=3, fontsize=7.5, frameon=False)
    axes.set_title(
        f"{found.source}: {len(found.of_kind('gpu'))} GPUs, {len(found.of_kind('nic'))} NICs",
        fontsize=10,
        parse_math=False,
    )


def _class(link: Link | None) -> str:
    return (link.link_class if link is not None else None) or "?"


def _color(link: Link | None) -> str:
    rank = closeness(link.link_class) if link is not None else None
    return _UNKNOWN if rank is None else _COLORS[rank]


def _rectangle(axes: Axes, x: float, y: float, width: float, height: float, fill: str, edge: str, zorder: int) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=fill, edgecolor=edge, zorder=zorder))


def _write(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    *,
    size: float,
    color: str = "#1c242c",
    weight: str = "normal",
    align: str = "center",
    pad: bool = False,
) -> None:
    back = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85} if pad else None
    style: dict[str, Any] = {"ha": align, "va": "center", "zorder": 6, "parse_math": False}
    axes.text(x, y, text, fontsize=size, color=color, fontweight=weight, bbox=back, **style)
