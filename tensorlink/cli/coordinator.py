"""`tensorlink coordinator`."""

from __future__ import annotations

from typing import Annotated

import typer

from tensorlink.settings import Settings


def coordinator(
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Listen on TCP; needs TENSORLINK_TOKEN or certificates.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Serve this namespace of this user on this host.")] = None,
    lease: Annotated[float | None, typer.Option(help="Seconds after which a silent peer is down.")] = None,
) -> None:
    """Run a coordinator in the foreground, until Ctrl-C."""
    from tensorlink.control import serve

    settings = Settings.load(namespace=namespace, lease_s=lease)
    serve(settings, listen, lambda address: typer.echo(f"Coordinator at {address}, Ctrl-C stops it"))
