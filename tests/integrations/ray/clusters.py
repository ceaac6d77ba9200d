"""An environment that the processes of a Ray inherit."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import make_runtime_dir

ROOT = Path(__file__).resolve().parents[3]
SMALL = {"include_dashboard": False, "object_store_memory": 80 << 20}


def environment(folder: Path, lease_s: float) -> dict[str, str]:
    """What a driver and its Ray need: they find this checkout, and meet nobody else's."""
    return {
        "XDG_RUNTIME_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "RAY_AUTH_MODE": "disabled",  # it listens for this host only, and would leave a token in the home of the user
        "RAY_USAGE_STATS_ENABLED": "0",
        "TENSORLINK_LEASE_S": str(lease_s),
    }


@contextlib.contextmanager
def ray_folder(lease_s: float = 2.0) -> Iterator[Path]:
    """A directory for one Ray, whose processes and this one have that environment."""
    folder = make_runtime_dir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(folder, lease_s).items():
            patch.setenv(name, value)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
