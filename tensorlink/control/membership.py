"""Who is a member: names, incarnations, leases and services. Pure logic; the clocks and the randomness are given.

Not thread-safe: the coordinator's event loop is the only caller.
"""

from __future__ import annotations

import difflib
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tensorlink.errors import NameInUseError, PeerLostError, TensorLinkError
from tensorlink.types import PeerId, PeerInfo

MAX_INCARNATION = 1 << 62
"""No honest incarnation is near this: it counts microseconds since 1970."""
KEY_BYTES = 16
MAX_MEMBERS = 4096
MAX_SERVICES = 256
"""Of one member."""
MAX_REMEMBERED = 65536
"""Names of which the highest incarnation is kept, at least, and at most of twice as many. Of those that aren't there the
one that joined longest ago is forgotten first: its successor starts at the clocks anyway."""
_BACK_S = 5.0
_SPARED_LEASES = 120


@dataclass(frozen=True)
class Change:
    """One change of the membership, as watchers see it."""

    kind: Literal["up", "down", "updated"]
    peer: PeerInfo
    reason: str = ""


@dataclass
class Lease:
    """A live peer: until `expires` (seconds of the given clock) unless a beat extends it."""

    peer: PeerInfo
    key: bytes
    nonce: bytes
    expires: float
    links: bytes = b""
    last_beat: float = field(default=-math.inf)
    expelled: bool = False
    """The same incarnation had a lease before that ran out."""


def _utc_us() -> int:
    return time.time_ns() // 1000


def _check_services(count: int, name: str) -> None:
    if count > MAX_SERVICES:
        raise TensorLinkError(
            f"{name} would serve {count} names, and {MAX_SERVICES} are the most of one peer",
            peer=name,
            phase="advertise",
            hint="Withdraw those that are not needed",
        )


