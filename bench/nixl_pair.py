"""NIXL between two hosts, over UCX's TCP.

Its progress threads keep half a processor busy each, also with nothing to do, so both ends are stopped while others are
measured.

Its wheels bring much, so it may have an interpreter of its own: `BENCH_NIXL_PYTHON`. Run as a program, this file is one
end: it speaks to the benchmark by lines, and imports nothing but NIXL and numpy.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from functools import cache
from typing import Any

CAPACITY = 1 << 30
SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
QUIET = {"UCX_TLS": "tcp", "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}


@cache
def missing() -> str | None:
    """Why it can't be measured here; None: it can."""
    try:
        subprocess.run([_python(), "-P", "-c", "import nixl, numpy"], capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return f"no NIXL: {_python()} has no `nixl` with `numpy` (BENCH_NIXL_PYTHON names another interpreter)"
    return None


def _python() -> str:
    return os.environ.get("BENCH_NIXL_PYTHON", sys.executable)


class NixlPair:
    """An owner of memory in one host and an initiator in another. `hosts` make commands: `Host.command`."""

    def __init__(self, near: Any, far: Any, *, segments: bool) -> None:
        settings = {**QUIET, **(SEGMENTS if segments else {})}
        words = [f"{name}={value}" for name, value in settings.items()]
        command = ["setpriv", "--pdeathsig", "KILL", "env", *words, _python(), "-P", __file__]
        self._ends = [
            subprocess.Popen(
                host.command(*command, role),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for host, role in ((far, "owner"), (near, "initiator"))
        ]
        self._say(1, self._hear(0))
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for end in self._ends:
            end.send_signal(number)

    def _say(self, end: int, line: str) -> None:
        pipe = self._ends[end].stdin
        assert pipe is not None
        pipe.write(line + "\n")
        pipe.flush()

    def _hear(self, end: int) -> str:
        pipe = self._ends[end].stdout
        assert pipe is not None
        for line in pipe:
            if line.startswith("> "):  # NIXL writes there too
                return line[2:].strip()
        raise RuntimeError("an end of NIXL has died")

    def seconds(self, operation: str, nbytes: int, count: int) -> float:
        """Median of `count` times "READ" or "WRITE", until the initiator knows that it has ended."""
        self._signal(signal.SIGCONT)
        try:
            self._say(1, json.dumps([operation, nbytes, count]))
            return float(self._hear(1))
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        for end in self._ends:
            end.kill()
            end.communicate()


# One end


def _agent(name: str) -> tuple[Any, Any, Any]:
    import numpy as np

    nixl: Any = importlib.import_module("nixl._api")
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
    memory = np.zeros(CAPACITY, dtype=np.uint8)
    memory[:] = 1
    agent.register_memory([(memory.ctypes.data, CAPACITY, 0, "")], "DRAM")
    return agent, memory, agent.get_agent_metadata()


def _owner() -> None:
    _, memory, metadata = _agent("owner")
    print("> " + json.dumps([base64.b64encode(metadata).decode(), memory.ctypes.data]), flush=True)
    sys.stdin.read()


def _initiator() -> None:
    agent, memory, _ = _agent("initiator")
    metadata, theirs = json.loads(sys.stdin.readline())
    owner = agent.add_remote_agent(base64.b64decode(metadata))
    for line in iter(sys.stdin.readline, ""):
        operation, nbytes, count = json.loads(line)
        local = agent.get_xfer_descs([(memory.ctypes.data, nbytes, 0)], "DRAM")
        remote = agent.get_xfer_descs([(theirs, nbytes, 0)], "DRAM")
        handle = agent.initialize_xfer(operation, local, remote, owner)
        times = []
        for _ in range(count + 1):
            begin = time.perf_counter()
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(state)
            times.append(time.perf_counter() - begin)
        agent.release_xfer_handle(handle)
        print(f"> {statistics.median(times[1:])}", flush=True)


if __name__ == "__main__":
    {"owner": _owner, "initiator": _initiator}[sys.argv[1]]()
