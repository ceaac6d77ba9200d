"""What one peer knows of the others, from snapshots and changes. Pure logic; the caller locks and gives the time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tensorlink.types import PeerInfo


@dataclass(frozen=True)
class MembershipEvent:
    """A peer is `up`, `down` (`reason` says why), or `restarted`: back under its name with a higher incarnation."""

    kind: Literal["up", "down", "restarted"]
    peer: PeerInfo
    reason: str = ""


class View:
    """The local table of peers."""

    def __init__(self) -> None:
        self.peers: dict[str, PeerInfo] = {}
        self.known: dict[str, int] = {}
        self._epoch = b""
        self._missing: dict[str, float] = {}  # name -> until when its return is awaited

    def snapshot(self, epoch: bytes, peers: Iterable[PeerInfo], *, now: float, grace_s: float) -> list[MembershipEvent]:
        """Takes over all that a coordinator has, and returns what changed by it.

        A peer that the same coordinator no longer has is down. One that a new coordinator doesn't have yet gets
        `grace_s` seconds to join it.
        """
        present = list(peers)
        gone = set(self.peers) - {peer.name for peer in present}
        events = [event for peer in present for event in self.up(peer)]
        if epoch == self._epoch:
            events += [event for name in sorted(gone) for event in self._down(name, "it left unseen")]
        else:
            self._missing = dict.fromkeys(gone, now + grace_s)
        self._epoch = epoch
        return events

    def up(self, peer: PeerInfo) -> list[MembershipEvent]:
        """A peer is there, or serves something else than before."""
        before = self.peers.get(peer.name)
        last = self.known.get(peer.name, 0)
        self._missing.pop(peer.name, None)
        if peer.incarnation < last:
            return []  # an echo of one that was replaced
        self.peers[peer.name] = peer
        self.known[peer.name] = peer.incarnation
        if last and peer.incarnation > last:
            return [MembershipEvent("restarted", peer)]
        return [] if before is not None else [MembershipEvent("up", peer)]

    def down(self, peer: PeerInfo, reason: str) -> list[MembershipEvent]:
        """This incarnation of a peer is gone."""
        current = self.peers.get(peer.name)
        if current is None or current.incarnation != peer.incarnation:
            return []
        return self._down(peer.name, reason)

    def expire(self, now: float) -> list[MembershipEvent]:
        """Gives up the peers that did not join the new coordinator in time."""
        late = sorted(name for name, until in self._missing.items() if until <= now)
        return [event for name in late for event in self._down(name, "it did not join the new coordinator")]

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        return min(self._missing.values(), default=None)

    def _down(self, name: str, reason: str) -> list[MembershipEvent]:
        self._missing.pop(name, None)
        return [MembershipEvent("down", self.peers.pop(name), reason)]
