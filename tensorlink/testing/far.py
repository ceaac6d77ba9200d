"""Processes for the far sides of pairs: each is forked from one that has imported everything, which takes over a second."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

_ANSWER_S = 60.0
_IMPORTS_S = 110.0
_REQUEST_BYTES = 256 << 10


class Zygote:
    """Forks processes like itself. It has one thread and nothing open, so that they inherit neither locks nor descriptors.

    `prefix` is a command that runs the one given after it as itself, elsewhere: `nsenter --net=...`.
    """

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = "import sys; from tensorlink.testing.far import breed; breed(int(sys.argv[1]))"
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen([*prefix, sys.executable, "-c", code, str(fd)], pass_fds=[fd])

    def fork(self) -> tuple[int, int, Pipe]:
        """A process with the environment that this one has now: its pid, a pidfd, and a pipe, which the caller owns."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [pickle.dumps(dict(os.environ))], [theirs.fileno()])
        assert select.select([self._socket], [], [], _IMPORTS_S)[0], "the imports take too long"
        pid, (pidfd,), _, _ = socket.recv_fds(self._socket, 64, 1)
        return int(pid), pidfd, Pipe(ours.detach())

    def close(self) -> None:
        """Its processes go on."""
        self._socket.close()
        self._process.wait(_ANSWER_S)


class FarProcess:
    """A process that hosts far sides, and does what it is told over a pipe. Thread-safe."""

    def __init__(self, zygote: Zygote) -> None:
        self._pid, self._pidfd, self._pipe = zygote.fork()
        self._lock = threading.Lock()
        self._sides = 0

    @property
    def alive(self) -> bool:
        return self._pidfd >= 0 and not self._ended(0)

    def side(self, *args: Any) -> RemoteSide:
        self._sides += 1
        self.call(self._sides, "", args, {})
        return RemoteSide(self, self._sides)

    def call(self, number: int, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            self._pipe.send((number, method, args, kwargs))
            assert self._pipe.poll(_ANSWER_S), f"the far side did not answer to {method}"
            good, result = self._pipe.recv()
        if good:
            return result
        raise result

    def kill(self) -> None:
        """SIGKILL; returns once it has ended."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._ended(None)
        self._forget()

    def stop(self) -> None:
        """SIGSTOP; returns once all its threads have stopped."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGSTOP)
        tasks = Path(f"/proc/{self._pid}/task")
        while not all(b") T" in (task / "stat").read_bytes() for task in tasks.iterdir()):
            assert not self._ended(0.002), "it ended before it could be stopped"

    def go_on(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)

    def end(self) -> None:
        """Lets it end by itself, or kills it if it doesn't."""
        self._pipe.close()
        if self._ended(10):
            self._forget()
        else:
            self.kill()

    def _ended(self, timeout: float | None) -> bool:
        return bool(select.select([self._pidfd], [], [], timeout)[0])

    def _forget(self) -> None:
        self._pipe.close()
        os.close(self._pidfd)
        self._pidfd = -1


class RemoteSide:
    """A `Side` in another process: every method of it, called over a pipe. Raises what the method raised there."""

    def __init__(self, process: FarProcess, number: int) -> None:
        self._process = process
        self._number = number

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._process.call(self._number, method, args, kwargs)


def breed(fd: int) -> None:
    """In the zygote: forks for each request, until there is nobody to ask."""
    from tensorlink.testing.pairs import Side

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: a pidfd tells of their end
    with socket.socket(fileno=fd) as requests:
        while True:
            environment, rights, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 1)
            if not environment:
                return None
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                os.environ.clear()
                os.environ.update(pickle.loads(environment))
                return serve(rights[0], Side)
            pidfd = os.pidfd_open(pid)
            socket.send_fds(requests, [str(pid).encode()], [pidfd])
            os.close(pidfd)
            os.close(rights[0])


def serve(fd: int, make: Callable[..., Any]) -> None:
    """In a far process: makes sides and calls their methods until the pipe ends."""
    pipe = Pipe(fd)
    sides: dict[int, Any] = {}
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            number, method, args, kwargs = pipe.recv()
            try:
                if not method:
                    result, sides[number] = None, make(*args)
                elif method == "shutdown" and number not in sides:
                    result = None
                else:
                    side = sides.pop(number) if method == "shutdown" else sides[number]
                    result = getattr(side, method)(*args, **kwargs)
                pipe.send((True, result))
            except Exception as error:
                pipe.send((False, error))
    for side in sides.values():
        side.shutdown()
