"""`tensorlink topo`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tensorlink.topology import Device, Link, Topology, discover, read
from tensorlink.topology.classes import closeness
from tensorlink.topology.text import MAX_BYTES

_COLORS = ("bold green", "cyan", "cyan", "yellow", "dark_orange", "red")
"""Of link classes, by how near they are."""
_ORDER = ("cpu", "gpu", "nic", "switch")
_CELL = 6  # columns of a matrix's cell with its padding, at least
_NICS_IN_A_LINE = 4


def topo(
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Text of `nvidia-smi topo -m`, `rocm-smi --showtopo`, or NCCL's XML; - is stdin.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: devices, links, warnings.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it: .svg, .png or .pdf. Needs matplotlib.", dir_okay=False)
    ] = None,
) -> None:
    """Show how this machine hangs together, or one that was recorded: devices, links, and which NIC is near which GPU."""
    found = discover() if source is None else read(_bytes(source))
    if plot is not None:
        _draw(found, plot)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
        return
    console = Console()
    console.print(_tree(found))
    for table in _matrices(found, console.width):
        console.print(table)
    for warning in found.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", highlight=False, soft_wrap=True)


def _bytes(source: str) -> bytes:
    """What a file has, or one byte more than may be read of it. Raises: ValueError: it can't be read."""
    if source == "-":
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    try:
        with Path(source).open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {source}: {error.strerror}") from None


def _draw(found: Topology, path: Path) -> None:
    """Raises: ValueError: matplotlib is missing, or the file can't be written."""
    try:
        from tensorlink.cli.topo_plot import draw

        draw(found, path)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ValueError("a plot needs matplotlib: pip install 'tensorlink[plot]'") from None
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None


def _tree(found: Topology) -> Tree:
    """Devices by NUMA node, each with what is said of it."""
    tree = Tree(Text(found.source, style="bold"))
    if found.labels:
        tree.add(Text("labels: " + ", ".join(f"{key}={found.labels[key]}" for key in sorted(found.labels))))
    if found.limits is not None:
        tree.add(Text(_limits(found)))
    nodes = sorted({_group(device) for device in found.devices}, key=lambda group: (group is None, str(group).zfill(6)))
    for node in nodes:
        branch = tree.add(Text("NUMA node not known" if node is None else f"NUMA node {node}", style="bold"))
        for device in sorted(found.devices, key=lambda device: _ORDER.index(device.kind)):
            if _group(device) == node:
                branch.add(_line(found, device))
    return tree


def _group(device: Device) -> int | str | None:
    return device.numa_node if device.numa_node is not None else device.numa_affinity


def _limits(found: Topology) -> str:
    limits = found.limits
    assert limits is not None
    facts = (
        f"CPUs {limits.cpuset}" if limits.cpuset else "",
        f"{limits.cpus:g} of them at a time" if limits.cpus else "",
        f"{_size(limits.memory_bytes)} of memory" if limits.memory_bytes else "",
    )
    return "this process may use " + ", ".join(fact for fact in facts if fact)


def _line(found: Topology, device: Device) -> Text:
    line = Text(device.name, style="bold" if device.kind in ("gpu", "cpu") else "")
    facts = (
        device.device if device.device != device.name else None,
        ", ".join(name for name in device.interfaces if name != device.name) or None,
        device.model,
        device.pci,
        device.pcie,
        f"{_size(device.memory_bytes)}" if device.memory_bytes else None,
        f"{device.bytes_per_s * 8 / 1e9:g} Gbit/s" if device.bytes_per_s else None,
        f"CPUs {device.cpu_affinity}" if device.cpu_affinity else None,
        f"its memory is NUMA node {device.gpu_numa_id}" if device.gpu_numa_id is not None else None,
        "virtual" if device.virtual else None,
    )
    line.append("".join(f"  {fact}" for fact in facts if fact), style="not bold")
    near = found.nearest(device.name) if device.kind == "gpu" else ()
    if near:
        link = found.between(device.name, near[0].name)
        names = ", ".join(one.name for one in near[:_NICS_IN_A_LINE])
        more = f" and {len(near) - _NICS_IN_A_LINE} more" if len(near) > _NICS_IN_A_LINE else ""
        line.append("  nearest NIC ", style="not bold dim")
        line.append(names + more, style="not bold")
        line.append(" by ", style="not bold dim")
        line.append(_cell(link))
    return line


def _size(nbytes: int | None) -> str:
    return f"{(nbytes or 0) / 2**30:.1f} GiB"


def _cell(link: Link | None) -> Text:
    link_class = link.link_class if link is not None else None
    rank = closeness(link_class)
    return Text(link_class or "?", style=_COLORS[rank] if rank is not None else "dim")


def _matrices(found: Topology, width: int) -> Iterator[Table]:
    """Classes between GPUs, NICs and, where they are known, CPUs; as many columns at a time as the screen has room for."""
    ends = [device for device in found.devices if device.kind != "switch" and not device.virtual]
    ends.sort(key=lambda device: _ORDER[1:].index(device.kind) if device.kind != "cpu" else len(_ORDER))
    rows = [device for device in ends if device.kind == "gpu"] or ends
    if len(ends) < 2:
        return
    first = max(len(device.name) for device in rows) + 3
    cell = max(_CELL, max(len(device.name) for device in ends) + 3)
    room = max(1, (width - first - 1) // cell)
    for start in range(0, len(ends), room):
        yield _matrix(found, rows, ends[start : start + room])


def _matrix(found: Topology, rows: Sequence[Device], columns: Sequence[Device]) -> Table:
    table = Table()
    table.add_column("")
    for device in columns:
        table.add_column(device.name, no_wrap=True)
    for row in rows:
        cells = [Text("X", "dim") if row is one else _cell(found.between(row.name, one.name)) for one in columns]
        table.add_row(row.name, *cells)
    return table
