"""An environment that the processes of a Ray inherit."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensorlink as tl

ROOT = Path(tl.__file__).parents[1]
SMALL = {"include_dashboard": False, "object_store_memory": 80 << 20}


@contextlib.contextmanager
def ray_folder() -> Iterator[str]:
    """A directory for one Ray, whose processes find this checkout."""
    folder = tempfile.mkdtemp(prefix="tl-ray-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("TENSORLINK_LEASE_S", "2")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
