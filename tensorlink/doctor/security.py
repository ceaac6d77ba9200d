"""Who may get in: the token, the certificates and the directory where processes of one host meet."""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path

from tensorlink.control import Certificates
from tensorlink.control.runtime_dir import answers, runtime_dir
from tensorlink.doctor.finding import Finding, failed
from tensorlink.errors import TensorLinkError
from tensorlink.settings import Settings

_TOKEN_CHARACTERS = 22
"""128 bits, which can't be guessed, take as many in base64, where each has the most."""


def token(settings: Settings) -> Finding:
    """Without a token or certificates nothing listens beyond this host."""
    mend = 'export TENSORLINK_TOKEN="$(openssl rand -hex 32)", the same for all processes of the job'
    if not settings.token:
        if settings.tls_cert:
            return Finding("token", "ok", "none, and none is needed: certificates tell who is a peer")
        return Finding("token", "note", "no token and no certificates: peers of this user on this host only", mend)
    if len(settings.token) < _TOKEN_CHARACTERS:
        reason = f"{len(settings.token)} characters are too few for 128 random bits, and it may be guessed"
        return Finding("token", "warn", reason, mend)
    return Finding("token", "ok", "there is one, long enough to be random")


def certificates(settings: Settings, library: str = "libssl.so.3") -> Finding | None:
    """Tries the certificates against each other. None: none are set."""
    if not (settings.tls_cert and settings.tls_key):
        return None
    try:
        Certificates.load(settings)
    except TensorLinkError as error:
        return failed("certificates", error)
    try:
        ctypes.CDLL(library)
    except OSError:
        return Finding("certificates", "fail", f"TLS needs OpenSSL 3, and {library} isn't here", "apt install libssl3")
    mode = stat.S_IMODE(Path(settings.tls_key).stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        reason = f"the key {settings.tls_key} is open to others (mode {mode:o}): who reads it is a peer"
        return Finding("certificates", "warn", reason, f"chmod 600 {settings.tls_key}")
    return Finding("certificates", "ok", f"{settings.tls_cert} is accepted by its like, and its key is private")


def directory() -> Finding:
    """Where sockets lie. Makes it if it is missing, as every peer does."""
    check = "run-time directory"
    try:
        path = runtime_dir()
    except TensorLinkError as error:
        return failed(check, error)
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and path.parent != Path(base):
        reason = f"{path}: XDG_RUNTIME_DIR={base} can't be written or is too long for a socket"
        mend = "set XDG_RUNTIME_DIR to one short path of a directory of yours, for all processes"
        return Finding(check, "note", f"{reason}; processes that can use it aren't met", mend)
    return Finding(check, "ok", f"{path}, for its user only")


def sockets() -> Finding:
    """Sockets of processes that have ended."""
    path = runtime_dir()
    left = [one for one in path.glob("?-*-*.sock") if not answers(one)]
    if not left:
        return Finding("sockets", "ok", "none are left behind")
    reason = f"{len(left)} in {path} of processes that were killed; the next coordinator that starts there removes them"
    return Finding("sockets", "note", reason)


def container(root: Path, settings: Settings) -> Finding | None:
    """Processes of other containers have another run-time directory, and are as on another host. None: this is none."""
    if not any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv")):
        return None
    reason = "this is one; peers that don't see its run-time directory are reached over TCP"
    if settings.known_to_others:
        return Finding("container", "ok", reason)
    mend = "set TENSORLINK_TOKEN, if there are to be such"
    return Finding("container", "note", f"{reason}, which needs a token or certificates", mend)