class Membership:
    """The coordinator's table. `on_change` is called for each change, in order, before the method returns."""

    def __init__(
        self,
        lease_s: float,
        on_change: Callable[[Change], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        utc_us: Callable[[], int] = _utc_us,
    ) -> None:
        self.lease_s = lease_s
        self._on_change = on_change
        self._clock = clock
        self._utc_us = utc_us
        self._live: dict[str, Lease] = {}
        self._by_key: dict[bytes, Lease] = {}
        self._servers: dict[str, str] = {}  # service -> name of the live peer that serves it
        self._known: dict[str, int] = {}  # highest incarnation ever heard of, by name
        self._expelled: dict[str, int] = {}  # the last incarnation whose lease ran out, by name
        self._heard = -math.inf  # when anybody was heard of last

    def __len__(self) -> int:
        return len(self._live)

    def peers(self) -> list[PeerInfo]:
        """Live peers, by name."""
        return [self._live[name].peer for name in sorted(self._live)]

    def holder(self, name: str) -> Lease | None:
        """The live holder of a name."""
        return self._live.get(name)

    def by_key(self, key: bytes) -> Lease | None:
        """The live holder of a lease key."""
        return self._by_key.get(key)

    def server_of(self, service: str) -> Lease | None:
        """The live peer that serves this name."""
        return self._live.get(self._servers.get(service, ""))

    def near(self, name: str, *, services: bool = False) -> list[str]:
        """Up to three names (of peers, or of services) that look like `name`."""
        return difflib.get_close_matches(name, sorted(self._servers if services else self._live), n=3)

    def learn(self, known: Mapping[str, int]) -> None:
        """Takes over incarnations that others know. A live holder below one of them is none any more."""
        for name, incarnation in known.items():
            if incarnation <= self._known.get(name, 0):
                continue
            self._remember(name, incarnation)
            lease = self._live.get(name)
            if lease is not None and lease.peer.incarnation < incarnation:
                self._drop(lease, "a higher incarnation of it is known")

    def join(self, peer: PeerInfo, nonce: bytes, links: bytes = b"", *, utc_us: int = 0) -> Lease:
        """Makes `peer` a live member and returns its lease.

        `peer.incarnation` is 0 for a new peer, or what it has. A new one is above all known ones, and no earlier than this clock
        and the joiner's (`utc_us`): one of them may be behind. A repeated join of the same endpoint (`nonce`) renews its lease
        under the key it has. Services that another peer serves by now are left out.

        Raises:
            NameInUseError: another endpoint holds the name, its lease runs, and `peer` has no higher incarnation; or a later
                one has had it. That one may still come, so nothing is changed.
            TensorLinkError: there are `MAX_MEMBERS`, or it serves more than `MAX_SERVICES` names.
        """
        self.hear()
        known = self._known.get(peer.name, 0)
        if 0 < peer.incarnation < known:
            raise NameInUseError(
                f"a later process than {peer.id} has had this name, {peer.name}#{known}",
                peer=peer.name,
                phase="join",
                hint="Call init again: that gets an incarnation above all others",
            )
        current = self._live.get(peer.name)
        if current is not None and current.nonce == nonce:
            return self._renew(current, peer)
        if current is not None and peer.incarnation > current.peer.incarnation:
            self._drop(current, "superseded by a higher incarnation")  # two memberships merge: the higher one wins
        elif current is not None:
            raise NameInUseError(
                f"peer {current.peer.id} (pid {current.peer.pid}) is alive and has this name",
                peer=peer.name,
                phase="join",
                hint="Choose another name, or stop that process first",
            )
        if len(self._live) >= MAX_MEMBERS:
            raise TensorLinkError(
                f"{len(self._live)} peers have joined, the most of one coordinator",
                peer=peer.name,
                phase="join",
                hint="End those that are not needed, or start another coordinator for a part of the job",
            )
        _check_services(len(peer.services), peer.name)
        incarnation = peer.incarnation or max(known + 1, self._utc_us(), utc_us)
        self._remember(peer.name, incarnation)
        services = tuple(sorted({name for name in peer.services if name not in self._servers}))
        member = replace(peer, id=PeerId(peer.name, incarnation), services=services)
        lease = Lease(member, secrets.token_bytes(KEY_BYTES), nonce, self._clock() + self.lease_s, links)
        lease.expelled = self._expelled.pop(peer.name, 0) == incarnation
        self._live[peer.name] = self._by_key[lease.key] = lease
        self._servers.update(dict.fromkeys(services, peer.name))
        self._on_change(Change("up", member))
        return lease

    def _renew(self, lease: Lease, peer: PeerInfo) -> Lease:
        lease.expires = self._clock() + self.lease_s
        lease.expelled = False
        mine = set(lease.peer.services)
        self.advertise(lease, [name for name in peer.services if self._servers.get(name, peer.name) == peer.name])
        if mine != set(lease.peer.services) or lease.peer.address != peer.address or lease.peer.leaving != peer.leaving:
            lease.peer = replace(lease.peer, address=peer.address, leaving=peer.leaving)
            self._on_change(Change("updated", lease.peer))
        return lease

    def beat(self, key: bytes) -> Lease | None:
        """Extends the lease with this key; None: no such lease, its peer must join again."""
        lease = self._by_key.get(key)
        if lease is not None:
            self.hear()
            lease.last_beat = self._clock()
            lease.expires = lease.last_beat + self.lease_s
        return lease

    def advertise(self, lease: Lease, add: Iterable[str] = (), remove: Iterable[str] = ()) -> None:
        """Changes what a peer serves; all of it or nothing.

        Raises:
            NameInUseError: another live peer serves one of these names.
            PeerLostError: the lease has ended; join again.
        """
        if self._by_key.get(lease.key) is not lease:
            raise PeerLostError(f"the lease of {lease.peer.id} has ended", peer=lease.peer.name, phase="advertise")
        added = set(add)
        for service in sorted(added):
            other = self._servers.get(service, lease.peer.name)
            if other != lease.peer.name:
                raise NameInUseError(
                    f"{service!r} is served by {self._live[other].peer.id}",
                    peer=other,
                    phase="advertise",
                    hint="Choose another name, or stop that publisher first",
                )
        before = set(lease.peer.services)
        after = (before | added) - set(remove)
        if after == before:
            return
        _check_services(len(after), lease.peer.name)
        for service in before - after:
            del self._servers[service]
        self._servers.update(dict.fromkeys(after, lease.peer.name))
        lease.peer = replace(lease.peer, services=tuple(sorted(after)))
        self._on_change(Change("updated", lease.peer))

    def retire(self, lease: Lease) -> None:
        """A peer will leave: what it serves is free for others. Raises: PeerLostError: the lease has ended; join again."""
        self.advertise(lease, remove=lease.peer.services)
        if not lease.peer.leaving:
            lease.peer = replace(lease.peer, leaving=True)
            self._on_change(Change("updated", lease.peer))

    def end(self, key: bytes, reason: str) -> bool:
        """Ends a lease: its peer left, or its process is known to be dead. False: it had ended before."""
        lease = self._by_key.get(key)
        if lease is None:
            return False
        self._drop(lease, reason)
        return True

    def hear(self) -> None:
        """Somebody got through to the coordinator. If nobody did for a while, it was cut off, or all were stopped: that time
        counts for no lease, and where it was longer than one, the others get time to find their way back too."""
        now = self._clock()
        gap_s = now - self._heard
        if gap_s > self.lease_s / 2:
            back_s = max(self.lease_s, _BACK_S) if gap_s > self.lease_s else 0.0
            for lease in self._live.values():
                lease.expires = max(lease.expires + gap_s, now + back_s)
        self._heard = now

    def expire(self) -> None:
        """Ends every lease whose time is up; none while nobody at all is heard, except after 120 leases of that."""
        now = self._clock()
        if self.lease_s / 2 < now - self._heard < _SPARED_LEASES * self.lease_s:
            return
        for lease in [lease for lease in self._live.values() if lease.expires <= now]:
            self._expelled[lease.peer.name] = lease.peer.incarnation
            self._drop(lease, f"no heartbeat for {self.lease_s:g} s")

    def extend(self, gap_s: float) -> None:
        """Adds the time the coordinator itself was stopped to every lease: nobody could be heard in it."""
        self._heard += gap_s
        for lease in self._live.values():
            lease.expires += gap_s

    def _remember(self, name: str, incarnation: int) -> None:
        self._known[name] = incarnation
        if len(self._known) > 2 * MAX_REMEMBERED:  # seldom, since it looks at all of them
            gone = sorted(self._known.keys() - self._live.keys() - {name}, key=self._known.__getitem__)
            for old in gone[: len(self._known) - MAX_REMEMBERED]:
                del self._known[old]
                self._expelled.pop(old, None)

    def _drop(self, lease: Lease, reason: str) -> None:
        del self._live[lease.peer.name], self._by_key[lease.key]
        for service in lease.peer.services:
            del self._servers[service]
        self._on_change(Change("down", lease.peer, reason))
