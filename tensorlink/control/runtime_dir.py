"""The directory where processes of one user on one host meet, and the names of the sockets in it.

It never depends on TMPDIR, so two processes with different ones still meet, and its socket paths fit in the 107 bytes
that a unix socket address has, whatever the environment says.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import socket
import stat
import time
from pathlib import Path

from tensorlink.errors import AuthenticationError, TransportError

MAX_SOCKET_PATH = 107
_LONGEST_NAME = 32
_PLAIN_NAMESPACE = 20
_SETTLED_S = 10.0


def runtime_dir() -> Path:
    """The 0700 directory, made if it is missing: `$XDG_RUNTIME_DIR/tensorlink`, or `/tmp/tensorlink-UID`.

    Raises:
        AuthenticationError: the place is taken by somebody else.
        TransportError: it cannot be made.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(base, "tensorlink")
    fits = len(os.fsencode(path)) + 1 + _LONGEST_NAME <= MAX_SOCKET_PATH
    if not (os.path.isabs(base) and fits and os.access(base, os.W_OK | os.X_OK)):
        path = Path(f"/tmp/tensorlink-{os.geteuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            if stat.S_IMODE(found.st_mode) & 0o077:
                path.chmod(0o700)
            return path
    except FileExistsError:
        pass
    except OSError as error:
        raise TransportError(f"cannot make the run-time directory {path}: {error.strerror}", code=error.errno) from None
    raise AuthenticationError(
        f"{path} is not a directory that belongs to user {os.geteuid()}",
        phase="join",
        hint="Remove it, or set XDG_RUNTIME_DIR to a directory that only you can write",
    )


def coordinator_socket(directory: Path, namespace: str) -> Path:
    """Where the coordinator of this namespace listens. A long namespace goes by its hash."""
    if len(namespace) > _PLAIN_NAMESPACE:
        namespace = "~" + hashlib.blake2b(namespace.encode(), digest_size=8).hexdigest()
    return directory / f"c-{namespace}.sock"


def private_socket(directory: Path, prefix: str = "p") -> Path:
    """A fresh path for a socket of this process. `sweep` removes it once the process is dead."""
    return directory / f"{prefix}-{os.getpid()}-{secrets.token_hex(4)}.sock"


def answers(path: Path) -> bool:
    """Whether a process of this user listens on the socket. A stopped one does: its backlog accepts."""
    try:
        if path.lstat().st_uid != os.geteuid():
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            return probe.connect_ex(str(path)) in (0, errno.EAGAIN, errno.EPROTOTYPE)  # the last: of another type
    except OSError:
        return False


def remove(path: Path) -> None:
    """Removes a file or an empty directory, if it is there."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):
        path.rmdir()


def sweep(directory: Path) -> None:
    """Removes the private sockets of processes that are gone."""
    for path in directory.glob("?-*-*.sock"):
        pid = path.name.split("-")[1]
        try:
            settled = time.time() - path.lstat().st_mtime > _SETTLED_S
            # A socket that is bound and does not listen yet refuses too, so a live owner gets time.
            if pid.isdigit() and (settled or not _alive(int(pid))) and not answers(path):
                path.unlink(missing_ok=True)
        except OSError:
            continue


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def host_identity() -> str:
    """Identity of this host, equal in every process that can share memory with this one: the kernel's boot id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def engine_socket(*, clean: bool = False) -> Path:
    """A fresh path for the socket of an engine. `clean`: what killed processes left there is removed, as no embedded coordinator
    does that. Raises: AuthenticationError: the run-time directory is somebody else's."""
    directory = runtime_dir()
    if clean:
        sweep(directory)
    return private_socket(directory, "e")
