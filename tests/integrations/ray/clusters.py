"""An environment that the processes of a Ray inherit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def weight_sync(folder: Path, address: str, *arguments: str) -> dict[str, Any]:
    """Runs examples/rl_weight_sync.py in the Ray at that address; its report."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/rl_weight_sync.py"), "--ray", f"--out={folder}", *arguments],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "rl_weight_sync.json").read_text())  # type: ignore[no-any-return]
