"""The flight recorder: where its files are, and what Python tells it.

Each endpoint has one, which the engine writes (`csrc/flight.h`); `recording` reads it.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tensorlink import _core
from tensorlink.errors import ClosedError, TensorLinkError, TransferCancelledError, TransferTimeoutError
from tensorlink.recording import NAME, over

log = logging.getLogger("tensorlink")

OFF = "off"
KEPT = 16
"""So many files of processes that have ended stay for inspection, the newest ones."""
KEPT_S = 7 * 86400.0
_LOOK_S = 0.25  # a shorter wait that ends in vain is no failure
_BY_US = (ClosedError, TransferCancelledError)


def new_file(setting: str | None, directory: Path) -> str:
    """A fresh path for the file of an endpoint: in the directory that the setting names, else in `directory`; empty: there
    is to be none. Removes old files of processes that have ended. Never raises: no file is worth a failure."""
    if setting == OFF:
        return ""
    place = Path(setting) if setting else directory
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep(place)
    except OSError as error:
        log.debug("no flight recorder: %s", error)
        return ""
    return str(place / f"flight-{os.getpid()}-{secrets.token_hex(4)}")


def files(directory: Path, pid: int | None = None) -> list[Path]:
    """The flight files of this user in a directory, those of one process if `pid` is given; the newest first."""
    found: list[tuple[float, Path]] = []
    with suppress(OSError):
        for entry in os.scandir(directory):
            match = NAME.fullmatch(entry.name)
            if match is None or pid not in (None, int(match[1])):
                continue
            with suppress(OSError):  # it has gone
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    found.append((status.st_ctime, Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)]


def sweep(directory: Path) -> None:
    """Removes the files of processes that have ended, but the last ones."""
    ended = 0
    for path in files(directory):
        with suppress(OSError):
            if not over(path):
                continue
            ended += 1
            if ended > KEPT or time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()


@contextmanager
def doing(flight: _core.Flight, what: str, peer: str, phase: str, note: str = "") -> Iterator[None]:
    """This thread does something that takes a chain of calls: it is in flight meanwhile, and an error that says that the time
    is over says for what."""
    span = flight.begin(what, peer, phase, note)
    began, outcome, failed = time.monotonic(), "done", False
    try:
        yield
    except BaseException as error:
        outcome = _kind(error)
        failed = isinstance(error, TensorLinkError) and not isinstance(error, _BY_US)
        if isinstance(error, TransferTimeoutError):
            error.waited = error.waited or _core.waited()
            failed = time.monotonic() - began > _LOOK_S
        raise
    finally:
        span.end(outcome, failed)


def record(flight: _core.Flight, error: TensorLinkError) -> None:
    """A transfer has failed with this error, on this thread."""
    if isinstance(error, _BY_US):
        return
    peer, number = error.peer or "", 0
    name, _, incarnation = peer.rpartition("#")
    if name and incarnation.isdecimal():
        peer, number = name, int(incarnation) % (1 << 64)
    late = isinstance(error, TransferTimeoutError)
    flight.failed(error.phase or "transfer", _kind(error), peer, number, error.transport or "", error.message, late)


def _kind(error: BaseException) -> str:
    return type(error).__name__.removesuffix("Error")


def failed_over(flight: _core.Flight, peer: str, transport: str, error: TensorLinkError) -> None:
    """A path to a peer has failed in use."""
    flight.note("path", "failed over", peer, 0, transport, error.message, failed=True)
