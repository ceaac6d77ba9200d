"""Whether a peer can be reached from here, and by what: by a peer of a made-up name, which joins and leaves again."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from tensorlink.control import Certificates, PeerClient, find_peer, host_identity
from tensorlink.control.addresses import route_to
from tensorlink.doctor.finding import Finding, failed, unknown
from tensorlink.doctor.pair import compared
from tensorlink.endpoint import Endpoint, open_endpoint
from tensorlink.errors import PeerLostError, TensorLinkError, TransferTimeoutError
from tensorlink.settings import Settings
from tensorlink.transports.base import Transport
from tensorlink.types import PeerInfo

_OPEN = (
    "let that port through where the peer runs (TENSORLINK_PORTS names a range), or set TENSORLINK_INTERFACE there to "
    "an address that is reached from here"
)


def reached(name: str, settings: Settings, timeout: float) -> Iterator[Finding]:
    """The way to a peer, step by step, up to the first that fails; blocks `timeout` seconds for each at most.

    Others see a peer come and go meanwhile. Starts no coordinator.
    """
    check = f"peer {name}"
    try:
        found = find_peer(name, settings, timeout)
    except TensorLinkError as error:
        yield failed(check, error)
        return
    try:
        me = f"doctor-{os.getpid()}-{secrets.token_hex(3)}"
        endpoint = open_endpoint(me, replace(settings, timeout=timeout, flight="off"))
    except (TensorLinkError, ValueError) as error:
        yield failed("join", error)
        return
    with endpoint:
        yield Finding("join", "ok", "a peer can join, and its heartbeats arrive")
        yield from _ways(endpoint, found, timeout)


def _ways(endpoint: Endpoint, peer: PeerInfo, timeout: float) -> Iterator[Finding]:
    """The control channel, then every transport."""
    check, settings = f"control of {peer.name}", endpoint.settings
    client = PeerClient(
        peer.address,
        peer=peer.name,
        me=endpoint.id,
        token=settings.token,
        certificates=Certificates.load(settings),
    )
    with contextlib.closing(client):
        began = time.monotonic()
        try:
            hello = client.hello({}, timeout)
        except TensorLinkError as error:
            yield Finding(
                check, "fail", error.message, _mend(error, near=route_to(peer.address).target.startswith("unix:"))
            )
            return
        yield Finding(check, "ok", f"answers at {route_to(peer.address).target} in {_ms(began)}")
        if hello.peer != peer.id:
            reason = f"it is {hello.peer} that answers there: {peer.id} has restarted, or isn't ready yet"
            yield Finding(check, "fail", reason)
            return
        try:
            yield from compared(client, peer.name, peer.address, peer.host == host_identity(), timeout)
        except TensorLinkError as error:
            yield unknown(f"likeness of {peer.name}", error)
    found = list(_paths(endpoint, peer, hello.connect, timeout))
    if not any(one.verdict == "ok" for one in found):
        found.append(Finding(f"path to {peer.name}", "fail", "no transport reaches it", "mend one of those above"))
    yield from found


def _paths(endpoint: Endpoint, peer: PeerInfo, addresses: Mapping[str, bytes], timeout: float) -> Iterator[Finding]:
    links = endpoint._links
    for name, why in links.ways.rejected.items():
        yield Finding(f"{name} to {peer.name}", "note", f"not used here: {why}")
    for name, transport in links.transports.items():
        check = f"{name} to {peer.name}"
        if name not in addresses or not endpoint.settings.allows(name, peer.name):
            absent = f"{peer.name} doesn't have it"
            yield Finding(check, "note", absent if name not in addresses else "excluded by the setting paths")
            continue
        try:
            yield _path(check, transport, peer, addresses[name], timeout)
        except TensorLinkError as error:
            yield failed(check, error, "warn")


def _path(check: str, transport: Transport, peer: PeerInfo, address: bytes, timeout: float) -> Finding:
    """Connects by one transport, and closes that again. Raises: CorruptTransferError: the peer's address is none."""
    why = transport.reaches(transport.address(), address)
    if why is not None:
        return Finding(check, "note", f"not for this pair: {why}")
    where, began = transport.where(address) or "its address", time.monotonic()
    try:
        transport.connect(peer.id, address, None, timeout).close()
    except TensorLinkError as error:
        return Finding(check, "warn", f"tried {where}: {error.message}", _mend(error, near=where.startswith("/")))
    return Finding(check, "ok", f"connects to {where} in {_ms(began)}")


def _mend(error: TensorLinkError, near: bool) -> str | None:
    """Between hosts silence and refusal are mostly a firewall's, or the address's."""
    silent = isinstance(error, (PeerLostError, TransferTimeoutError))
    return _OPEN if silent and not near else error.hint


def _ms(began: float) -> str:
    return f"{(time.monotonic() - began) * 1e3:.1f} ms"
