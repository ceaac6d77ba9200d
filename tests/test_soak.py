"""A little of the soak: mixed traffic among actors that are killed, stopped and started again (bench/soak.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.peer import ROOT


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [10, pytest.param(60, marks=pytest.mark.soak)])
def test_everything_at_once(seconds: int) -> None:
    command = [sys.executable, "-m", "bench.soak", "--minutes", str(seconds / 60), "--seed", "1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "clean" in run.stdout
