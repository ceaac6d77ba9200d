"""The functions of `tensorlink`: each is the method of that name of the current endpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from tensorlink import rendezvous, transfer
from tensorlink.endpoint import Endpoint, Timeout, open_endpoint
from tensorlink.errors import ClosedError, NameInUseError
from tensorlink.paths import PathReport
from tensorlink.settings import Settings
from tensorlink.topology import Bundle, Device, Limits, Link, Topology, discover, read
from tensorlink.transfer import Transfer
from tensorlink.types import PeerInfo, TensorRef

_current: Endpoint | None = None
_first_pid: int | None = None  # of the process that first called init: a child forked from it cannot


def init(
    name: str | None = None,
    *,
    coordinator: str | None = None,
    transports: str | None = None,
    token: str | None = None,
    pool_bytes: int | None = None,
    **settings: Any,
) -> Endpoint:
    """Joins as a peer, and makes it the current endpoint of this process if there is none.

    `name` is unique among the peers of a coordinator; left out, one is made up. With no `coordinator` named, peers of
    one user on one host find each other, and those of one Ray namespace or one torchrun job wherever they run. There each
    process has a name by itself: `init` without one returns the endpoint that is open under it, if this process has that already.

    A process may have several endpoints; `tensorlink.send` and the like use the first that is still open, the others are
    used by their methods. Other settings: the fields of `tensorlink.Settings`. Also a context manager.

    Blocks until it has joined. Raises: NameInUseError: a live peer has the name; AuthenticationError;
    TransferTimeoutError, PeerLostError: no coordinator can be reached; ValueError: a setting cannot be parsed;
    ClosedError: this process was forked from one that had called it.
    """
    global _current, _first_pid
    if _first_pid not in (None, os.getpid()):
        raise ClosedError(
            "this process was forked from one that had called tensorlink.init(), and gRPC cannot be used in it",
            hint="Start it by spawn: multiprocessing.get_context('spawn'), or DataLoader(multiprocessing_context='spawn')",
        )
    loaded = Settings.load(
        coordinator=coordinator, transports=transports, token=token, pool_bytes=pool_bytes, **settings
    )
    met = rendezvous.detect(loaded.rendezvous)
    there = _current
    if name is None and met is not None and there is not None and not there.closed and there.name == met.peer_name:
        met.close()
        return there
    _first_pid = os.getpid()
    try:
        endpoint = open_endpoint(name, loaded, _forget, met)
    except NameInUseError as error:
        if f"pid {os.getpid()})" in error.message:
            error.hint = "That is this process: use tensorlink.current(), or call tensorlink.shutdown() first"
        raise
    if (_current is None or _current.closed) and not endpoint.closed:
        _current = endpoint
    return endpoint


def _forget(endpoint: Endpoint) -> None:
    global _current
    if _current is endpoint:
        _current = None


def shutdown() -> None:
    """Shuts the current endpoint down, if there is one. Idempotent."""
    endpoint = _current
    if endpoint is not None:
        endpoint.shutdown()


def drain(*, timeout: Timeout = ...) -> None:
    """See `Endpoint.drain`."""
    current().drain(timeout=timeout)


def current() -> Endpoint:
    """The current endpoint. Raises: ClosedError: `init` was not called, or it was shut down, or this is a forked child."""
    endpoint = _current
    if endpoint is None:
        raise ClosedError(
            "this process is no peer: it never joined, or has left", hint='Call tensorlink.init("a-name") first'
        )
    endpoint._check_open()
    return endpoint


def send(obj: Any, to: str, *, tag: str = "", timeout: Timeout = ...) -> None:
    """See `Endpoint.send`."""
    current().send(obj, to, tag=tag, timeout=timeout)


def recv(
    source: str | None = None, *, tag: str = "", out: Any = None, timeout: Timeout = ..., like: str | None = None
) -> Any:
    """See `Endpoint.recv`."""
    return current().recv(source, tag=tag, out=out, timeout=timeout, like=like)


def isend(obj: Any, to: str, *, tag: str = "", timeout: Timeout = ...) -> Transfer:
    """See `Endpoint.isend`."""
    return current().isend(obj, to, tag=tag, timeout=timeout)


def irecv(
    source: str | None = None, *, tag: str = "", out: Any = None, timeout: Timeout = None, like: str | None = None
) -> Transfer:
    """See `Endpoint.irecv`."""
    return current().irecv(source, tag=tag, out=out, timeout=timeout, like=like)


def wait(transfers: Sequence[Transfer], *, timeout: Timeout = ..., any: bool = False) -> list[Transfer]:
    """Blocks until all transfers have ended, or one of them with `any=True`; returns those that have.

    Raises: TransferTimeoutError. How each one ended is told by its `result()`.
    """
    return transfer.wait(transfers, timeout=current()._waiting(timeout), any=any)


def put(
    obj: Any, *, copy: bool = True, reads: int | None = None, ttl: float | None = None, checksum: bool = False
) -> TensorRef:
    """See `Endpoint.put`."""
    return current().put(obj, copy=copy, reads=reads, ttl=ttl, checksum=checksum)


def get(
    ref: TensorRef,
    *,
    out: Any = None,
    device: str | None = None,
    timeout: Timeout = ...,
    like: str | None = None,
    transports: str | None = None,
) -> Any:
    """See `Endpoint.get`."""
    return current().get(ref, out=out, device=device, timeout=timeout, like=like, transports=transports)


def iget(
    ref: TensorRef,
    *,
    out: Any = None,
    device: str | None = None,
    timeout: Timeout = ...,
    like: str | None = None,
    transports: str | None = None,
) -> Transfer:
    """See `Endpoint.iget`."""
    return current().iget(ref, out=out, device=device, timeout=timeout, like=like, transports=transports)


def empty(shape: Sequence[int] | int, dtype: Any, *, device: str = "cpu", like: str = "torch") -> Any:
    """See `Endpoint.empty`."""
    return current().empty(shape, dtype, device=device, like=like)


def peers() -> list[PeerInfo]:
    """See `Endpoint.peers`."""
    return current().peers()


def topology() -> Topology:
    """See `Endpoint.topology`."""
    return current().topology()


def explain(peer_or_ref: str | TensorRef, nbytes: int | None = None, *, timeout: Timeout = ...) -> PathReport:
    """See `Endpoint.explain`."""
    return current().explain(peer_or_ref, nbytes, timeout=timeout)


def on(event: str, callback: Callable[..., None]) -> Callable[[], None]:
    """See `Endpoint.on`."""
    return current().on(event, callback)


def stats() -> dict[str, Any]:
    """See `Endpoint.stats`."""
    return current().stats()


# `from tensorlink import topology` is that function, which hides the package of the same name: it has its names too.
topology.__dict__ |= {"Bundle": Bundle, "Device": Device, "Limits": Limits, "Link": Link, "Topology": Topology}
topology.__dict__ |= {"discover": discover, "read": read}

# What help() shows is the method's own text.
drain.__doc__ = Endpoint.drain.__doc__
send.__doc__ = Endpoint.send.__doc__
recv.__doc__ = Endpoint.recv.__doc__
isend.__doc__ = Endpoint.isend.__doc__
irecv.__doc__ = Endpoint.irecv.__doc__
put.__doc__ = Endpoint.put.__doc__
get.__doc__ = Endpoint.get.__doc__
iget.__doc__ = Endpoint.iget.__doc__
empty.__doc__ = Endpoint.empty.__doc__
topology.__doc__ = Endpoint.topology.__doc__
explain.__doc__ = Endpoint.explain.__doc__
peers.__doc__ = Endpoint.peers.__doc__
on.__doc__ = Endpoint.on.__doc__
stats.__doc__ = Endpoint.stats.__doc__
