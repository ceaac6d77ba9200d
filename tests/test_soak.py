"""A minute of the soak: mixed traffic among actors that are killed, stopped and started again (bench/soak.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.peer import ROOT

SECONDS = 60


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute_of_everything_at_once() -> None:
    command = [sys.executable, "-m", "bench.soak", "--minutes", str(SECONDS / 60), "--seed", "1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "clean" in run.stdout
