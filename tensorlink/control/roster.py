"""The peers that one endpoint knows, for all of its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from tensorlink.lifecycle import Action, News, Peers, State
from tensorlink.types import PeerId, PeerInfo


class Roster:
    """Thread-safe, and never blocks. `act` gets the actions that news call for, in order, one call at a time: it must not block,
    nor ask the roster anything."""

    def __init__(self, me: str, act: Callable[[list[Action]], None] | None) -> None:
        self._peers = Peers(me)
        self._act = act
        self._lock = threading.Lock()

    def hear(self, news: News) -> None:
        """Takes a piece of news, from whoever has it."""
        with self._lock:
            self._do(self._peers.hear(news))

    def snapshot(self, epoch: bytes, members: Iterable[PeerInfo], *, now: float, grace_s: float) -> None:
        """As `Peers.snapshot`."""
        with self._lock:
            self._do(self._peers.snapshot(epoch, members, now=now, grace_s=grace_s))

    def expire(self, now: float) -> None:
        """As `Peers.expire`."""
        with self._lock:
            self._do(self._peers.expire(now))

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        with self._lock:
            return self._peers.next_deadline()

    def members(self) -> list[PeerInfo]:
        """The live members by name, this peer among them, as last heard."""
        with self._lock:
            return self._peers.members()

    def member(self, name: str) -> PeerInfo | None:
        """The live member of this name, as last heard."""
        with self._lock:
            return self._peers.member(name)

    def incarnation(self, name: str) -> int:
        """Highest incarnation ever heard of under this name; 0: never heard of it."""
        with self._lock:
            return self._peers.get(name).incarnation

    def incarnations(self) -> dict[str, int]:
        """The same of all names."""
        with self._lock:
            return self._peers.incarnations()

    def restarted(self, peer: PeerId) -> bool:
        """Whether a later incarnation of it is known."""
        return self.incarnation(peer.name) > peer.incarnation

    def gone(self, peer: PeerId) -> bool:
        """Whether the coordinator said that it has ended."""
        with self._lock:
            known = self._peers.get(peer.name)
        return known.incarnation == peer.incarnation and known.state is State.DOWN and known.info is None

    def here(self, peer: PeerId) -> bool:
        """Whether, as far as is known, exactly this incarnation is there."""
        info = self.member(peer.name)
        return info is not None and info.id == peer

    def _do(self, actions: list[Action]) -> None:
        if actions and self._act is not None:
            self._act(actions)
