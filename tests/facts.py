"""Machines made up of files, for what takes the root folder."""

from __future__ import annotations

from pathlib import Path


def write(root: Path, **files: str) -> Path:
    """Files below a root; `__` in a name stands for a slash."""
    for name, said in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(said + "\n")
    return root
