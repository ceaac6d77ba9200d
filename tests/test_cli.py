"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensorlink

ROOT = Path(tensorlink.__file__).parents[1]


@pytest.fixture
def env() -> Iterator[dict[str, str]]:
    base = tempfile.mkdtemp(prefix="tl", dir="/tmp")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TENSORLINK_")}
    yield {**clean, "XDG_RUNTIME_DIR": base, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    shutil.rmtree(base)


def run(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tensorlink.cli", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_peers_without_a_coordinator(env: dict[str, str]) -> None:
    done = run(env, "peers")
    assert done.returncode == 1 and "no coordinator runs" in done.stderr and "Traceback" not in done.stderr


def test_peers_of_a_coordinator_that_is_not_there(env: dict[str, str]) -> None:
    done = run(env | {"TENSORLINK_COORDINATOR": "127.0.0.1:1", "TENSORLINK_TOKEN": "x"}, "peers")
    assert done.returncode == 1 and "no coordinator answers at 127.0.0.1:1" in done.stderr


def test_errors_keep_their_square_brackets(env: dict[str, str]) -> None:
    done = run(env, "coordinator", "--listen", "0.0.0.0:0")
    assert done.returncode == 1 and "[phase listen]" in done.stderr, done.stderr


def test_coordinator_and_peers(env: dict[str, str]) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorlink.cli", "coordinator"], env=env, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert "unix:" in server.stdout.readline()
    assert "has a coordinator" in run(env, "coordinator").stderr
    join = """
from tensorlink.control import ControlClient
from tensorlink.settings import Settings
client = ControlClient(Settings.load(), name="trainer", address="unix:/nowhere", labels={"rack": "7"})
client.join(30)
client.advertise("weights/policy")
"""
    subprocess.run([sys.executable, "-c", join], env=env, timeout=60, check=True)
    table = run(env, "peers")
    assert table.returncode == 0, table.stderr
    assert all(word in table.stdout for word in ("trainer", "weights/policy", "rack=7"))
    (peer,) = json.loads(run(env, "peers", "--json").stdout)
    assert peer["id"]["name"] == "trainer" and peer["labels"] == {"rack": "7"}
    server.send_signal(signal.SIGINT)
    assert server.wait(20) == 0
    server.stdout.close()
    assert list(Path(env["XDG_RUNTIME_DIR"], "tensorlink").iterdir()) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--listen", "127.0.0.1:0"), "TENSORLINK_TOKEN"),
        (("--listen", "nonsense"), "HOST:PORT"),
        (("--lease", "0"), "lease"),
    ],
)
def test_refused_coordinators(env: dict[str, str], arguments: tuple[str, ...], message: str) -> None:
    done = run(env, "coordinator", *arguments)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_missing_extra_is_said(env: dict[str, str]) -> None:
    hide = "import sys; sys.modules['typer'] = None; from tensorlink.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", hide], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "tensorlink[cli]" in done.stderr
