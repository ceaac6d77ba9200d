"""`tensorlink flight`."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tensorlink import flight as recorder
from tensorlink import recording
from tensorlink.errors import CorruptTransferError
from tensorlink.recording import Flight, Record, duration
from tensorlink.settings import Settings

_COLORS = {"alive": "green", "silent": "yellow", "died": "red", "left": "dim"}


def flight(
    target: Annotated[
        str | None, typer.Argument(metavar="[PID|FILE]", help="A process or a file; default: a list of what there is.")
    ] = None,
    events: Annotated[int, typer.Option(min=0, help="So many of the last events.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="JSON, with all events, instead of tables.")] = False,
) -> None:
    """Show what processes wait for, and what happened last; also of a process that was killed."""
    found = _find(target)
    if as_json:
        typer.echo(json.dumps([_plain(one) for one in found]))
        return
    console = Console()
    if target is None:
        console.print(_overview(found))
        for circle in recording.circles(found):
            names = " for ".join(escape(name) for name in [*circle, circle[0]])
            console.print(f"[red]They wait for each other:[/red] {names}", highlight=False)
        return
    for one in found:
        _print(console, one, events)


def _find(target: str | None) -> list[Flight]:
    """Raises: ValueError: there is no such file, or none of that process."""
    if target is not None and not target.isdecimal():
        try:
            return [recording.read(Path(target))]
        except OSError as error:
            raise ValueError(f"cannot read {target}: {error.strerror}") from None
    directory = _directory()
    found = []
    for path in recorder.files(directory, None if target is None else int(target)):
        try:
            found.append(recording.read(path))
        except (CorruptTransferError, OSError):  # of another version, or it has just gone
            continue
    if not found and target is not None:
        raise ValueError(f"process {target} has no flight file in {directory}")
    return found


def _directory() -> Path:
    from tensorlink.control.runtime_dir import runtime_dir

    setting = Settings.load().flight
    return Path(setting) if setting and setting != recorder.OFF else runtime_dir()


def _plain(one: Flight) -> dict[str, object]:
    return {**dataclasses.asdict(one), "path": str(one.path), "state": one.state}


def _overview(found: Sequence[Flight]) -> Table:
    table = Table(title=f"{len(found)} flight file{'' if len(found) == 1 else 's'}")
    for column in ("peer", "pid", "state", "failures", "waits for", "file"):
        table.add_column(column, overflow="fold")
    for one in found:
        waits = "\n".join(row.told(one.now) for row in one.operations[:5])
        more = len(one.operations) - 5
        waits += f"\nand {more} more" if more > 0 else ""
        table.add_row(escape(one.name), str(one.pid), _state(one), str(one.failures), escape(waits), str(one.path))
    return table


def _state(one: Flight) -> str:
    ago = "" if one.state == "alive" else f" {duration(time.monotonic() - (one.now if not one.alive else one.beat))}"
    return f"[{_COLORS[one.state]}]{one.state}{ago}[/]"


def _print(console: Console, one: Flight, events: int) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.now + one.wall))
    console.print(
        f"[bold]{escape(one.name)}[/bold]#{one.incarnation}, pid {one.pid}, {_state(one)}; at {when}", highlight=False
    )
    if one.operations:
        console.print(_waits(one))
    else:
        console.print("It waits for nobody.")
    shown = one.events[len(one.events) - events :] if events < len(one.events) else one.events
    if shown:
        console.print(_events(one, shown))


def _waits(one: Flight) -> Table:
    table = Table(title="in flight", title_justify="left")
    for column in ("operation", "peer", "transport", "waits for", "bytes", "for", "last news", "thread"):
        table.add_column(column, overflow="fold")
    for row in one.operations:
        news = "" if row.news is None else f"{duration(one.now - row.news)} ago"
        cells = (row.what, row.peer, row.transport, row.wanted, row.progress, duration(one.now - row.began), news)
        table.add_row(*map(escape, cells), str(row.thread))
    return table


def _events(one: Flight, shown: Sequence[Record]) -> Table:
    table = Table(title="last events", title_justify="left")
    for column in ("ago", "what", "how it ended", "peer", "transport", "took", "bytes", "it was about"):
        table.add_column(column, overflow="fold")
    for row in shown:
        at = row.news if row.news is not None else row.began
        took = duration(at - row.began) if at - row.began >= 0.001 else ""
        cells = (row.what, row.outcome, row.peer, row.transport, took, row.progress, row.wanted)
        table.add_row(duration(one.now - at), *map(escape, cells), style="red" if row.failed else None)
    return table
