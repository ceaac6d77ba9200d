"""How others reach this process, and whether a coordinator is there."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from pathlib import Path

from tensorlink import network
from tensorlink.control import list_peers, listen_address
from tensorlink.doctor.finding import Finding, failed
from tensorlink.errors import PeerLostError, TensorLinkError
from tensorlink.settings import Settings
from tensorlink.topology.sysfs import number

_PORTS_OF_A_PROCESS = 2


def address(root: Path, settings: Settings, timeout: float) -> Finding | None:
    """Where a peer started like this would listen for other hosts. None: nowhere, which the token's check tells."""
    try:
        host = listen_address(replace(settings, timeout=timeout))
    except (TensorLinkError, ValueError) as error:
        return failed("address", error)
    if host is None:
        return None
    if ipaddress.ip_address(host).is_loopback:
        mend = "TENSORLINK_COORDINATOR=HOST:PORT of `tensorlink coordinator`, or TENSORLINK_INTERFACE=eth0"
        return Finding("address", "note", f"peers would listen on {host}, which other hosts can't reach", mend)
    names = [name for name, addresses in network.interfaces().items() if host in addresses]
    mtu = number(root / "sys/class/net" / names[0] / "mtu") if names else None
    on = f" ({names[0]}{f', MTU {mtu}' if mtu else ''})" if names else ""
    return Finding("address", "ok", f"peers would listen on {host}{on}")


def ports(settings: Settings, timeout: float) -> Finding | None:
    """Whether a process that starts now finds its ports in the range. None: there is no range, or nothing listens."""
    if settings.ports is None or not settings.known_to_others:
        return None
    host = listen_address(replace(settings, timeout=timeout)) or "127.0.0.1"
    free = 0
    for port in network.port_range(settings.ports):
        try:
            network.listen(host, port).close()
        except OSError:
            continue
        free += 1
        if free == _PORTS_OF_A_PROCESS:
            return Finding("ports", "ok", f"a process finds its {free} in {settings.ports} on {host}")
    reason = f"{free} of {settings.ports} can be had on {host}, and a process takes {_PORTS_OF_A_PROCESS}"
    return Finding("ports", "fail", reason, "give TENSORLINK_PORTS a wider range")


def coordinator(settings: Settings, timeout: float) -> Finding:
    """Asks who is there. Joins nothing and starts nothing."""
    try:
        count = len(list_peers(settings, timeout))
    except PeerLostError as error:
        if settings.coordinator is None:
            return Finding("coordinator", "note", "none runs on this host; the first peer starts one")
        mend = f"tensorlink coordinator --listen, there; a firewall must let {settings.coordinator} through"
        return Finding("coordinator", "fail", f"none answers at {settings.coordinator}: {error.message}", mend)
    except TensorLinkError as error:
        return failed("coordinator", error)
    return Finding("coordinator", "ok", f"it answers; {count} peer{'s' * (count != 1)} joined")
