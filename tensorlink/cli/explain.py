"""`tensorlink explain`."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorlink.cli.sizes import parse_size
from tensorlink.endpoint import open_endpoint
from tensorlink.paths import PathReport
from tensorlink.settings import Settings


def explain(
    peer: Annotated[str, typer.Argument(help="Name of the peer.")],
    nbytes: Annotated[str, typer.Option(metavar="SIZE", help="Bytes to move: 65536, 64KiB, 256MiB, 2GiB.")] = "1MiB",
    coordinator: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="HOST:PORT or unix:PATH; default: the one of this host.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the job on this host.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that each step may take.", min=0.1)] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object: candidates, chosen, used.")] = False,
) -> None:
    """Show every path from here to a peer: which is taken, what each is predicted to take, and why the others aren't taken.

    Joins for a moment, as explain-..., with the settings of this shell. Exit status 1: no path, or the peer isn't there.
    """
    from tensorlink.control import find_peer

    size = parse_size(nbytes)
    settings = dataclasses.replace(
        Settings.load(coordinator=coordinator, namespace=namespace, timeout=timeout), flight="off"
    )
    find_peer(peer, settings, timeout)  # with no coordinator an error: none is started
    with open_endpoint(f"explain-{os.getpid()}-{secrets.token_hex(3)}", settings) as endpoint:
        report = endpoint.explain(peer, size)
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        Console().print(report.headline(), highlight=False, soft_wrap=True)
        Console().print(_table(report))
    if report.chosen is None:
        raise typer.Exit(1)


def _table(report: PathReport) -> Table:
    table = Table()
    for column in report.columns:
        table.add_column(column, overflow="fold")
    for row, candidate in zip(report.rows(), report.candidates, strict=True):
        style = "bold green" if candidate is report.chosen else "" if candidate.usable else "dim"
        table.add_row(*(Text(cell) for cell in row), style=style)
    return table
