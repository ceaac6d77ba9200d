"""`tensorlink doctor`."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorlink.doctor import Finding, examine, worst

_STATUS = {"ok": 0, "note": 0, "warn": 1, "fail": 2}
_COLORS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}


def doctor(
    peer: Annotated[str | None, typer.Argument(help="Try the way to this peer too.")] = None,
    coordinator: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="HOST:PORT or unix:PATH; default: the one of this host.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the job on this host.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that each step may take.", min=0.1)] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: verdict, findings.")] = False,
) -> None:
    """Check this machine, the settings, and the way to a peer. Exit status: 0, 1 for a warning, 2 for a failure."""
    found = list(examine(peer, timeout=timeout, coordinator=coordinator, namespace=namespace))
    verdict = worst(found)
    if as_json:
        typer.echo(json.dumps({"verdict": verdict, "findings": [dataclasses.asdict(one) for one in found]}))
    else:
        Console().print(_table(found))
    raise typer.Exit(_STATUS[verdict])


def _table(found: list[Finding]) -> Table:
    table = Table()
    for column in ("check", "verdict", "reason", "what mends it"):
        table.add_column(column, overflow="fold")
    for one in found:
        verdict = Text(one.verdict, style=_COLORS[one.verdict])
        table.add_row(Text(one.check), verdict, Text(one.reason), Text(one.mend or ""))
    return table
