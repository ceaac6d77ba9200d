"""A coordinator for other hosts that nobody has to start or stop: it serves until its last peer has gone.

`serve` does so in a process that somebody else looks after; `Hosted` is one in a small child process. That one ends with
the process that started it, if that is killed: then all is started anew by whoever runs the job, and a coordinator of
before must not be found any more. If it leaves in peace, the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable

from tensorlink import network
from tensorlink.control import embedded
from tensorlink.control.certificates import Certificates
from tensorlink.control.coordinator import Coordinator
from tensorlink.errors import TransferTimeoutError, TransportError
from tensorlink.settings import Settings

_HANDED_ON = ("token", "lease_s", "ports", "tls_cert", "tls_key", "tls_ca")
_STAY = b"stay\n"


async def serve(settings: Settings, host: str, announce: Callable[[str], None], *, grace_s: float) -> None:
    """Serves on a free port of `host`, an IP address, until the last peer has been gone for `grace_s`, or nobody came in
    `embedded.FIRST_S`. `announce` gets `HOST:PORT` once it listens.

    Raises: AuthenticationError: there is neither a token nor a certificate; TransportError: it cannot listen there.
    """
    certificates = Certificates.load(settings)
    coordinator = Coordinator(token=settings.token, lease_s=settings.lease_s, certificates=certificates)
    try:
        announce(network.join_address(host, await coordinator.listen_tcp(host, 0, settings.ports)))
        await coordinator.until_idle(grace_s=grace_s, first_s=max(grace_s, embedded.FIRST_S))
    finally:
        await coordinator.stop()


class Hosted:
    """One in a child process that listens on `host`, at `address`. Blocks until it does, up to `timeout` seconds.

    Raises: TransferTimeoutError: it didn't come up in time; TransportError: it can't, and the message has what it said.
    """

    def __init__(self, settings: Settings, host: str, timeout: float) -> None:
        starter = subprocess.Popen(
            embedded.command(__name__, host, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
            env={key: value for key, value in os.environ.items() if not key.startswith("TENSORLINK_")},
        )
        assert starter.stdin is not None and starter.stdout is not None
        self._pipe = starter.stdin
        try:
            with starter.stdout:
                self._pipe.write(json.dumps({name: getattr(settings, name) for name in _HANDED_ON}).encode() + b"\n")
                self._pipe.flush()
                starter.wait()  # it forks and exits at once
                self.address = _heard(starter.stdout.fileno(), timeout)
        except OSError as error:
            self._pipe.close()
            raise TransportError(
                f"the coordinator does not start: {error.strerror}", code=error.errno, phase="join"
            ) from None
        except BaseException:
            self._pipe.close()
            raise

    def release(self) -> None:
        """Leaves it to its peers: it stays until the last of them has gone, whatever becomes of this process. Idempotent."""
        with contextlib.suppress(OSError, ValueError):  # it has ended, or was released
            self._pipe.write(_STAY)
            self._pipe.close()


def _heard(fd: int, timeout: float) -> str:
    """Where it listens, as it says there."""
    deadline, said = time.monotonic() + timeout, b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while poll.poll(max(deadline - time.monotonic(), 0) * 1000):
        part = os.read(fd, 4096)
        said += part
        ready = re.search(rb"^listens at (\S+)\n", said, re.MULTILINE)
        if ready:
            return ready[1].decode()
        if not part:
            words = said.decode(errors="replace").strip()[-400:] or "it was killed"
            raise TransportError(f"the coordinator does not start: {words}", phase="join")
    raise TransferTimeoutError("the coordinator did not start in time", phase="join")


def main(host: str, starter: str) -> None:
    """The child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with open(0, "rb", buffering=0, closefd=False) as pipe:  # unbuffered: what comes later is for `told`
        line = pipe.readline()
    if line:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_serve(Settings(**json.loads(line)), host, int(starter)))


async def _serve(settings: Settings, host: str, starter: int) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    process = -1
    with contextlib.suppress(OSError):  # no pidfd here: the pipe's end tells, unless a forked child keeps it open
        process = os.pidfd_open(starter)
        loop.add_reader(process, task.cancel)

    def told() -> None:
        word = os.read(0, len(_STAY))
        loop.remove_reader(0)
        if word != _STAY:
            task.cancel()
        elif process >= 0:
            loop.remove_reader(process)

    loop.add_reader(0, told)
    await serve(settings, host, _announce, grace_s=embedded.GRACE_S)


def _announce(address: str) -> None:
    """The last word: the starter listens no longer."""
    print(f"listens at {address}", flush=True)
    silent = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(silent, standard)
    os.close(silent)
