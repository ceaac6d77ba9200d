"""What a process has that it could leave behind: children, threads, file descriptors, memory files and their mappings.

No allowance is needed for gRPC, whose threads and descriptors end with its last channel and server (tried with 1.85,
plain and asyncio), nor for OpenMP in torch and BLAS in numpy, whose idle workers would stay: conftest.py sets one
thread a pool.
The resource tracker of multiprocessing lives as long as the process, so conftest.py starts it first.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc/self")
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Snapshot:
    """What this process has now. Each key is an identity, each value says what it is to a reader."""

    children: dict[int, str]
    threads: dict[int, str]
    fds: dict[int, str]
    memory: dict[str, str]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(children(), _threads(), _fds(), _memory())


def adopt_orphans() -> None:
    """From now on, descendants whose parent dies become children of this process, and so are seen.

    They also become zombies of it when they end: ask `alive`, not `os.kill(pid, 0)`, whether one still runs.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def alive(pid: int) -> bool:
    """Whether the process runs: neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


LASTING = {"native tensorlink-copy"}
"""Threads that a process keeps: the helpers of large copies, one for each further processor."""


def children() -> dict[int, str]:
    """Living children of this process, adopted ones included: pid to command line."""
    found = {}
    for task in (PROC / "task").iterdir():
        with suppress(OSError):  # the thread ended
            for pid in map(int, (task / "children").read_text().split()):
                if alive(pid):
                    with suppress(OSError):
                        found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return found


def _threads() -> dict[int, str]:
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = {}
    for task in (PROC / "task").iterdir():
        with suppress(OSError):
            found[int(task.name)] = names.get(int(task.name)) or f"native {(task / 'comm').read_text().strip()}"
    return found


def _fds() -> dict[int, str]:
    found = {}
    for entry in (PROC / "fd").iterdir():
        with suppress(OSError):
            found[int(entry.name)] = str(entry.readlink())
    return found


def _memory() -> dict[str, str]:
    shared = {str(path): "file" for path in Path("/dev/shm").glob("*")}
    for line in (PROC / "maps").read_text().splitlines():
        span, _, _, _, inode, *path = line.split(maxsplit=5)
        if path and path[0].startswith("/memfd:"):
            shared[f"{path[0]} inode {inode}"] = f"mapping {span}"
    return shared


def leaks(before: Snapshot) -> list[str]:
    """What is there now and wasn't in `before`, in words.

    Descriptors are compared by how many there are of a kind, so one that was closed and opened again is none.
    """
    now = Snapshot.take()
    excess = Counter(map(_kind, now.fds.values())) - Counter(map(_kind, before.fds.values()))
    fds = [
        f"fd {number} {target}"
        for number, target in now.fds.items()
        if _kind(target) in excess and before.fds.get(number) != target
    ]
    return [
        *(f"child {pid} {command}" for pid, command in now.children.items() if pid not in before.children),
        *(f"thread {name}" for tid, name in now.threads.items() if tid not in before.threads and name not in LASTING),
        *(fds if excess else []),
        *(f"{what} {name}" for name, what in now.memory.items() if name not in before.memory and not _foreign(name)),
    ]


def _foreign(name: str) -> bool:
    """Whether another process maps the file: work of others on this host, or of a child, which is seen as one."""
    if not name.startswith("/dev/shm/"):
        return False
    for entry in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if int(entry.parent.name) != os.getpid() and f" {name}\n" in entry.read_text():
                return True
    return False


def _kind(target: str) -> str:
    return re.sub(r":\[\d+\]$", "", target)


def settle(before: Snapshot, timeout: float = 5.0) -> list[str]:
    """Waits until nothing is left that wasn't in `before`; what is left at the deadline.

    Threads and descriptors of a closed channel, and processes that were told to exit, take a moment to go.
    """
    deadline = time.monotonic() + timeout
    gc.collect()
    while (found := leaks(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
        gc.collect()
    return found


def end_children(before: Snapshot) -> None:
    """Kills children that weren't in `before`, so that they don't disturb what comes next, and reaps adopted ones."""
    for pid in children().keys() - before.children.keys():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
