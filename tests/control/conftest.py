"""A run-time directory of its own for each test, and no process left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.control.control_processes import Member, coordinator_pids, eventually


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run-time directory that processes of this test use; short, whatever TMPDIR is."""
    base = Path(tempfile.mkdtemp(prefix="tl", dir="/tmp"))
    for variable in [name for name in os.environ if name.startswith("TENSORLINK_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    yield base / "tensorlink"
    for pid in coordinator_pids(base):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGTERM)
    eventually(lambda: not coordinator_pids(base), "the coordinators ended")
    shutil.rmtree(base)


@pytest.fixture
def member(run_dir: Path) -> Iterator[Callable[..., Member]]:
    """Starts members; kills what is left of them."""
    members: list[Member] = []

    def start(name: str, **extra: str) -> Member:
        members.append(Member(name, **extra))
        return members[-1]

    yield start
    for one in members:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGCONT)
            one.kill()
        for stream in (one.process.stdin, one.process.stdout):
            with contextlib.suppress(OSError):
                stream.close()
