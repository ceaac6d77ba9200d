"""The command line. One file a command; what they need loads when one runs."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of `tensorlink`. Exits with 2 and a hint where the extra `cli` is missing."""
    try:
        from tensorlink.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich"):
            raise
        print(f"The command line needs {error.name}: pip install 'tensorlink[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    app()
