"""What this process and a peer should have alike: the release, the clock, and how large a packet may be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from tensorlink import network
from tensorlink.control import PeerClient, Pong
from tensorlink.control.addresses import route_to
from tensorlink.doctor.finding import Finding
from tensorlink.errors import PeerLostError, TransferTimeoutError
from tensorlink.version import RELEASE

_PINGS = 5
_SKEW_US = 1_000_000
_LARGE = 64 << 10


def compared(client: PeerClient, peer: str, address: str, same_host: bool, timeout: float) -> Iterator[Finding]:
    """All of it, by some pings; blocks up to `timeout` seconds for each. On one host only the release can differ.

    Raises: as the calls of `PeerClient`.
    """
    sent, pong, received = timed(client, timeout)
    yield release(peer, RELEASE, pong.release)
    if same_host:
        return
    yield clock(peer, sent, pong.utc_us, received)
    target = route_to(address).target
    if target and not target.startswith("unix:"):
        here = network.local_address_towards(*network.split_address(target), timeout)
        yield mtu(peer, network.mtu_of(here) or 0, pong.mtu)
        yield large_packets(peer, lambda: client.about(timeout, _LARGE))


def timed(client: PeerClient, timeout: float) -> tuple[int, Pong, int]:
    """The fastest of some pings, with this host's clock in microseconds before and after."""
    found = []
    for _ in range(_PINGS):
        sent = time.time_ns() // 1000
        pong = client.about(timeout)
        found.append((sent, pong, time.time_ns() // 1000))
    return min(found, key=lambda one: one[2] - one[0])


def release(peer: str, here: str, there: str) -> Finding:
    """Whether both run one release; another protocol has been refused before."""
    check = f"release of {peer}"
    if there == here:
        return Finding(check, "ok", f"{here}, as here")
    reason = f"{there or 'an older one, which does not tell'}; here it is {here}: one protocol, but not tested together"
    return Finding(check, "warn", reason, f"pip install tensorlink=={here}, where {peer} runs")


def clock(peer: str, sent_us: int, there_us: int, received_us: int) -> Finding:
    """How far the clocks are apart for certain: its answer lies between a ping and its arrival."""
    check = f"clock of {peer}"
    if not there_us:
        return Finding(check, "note", f"{peer} doesn't tell it")
    ahead, unsure = there_us - (sent_us + received_us) // 2, (received_us - sent_us) // 2
    reason = f"{_seconds(abs(ahead))} {'ahead' if ahead > 0 else 'behind'}, give or take {_seconds(unsure)}"
    if abs(ahead) - unsure <= _SKEW_US:
        return Finding(check, "ok", reason)
    reason += "; logs and flight records of both can't be put in order, and a certificate may not be valid yet"
    return Finding(check, "warn", reason, "chronyc makestep, or systemctl restart systemd-timesyncd, on both hosts")


def mtu(peer: str, here: int, there: int) -> Finding:
    """MTUs of the two interfaces, in bytes; 0 is unknown. Packets of the larger one are dropped by the smaller."""
    check = f"MTU of {peer}"
    if not (here and there):
        return Finding(check, "note", f"{there or 'unknown'} there, {here or 'unknown'} here")
    if here == there:
        return Finding(check, "ok", f"{there}, as here")
    where, less = ("here", here) if here < there else ("there", there)
    reason = (
        f"{there} there and {here} here: TCP takes the smaller, and what isn't TCP is lost between them without a word"
    )
    return Finding(
        check, "warn", reason, f"ip link set dev INTERFACE mtu {max(here, there)}, {where}, in place of {less}"
    )


def large_packets(peer: str, ping: Callable[[], object]) -> Finding:
    """A ping of 64 KiB, after small ones that were answered."""
    check = f"large packets to {peer}"
    try:
        ping()
    except (TransferTimeoutError, PeerLostError) as error:
        reason = (
            f"short messages are answered, {_LARGE >> 10} KiB aren't ({error.message}): large packets are lost between"
        )
        mend = "let ICMP through (fragmentation needed), or ip link set dev INTERFACE mtu 1400, the smallest of the way"
        return Finding(check, "fail", reason, mend)
    return Finding(check, "ok", f"{_LARGE >> 10} KiB go there and come back")


def _seconds(microseconds: int) -> str:
    return f"{microseconds / 1e6:.3f} s"
