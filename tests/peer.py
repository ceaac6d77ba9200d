"""Real processes to test with: each is forked from one that has imported everything already, and does what it is told.

A function to be run in a child is a module-level function of a test module or of the library; it, its arguments and its
result are pickled. Nothing here sleeps: every wait ends with an event or fails at its deadline.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parents[1]
DEADLINE_S = 30.0
IMPORTS_S = 110.0  # torch takes 15 s on a busy machine
PR_SET_CHILD_SUBREAPER = 36
PRELOADED = ("numpy", "pytest", "torch", "tensorlink", "tests.peer")

kept: dict[str, Any] = {}
"""In a child: what its functions keep from one call to the next."""

_parent: Connection | None = None


def say(value: Any) -> None:
    """In a child, also from its threads: tells the test something before the call has ended, for `Peer.hear`."""
    assert _parent is not None
    _parent.send_bytes(pickle.dumps(("said", value)))


def eventually(check: Callable[[], Any], what: str, timeout: float = DEADLINE_S) -> Any:
    """The first true value of `check`, for what sends no event: processes, files and counters of others."""
    deadline = time.monotonic() + timeout
    while not (value := check()):
        assert time.monotonic() < deadline, f"not in {timeout} s: {what}"
        select.select([], [], [], 0.01)
    return value


def _search_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


class Peer:
    """A child process. `call` runs a function there; `start`, `hear` and `finish` do so while the test goes on."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self._connection = connection
        self._said: list[Any] = []
        self._pidfd = os.pidfd_open(pid)
        self._status: int | None = None

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float = DEADLINE_S, **named: Any) -> Any:
        """Its result; what it raises is raised here."""
        self.start(function, *arguments, **named)
        return self.finish(timeout)

    def start(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        self._connection.send_bytes(
            pickle.dumps((function, arguments, named))
        )  # torch changes what send() does to tensors

    def hear(self, timeout: float = DEADLINE_S) -> Any:
        """The next value that the child said."""
        if self._said:
            return self._said.pop(0)
        kind, value = self._receive(timeout)
        assert kind == "said", f"the call ended before it said anything: {value!r}"
        return value

    def ready(self, seconds: float) -> bool:
        """Whether it says something within that time, its end included."""
        return self._connection.poll(seconds)

    def finish(self, timeout: float = DEADLINE_S) -> Any:
        """The result of what was started."""
        while True:
            kind, value = self._receive(timeout)
            if kind == "said":
                self._said.append(value)
            elif kind == "raised":
                error, text = value
                error.add_note(f"in process {self.pid}:\n{text}")
                raise error
            else:
                return value

    def _receive(self, timeout: float) -> tuple[str, Any]:
        assert self._connection.poll(timeout), f"process {self.pid} gave no answer in {timeout} s"
        kind, value = pickle.loads(self._connection.recv_bytes())
        return kind, value

    def signal(self, number: int) -> None:
        """Sends it. SIGSTOP also waits for its effect: on a busy machine other threads go on until the chosen one has run."""
        signal.pidfd_send_signal(self._pidfd, number)
        if number == signal.SIGSTOP:
            eventually(self._stands, f"process {self.pid} has stopped")

    def _stands(self) -> bool:
        """Whether all its threads have stopped; also where it has ended."""
        states = []
        for task in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # the thread ended
                states.append(task.read_text().rpartition(")")[2].split()[0])
        return all(state in "TtZX" for state in states)

    def kill(self) -> None:
        """SIGKILL, and waits until it has gone."""
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def wait(self, timeout: float = DEADLINE_S) -> int:
        """Its exit status, negative for a signal, once it has ended."""
        if self._status is None:
            assert select.select([self._pidfd], [], [], timeout)[0], f"process {self.pid} still runs after {timeout} s"
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def exit(self) -> int:
        """Lets it end by itself, as a program does at its end; the exit status."""
        self._connection.close()
        return self.wait()

    def close(self) -> None:
        """Ends it by whatever means. Idempotent."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self.wait()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._connection.close()


class Nursery:
    """Starts children. It is a process of its own, so that they inherit no thread and no lock of the tests.

    `preloaded` are modules that they have imported; torch alone makes the end of each of them a second long.
    """

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # its orphans become our children, to be waited for
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.peer", str(theirs.fileno()), *preloaded]
        environment = {**os.environ, "PYTHONPATH": _search_path()}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT)
        theirs.close()
        self._socket = ours
        assert select.select([ours], [], [], IMPORTS_S)[0], "the imports take too long"
        ours.recv(64)

    def start(self, **environment: str) -> Peer:
        """A fresh process with this one's environment and what is given on top."""
        ours, theirs = socket.socketpair()
        request = pickle.dumps({**os.environ, "PYTHONPATH": _search_path(), **environment})
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))]
        self._socket.sendmsg([request], rights)
        theirs.close()
        assert select.select([self._socket], [], [], DEADLINE_S)[0], "the nursery does not answer"
        return Peer(int(self._socket.recv(64)), Connection(ours.detach()))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(DEADLINE_S)


_nursery: list[Nursery] = []


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """One for all modules, since importing torch takes seconds."""
    if not _nursery:
        _nursery.append(Nursery())
    yield _nursery[0]
    _nursery[0].close()


@pytest.fixture
def spawn(nursery: Nursery) -> Iterator[Callable[..., Peer]]:
    """`spawn(NAME="value")` starts a child with these environment variables; it ends with the test."""
    peers: list[Peer] = []

    def start(**environment: str) -> Peer:
        peers.append(nursery.start(**environment))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


def _serve_requests(requests: socket.socket) -> None:
    """Forks twice for each request, so that whoever asked becomes the parent."""
    while True:
        message, rights, _, _ = requests.recvmsg(1 << 18, socket.CMSG_SPACE(4))
        if not message:
            return
        (descriptor,) = array.array("i", rights[0][2])
        reading, writing = os.pipe()
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid == 0:
                for inherited in (requests.detach(), reading, writing):
                    os.close(inherited)
                _child(Connection(descriptor), pickle.loads(message))
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.waitpid(middle, 0)  # only now has the child been handed over
        requests.send(os.read(reading, 64))
        for done_with in (descriptor, reading, writing):
            os.close(done_with)


def _child(parent: Connection, environment: dict[str, str]) -> NoReturn:
    global _parent
    _parent = parent
    os.environ.clear()
    os.environ.update(environment)
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, arguments, named = pickle.loads(parent.recv_bytes())
            try:
                answer: tuple[str, Any] = ("returned", function(*arguments, **named))
            except BaseException as error:
                answer = ("raised", (error, traceback.format_exc()))
            try:
                data = pickle.dumps(answer)
            except (pickle.PicklingError, TypeError, AttributeError):
                data = pickle.dumps((answer[0], repr(answer[1])))
            parent.send_bytes(data)
            del answer, arguments, named
    sys.exit(0)


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    from tests import peer

    asked = socket.socket(fileno=int(sys.argv[1]))
    asked.send(b"ready")
    peer._serve_requests(asked)
