"""The application that the commands belong to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from tensorlink.cli import bench, coordinator, doctor, explain, flight, peers, topo
from tensorlink.errors import TensorLinkError

app = typer.Typer(
    help="Tensor transport between processes and devices.", no_args_is_help=True, pretty_exceptions_enable=False
)


def command(function: Callable[..., Any]) -> None:
    """Adds a command. Errors that a user can act on come out as one line and exit code 1."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except (TensorLinkError, ValueError) as error:
            text = escape(str(error))  # it has square brackets of its own
            Console(stderr=True).print(f"[red]error:[/red] {text}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None

    app.command()(run)


@app.callback()
def _root() -> None:
    """Keeps commands named, however many there are."""


command(bench.bench)
command(coordinator.coordinator)
command(doctor.doctor)
command(explain.explain)
command(flight.flight)
command(peers.peers)
command(topo.topo)
