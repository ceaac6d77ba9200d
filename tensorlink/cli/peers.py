"""`tensorlink peers`."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tensorlink.settings import Settings
from tensorlink.types import PeerInfo


def peers(
    coordinator: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="HOST:PORT or unix:PATH; default: the one of this host.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the job on this host.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the coordinator.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list instead of a table.")] = False,
) -> None:
    """List the peers that have joined."""
    from tensorlink.control import list_peers

    settings = Settings.load(coordinator=coordinator, namespace=namespace)
    found = list_peers(settings, timeout)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(peer) for peer in found], default=dict))
    else:
        Console().print(_table(found))


def _table(found: list[PeerInfo]) -> Table:
    table = Table(title=f"{len(found)} peer{'' if len(found) == 1 else 's'}")
    for column in ("name", "pid", "host", "since", "serves", "labels"):
        table.add_column(column, overflow="fold")
    for peer in found:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(peer.incarnation / 1e6))
        labels = ", ".join(f"{key}={value}" for key, value in sorted(peer.labels.items()))
        table.add_row(peer.name, str(peer.pid), peer.host[:8], since, ", ".join(peer.services), labels)
    return table
