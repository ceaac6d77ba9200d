"""The leak check itself: sees each kind of thing that can be left behind, and nothing else."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.leaks import Snapshot, alive, children, end_children, leaks, settle

SLEEPER = "import signal; print('up', flush=True); signal.pause()"


def leak_child() -> Callable[[], None]:
    process = subprocess.Popen([sys.executable, "-c", SLEEPER])

    def clean() -> None:
        process.kill()
        process.wait()

    return clean


def leak_thread() -> Callable[[], None]:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()

    def clean() -> None:
        stop.set()
        thread.join()

    return clean


def leak_socket() -> Callable[[], None]:
    return socket.socket().close


def leak_shared_file() -> Callable[[], None]:
    path = Path(f"/dev/shm/tensorlink-leak-test-{os.getpid()}")
    path.touch()
    return path.unlink


def leak_mapping() -> Callable[[], None]:
    fd = os.memfd_create("forgotten")
    os.truncate(fd, 4096)
    mapping = mmap.mmap(fd, 4096)
    os.close(fd)
    return mapping.close


@pytest.mark.parametrize(
    ("leak", "seen"),
    [
        (leak_child, "child"),
        (leak_thread, "thread forgotten"),
        (leak_socket, "fd"),
        (leak_shared_file, "file /dev/shm"),
        (leak_mapping, "mapping"),
    ],
)
def test_leak_is_seen_until_it_is_gone(leak: Callable[[], Callable[[], None]], seen: str) -> None:
    before = Snapshot.take()
    clean = leak()
    try:
        found = leaks(before)
        assert any(line.startswith(seen) for line in found), found
    finally:
        clean()
    assert settle(before) == []


def test_orphans_are_seen_and_ended() -> None:
    before = Snapshot.take()
    middle = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "import os; os._exit(0)\n"
    )
    orphan = int(subprocess.check_output([sys.executable, "-c", middle]))
    assert alive(orphan)
    assert orphan in children()
    end_children(before)
    assert not alive(orphan)
    assert leaks(before) == []


HOLDER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0):
    print("up", flush=True)
    input()
"""


def test_shared_file_of_another_process_is_no_leak() -> None:
    before = Snapshot.take()
    path = Path(f"/dev/shm/tensorlink-foreign-test-{os.getpid()}")
    path.write_bytes(bytes(4096))
    try:
        command = [sys.executable, "-c", HOLDER, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            assert not any(line.startswith("file") for line in leaks(before))
            process.communicate(b"\n", timeout=30)
        assert f"file {path}" in leaks(before)
    finally:
        path.unlink()
    assert f"file {path}" not in leaks(before)


def test_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
        assert alive(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not alive(process.pid)
    process.wait()


def test_reopened_descriptor_is_no_leak() -> None:
    first = socket.socket()
    before = Snapshot.take()
    second = socket.socket()
    first.close()
    assert leaks(before) == []
    second.close()


@pytest.mark.parametrize("fails", [False, True], ids=["passing", "failing"])
def test_check_fails_the_module_that_leaks(tmp_path: Path, fails: bool) -> None:
    """The fixture of conftest.py, in a run of its own: it reports a leak, but not on top of a failed test."""
    root = Path(__file__).resolve().parent.parent
    for source in ("conftest.py", "leaks.py", "__init__.py"):
        target = tmp_path / "tests" / source
        target.parent.mkdir(exist_ok=True)
        target.write_text((root / "tests" / source).read_text())
    (tmp_path / "tests" / "test_it.py").write_text(
        f"import os\ndef test_leaks():\n    os.memfd_create('x')\n    assert {not fails}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    command += ["--settle", "0.1", "tests"]  # what this one leaks never goes
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert ("left behind by this module" in result.stdout) is not fails, result.stdout
