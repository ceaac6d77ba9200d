"""Starts peers as processes and finds the coordinators of a run-time directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorlink

ROOT = Path(tensorlink.__file__).parents[1]
MEMBER = Path(__file__).with_name("control_member.py")
DEADLINE_S = 40.0


def environment(**extra: str) -> dict[str, str]:
    """This one's, with the package to be tested first on the path."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **extra}


def eventually(check: Callable[[], Any], what: str, timeout: float = DEADLINE_S) -> Any:
    """The first true value of `check`, for what has no event to wait on: processes and files of others."""
    deadline = time.monotonic() + timeout
    while not (value := check()):
        assert time.monotonic() < deadline, f"not in {timeout} s: {what}"
        threading.Event().wait(0.02)
    return value


def coordinator_pids(run_dir: Path) -> list[int]:
    """Processes of embedded coordinators that serve below this directory."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _serves(entry, run_dir)]


def _serves(process: Path, run_dir: Path) -> bool:
    try:
        command = (process / "cmdline").read_bytes()
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return b"tensorlink.control.embedded" in command and os.fsencode(run_dir) + b"/" in command and state != "Z"


class Member:
    """A process that runs `control_member.py`. What it prints is kept for `wait`."""

    def __init__(self, name: str, **extra: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(MEMBER), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(**extra),
            text=True,
        )
        self._lines: list[dict[str, Any]] = []
        self._taken: set[int] = set()
        self._changed = threading.Condition()
        threading.Thread(target=self._pump, daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _pump(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            with self._changed:
                self._lines.append(json.loads(text))
                self._changed.notify_all()
        with self._changed:
            self._lines.append({"eof": True})
            self._changed.notify_all()

    def wait(self, timeout: float = DEADLINE_S, **match: Any) -> dict[str, Any]:
        """The first line with these fields (`...`: any value) that no wait has returned before."""

        def fits(line: dict[str, Any]) -> bool:
            return all(key in line and value in (..., line[key]) for key, value in match.items())

        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                for line in self._lines:
                    if id(line) not in self._taken and fits(line):
                        self._taken.add(id(line))
                        return line
                left = max(deadline - time.monotonic(), 0)
                assert self._changed.wait(left), f"{self.name}: no {match} in {self._lines}"

    def lines(self) -> list[dict[str, Any]]:
        with self._changed:
            return list(self._lines)

    def joined(self) -> int:
        """Waits for the join and returns the incarnation."""
        incarnation: int = self.wait(joined=...)["joined"]
        return incarnation

    def order(self, method: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self.process.stdin.flush()

    def call(self, method: str, *arguments: Any) -> Any:
        self.order(method, *arguments)
        return self.wait(result=...)["result"]

    def fails(self, method: str, *arguments: Any) -> tuple[str, str]:
        self.order(method, *arguments)
        line = self.wait(error=...)
        return line["error"], line["message"]

    def stop(self) -> None:
        """Leaves and ends the process."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
