"""The coordinator of one user and namespace on one host: found, elected and started without being named.

Whoever holds the `flock` of the lock file is it. A starter takes the lock and passes it on to a small child process of
its own session, which holds it until it exits; a crash releases it. The socket appears once it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from tensorlink.control import runtime_dir
from tensorlink.errors import PeerLostError, TensorLinkError, TransferTimeoutError, TransportError

if TYPE_CHECKING:
    from tensorlink.control.coordinator import Coordinator

GRACE_S = 2.0
"""An embedded coordinator exits this long after its last peer."""
FIRST_S = 10.0
"""And this long after its start if nobody ever joins."""
_STUCK_S = 15.0
_LOOK_S = 0.5
_MAX_CRASHES = 3

# Forks once more, so that init reaps it, before anything else is loaded. The package is named by its folder and its
# `__init__` not run: what users import from there would only make this process slow and large.
_BOOT = """
import os, sys
if os.fork(): os._exit(0)
import importlib, json, types
sys.path[:] = json.loads(sys.argv[1])
package = types.ModuleType("tensorlink")
package.__path__ = [sys.argv[2]]
sys.modules["tensorlink"] = package
importlib.import_module(sys.argv[3]).main(*sys.argv[4:])
"""


def command(module: str, *arguments: str) -> list[str]:
    """What starts a small process of its own that runs `main` of a module of ours: it forks, and ends at once itself."""
    package = str(Path(__file__).parents[1])
    search = json.dumps([entry or os.getcwd() for entry in sys.path])
    return [sys.executable, "-I", "-c", _BOOT, search, package, module, *arguments]


def find_or_start(namespace: str, *, token: str | None, lease_s: float, timeout: float) -> Path:
    """Socket of the coordinator of this namespace, started if there is none. Blocks until it answers.

    Raises:
        AuthenticationError: the run-time directory belongs to somebody else.
        TransferTimeoutError: it did not come up in `timeout` seconds.
        TransportError: it cannot be started; the message has what it said.
        PeerLostError: it was killed each time before it answered.
    """
    path = runtime_dir.coordinator_socket(runtime_dir.runtime_dir(), namespace)
    deadline = time.monotonic() + timeout
    held_since, crashes, started = time.monotonic(), 0, False
    while not runtime_dir.answers(path):
        lock = take_lock(path.with_suffix(".lock"))
        if lock is not None:
            try:
                if runtime_dir.answers(path):
                    break
                crashes += started
                if crashes >= _MAX_CRASHES:
                    raise _no_start(path)
                _spawn(path, lock, token=token, lease_s=lease_s)
                started, held_since = True, time.monotonic()
            finally:
                os.close(lock)
        elif time.monotonic() - held_since > _STUCK_S:
            # A forked child of a starter may keep the lock of a dead coordinator; nobody listens, so pass it by.
            runtime_dir.remove(path.with_suffix(".lock"))
            held_since = time.monotonic()
        if time.monotonic() > deadline:
            raise TransferTimeoutError("the coordinator did not start in time", phase="join")
        time.sleep(0.01)
    return path


def take_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None. The file may be replaced meanwhile: only the one at `path` counts."""
    try:
        if path.is_dir():
            runtime_dir.remove(path)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise TransportError(f"cannot open {path}: {error.strerror}", code=error.errno, phase="join") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_mine(path, lock):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _spawn(path: Path, lock: int, *, token: str | None, lease_s: float) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TENSORLINK_")}
    if token:
        environment["TENSORLINK_TOKEN"] = token
    try:
        with open(path.with_suffix(".log"), "wb", opener=_private) as words:
            starter = subprocess.Popen(
                command(__name__, str(path), str(lock), str(lease_s)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                pass_fds=(lock,),
                start_new_session=True,
                cwd="/",
                env=environment,
            )
    except OSError as error:
        raise TransportError(f"cannot start the coordinator: {error}", code=error.errno, phase="join") from None
    starter.wait()  # it forks and exits at once


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _no_start(path: Path) -> TensorLinkError:
    """Why it doesn't start. One that died without a word was killed: that may be tried again, so it is PeerLostError."""
    try:
        words = path.with_suffix(".log").read_text()[-400:].strip()
    except OSError:
        words = "it left no log"
    if not words:
        return PeerLostError("the coordinator was killed before it answered, again and again", phase="join")
    return TransportError(f"the coordinator does not start: {words}", phase="join")


def main(path: str, lock: str, lease_s: str) -> None:
    """The child process: serves until its last peer has gone. Holds the descriptor `lock` all the time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.set_inheritable(int(lock), False)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(Path(path), int(lock), float(lease_s), os.environ.get("TENSORLINK_TOKEN")))


async def _serve(path: Path, lock: int, lease_s: float, token: str | None) -> None:
    from tensorlink.control.coordinator import Coordinator

    coordinator = Coordinator(token=token, lease_s=lease_s)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with serving(coordinator, path, lock) as displaced:
        idle = asyncio.create_task(coordinator.until_idle(grace_s=GRACE_S, first_s=FIRST_S))
        await asyncio.wait([idle, displaced], return_when=asyncio.FIRST_COMPLETED)


@contextlib.asynccontextmanager
async def serving(coordinator: Coordinator, path: Path, lock: int) -> AsyncIterator[asyncio.Task[None]]:
    """Listens on `path` inside the block, for the holder of the lock. Leaves nothing of its own behind in the directory.

    The task that it gives ends when the place is no longer this coordinator's: its socket or its lock was removed, by somebody
    who cleans up, and new peers find another one there or none. It should go then: its peers meet the others at the next.
    """
    runtime_dir.sweep(path.parent)
    await coordinator.listen_unix(path)
    socket = path.lstat()
    displaced = asyncio.create_task(_displaced(path, socket, lock))
    try:
        yield displaced
    finally:
        displaced.cancel()
        mine = _is_mine(path, lock)
        if mine:
            for name in (path, path.with_suffix(".hb")):
                runtime_dir.remove(name)
        await coordinator.stop()
        runtime_dir.sweep(path.parent)
        if mine:
            for name in (path.with_suffix(".log"), path.with_suffix(".lock")):
                runtime_dir.remove(name)  # the lock last: while it stands nobody else starts


async def _displaced(path: Path, socket: os.stat_result, lock: int) -> None:
    with contextlib.suppress(OSError):
        while _is_mine(path, lock) and os.path.samestat(path.lstat(), socket) and path.with_suffix(".hb").lstat():
            await asyncio.sleep(_LOOK_S)


def _is_mine(path: Path, lock: int) -> bool:
    """Whether the lock file at this place is the one that is held; if not, another coordinator may have started here."""
    try:
        return os.path.samestat(os.fstat(lock), path.with_suffix(".lock").lstat())
    except OSError:
        return False
