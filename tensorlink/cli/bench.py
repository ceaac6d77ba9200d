"""`tensorlink bench`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tensorlink.benchmark import Report
from tensorlink.benchmark import bench as measure
from tensorlink.cli.sizes import parse_size
from tensorlink.measured import Measured
from tensorlink.settings import Settings

_DEFAULT = "1K,16K,256K,4M,64M,256M"


def bench(
    peer: Annotated[str, typer.Argument(help="Name of the peer.")],
    save: Annotated[bool, typer.Option("--save", help="Keep the figures: later choices of a path go by them.")] = False,
    sizes: Annotated[
        str, typer.Option(metavar="LIST", help="Bytes of a read, with K, M and G for KiB and so on.")
    ] = _DEFAULT,
    transports: Annotated[
        str | None, typer.Option(metavar="LIST", help="As the setting: `shm,tcp`, or `^shm` for all others.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long each transport takes, about.", min=0.1)] = 3.0,
    coordinator: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="HOST:PORT or unix:PATH; default: the one of this host.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the job on this host.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that each step may take.", min=0.1)] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Measure latency and bandwidth of reads from a peer, over each transport that reaches it.

    The peer lends at most a quarter of what is free in its pool, and 256 MiB. `--save` takes a size up to 16K and one from
    1M. Exit status 1: a way, or the peer, failed meanwhile, or what was to be saved wasn't.
    """
    settings = Settings.load(coordinator=coordinator, namespace=namespace, transports=transports)
    report = measure(
        peer, settings, sizes=[parse_size(part) for part in sizes.split(",")], seconds=seconds, timeout=timeout
    )
    why = report.save(Measured.by_setting(settings.measured)) if save else None
    if as_json:
        typer.echo(json.dumps(_as_dict(report, save and why is None)))
    else:
        _print(report, f"not saved: {why}" if why else "saved" if save else "")
    raise typer.Exit(1 if why or report.broken else 0)


def _as_dict(report: Report, saved: bool) -> dict[str, object]:
    return {
        "peer": report.peer,
        "hosts": [report.here, report.there],
        "timings": [{**dataclasses.asdict(one), "bytes_per_s": one.bytes_per_s} for one in report.timings],
        "figures": {name: dataclasses.asdict(figure) for name, figure in report.figures().items()},
        "missing": report.missing,
        "max_bytes_per_s": report.max_bytes_per_s if report.limited else None,
        "notes": report.notes,
        "saved": saved,
    }


def _print(report: Report, saved: str) -> None:
    console = Console()
    console.print(_table(report))
    for text in filter(None, [*_remarks(report), saved]):
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(report: Report) -> Table:
    names = list(dict.fromkeys(one.transport for one in report.timings))
    table = Table(title=f"reads from {report.peer}: median time, and bytes by that time")
    table.add_column("size", justify="right")
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("GB/s", justify="right")
    for nbytes in dict.fromkeys(one.nbytes for one in report.timings):
        cells = [report.of(name, nbytes) for name in names]
        shown = [(_time(one.seconds), f"{one.bytes_per_s / 1e9:.3g}") if one else ("", "") for one in cells]
        table.add_row(_size(nbytes), *(text for cell in shown for text in cell))
    return table


def _remarks(report: Report) -> list[str]:
    said = [f"{name}: {why}" for name, why in report.missing.items()]
    said += report.notes
    if report.limited:
        who, rate = ", ".join(sorted(report.limited)), report.max_bytes_per_s / 1e9
        said.append(
            f"{who}: {report.peer} gives {rate:.3g} GB/s at most (TENSORLINK_MAX_BYTES_PER_S), so it isn't saved"
        )
    return said


def _size(nbytes: int) -> str:
    for unit, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << unit and nbytes % (1 << unit) == 0:
            return f"{nbytes >> unit} {name}"
    return f"{nbytes} B"


def _time(seconds: float) -> str:
    for scale, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"
