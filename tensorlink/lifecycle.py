"""The life of a peer as another one sees it: news come in, actions go out.

    unknown -> connecting -> up -> suspect -> down

A peer is `connecting` while it is dialled and nobody has said that it is there, `up` once the coordinator or a connection
says so, `suspect` while a broken stream, or a new coordinator that doesn't have it yet, leaves that open, and `down` when its
lease has ended, it has left, or nobody listens where it did. It may come up again. A higher incarnation is another peer
under the name: the old one is ended first. An incarnation never goes backwards; news of an older one change nothing.

Pure: whoever calls it locks, keeps the time, and carries the actions out in the order in which they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from tensorlink.types import PeerId, PeerInfo


class State(Enum):
    """Of the highest incarnation that is known of a name."""

    UNKNOWN = "unknown"
    CONNECTING = "connecting"
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"


# News


@dataclass(frozen=True)
class Here:
    """The coordinator says that it is a member."""

    info: PeerInfo

    @property
    def peer(self) -> PeerId:
        return self.info.id


@dataclass(frozen=True)
class Gone:
    """The coordinator says that its lease has ended: it left, died or was silent."""

    peer: PeerId
    reason: str


@dataclass(frozen=True)
class Missing:
    """A new coordinator doesn't have it yet."""

    peer: PeerId


@dataclass(frozen=True)
class Dialled:
    """It will be connected to, by an address that somebody gave. That proves nothing yet."""

    peer: PeerId


@dataclass(frozen=True)
class Unreached:
    """It could not be connected to."""

    peer: PeerId


@dataclass(frozen=True)
class Connected:
    """It has answered a handshake under this incarnation, begun one, or sent something."""

    peer: PeerId


@dataclass(frozen=True)
class StreamLost:
    """A stream of it ended without a goodbye; `at` is where it listened."""

    peer: PeerId
    at: tuple[str, int]


@dataclass(frozen=True)
class Refused:
    """Nobody listens there any more."""

    peer: PeerId


@dataclass(frozen=True)
class Answered:
    """Somebody listens there: only the stream broke."""

    peer: PeerId


News = Here | Gone | Missing | Dialled | Unreached | Connected | StreamLost | Refused | Answered


# Actions


@dataclass(frozen=True)
class Act:
    """What is to be done about one incarnation."""

    do: Literal["set_up", "set_down", "abort", "probe", "mend", "avoid"]
    """It is used (again) or no more; its connections end for good; find out (at `at`) whether it listens; bring what is on
    its way over a broken lane; send nobody to it, since it leaves."""
    peer: PeerId
    at: tuple[str, int] = ("", 0)


@dataclass(frozen=True)
class Fire:
    """A hook is to be called. Of one name each `peer_up` or `peer_restart` is followed by one `peer_down`."""

    hook: Literal["peer_up", "peer_down", "peer_restart"]
    info: PeerInfo
    reason: str = ""


Action = Act | Fire


# One peer


@dataclass(frozen=True)
class Peer:
    """What is known of one name."""

    state: State = State.UNKNOWN
    incarnation: int = 0
    info: PeerInfo | None = None
    """As a member; None: it is none."""
    told: PeerInfo | None = None
    """Whom the hooks have called up; None: nobody, or it is down."""
    last_told: int = 0
    """Incarnation of whom they called up last."""


Step = tuple[Peer, list[Action]]
_NOWHERE = (State.UNKNOWN, State.CONNECTING, State.DOWN)


def step(before: Peer, news: News) -> Step:
    """What is known after the news, and what is to be done."""
    after, actions = before, list[Action]()
    if news.peer.incarnation < before.incarnation:
        return before, []
    if news.peer.incarnation > before.incarnation:
        if isinstance(news, Gone | Missing | Refused | Answered):
            return before, []  # of one that nobody has heard of
        if not isinstance(news, Dialled | Unreached):  # a handle alone is no proof
            after, actions = _superseded(before, news.peer)
    after, more = _RULES[type(news)](after, news)
    return after, [*actions, *more]


def _superseded(peer: Peer, by: PeerId) -> Step:
    """Another process has the name: the old one is over, whatever it was."""
    actions: list[Action] = []
    if peer.state not in _NOWHERE:
        actions.append(Act("set_down", PeerId(by.name, peer.incarnation)))
    if peer.incarnation:
        actions.append(Act("abort", PeerId(by.name, peer.incarnation)))
    if peer.told is not None:
        actions.append(Fire("peer_down", peer.told, "it was replaced by a newer process of its name"))
    return Peer(State.UNKNOWN, by.incarnation, last_told=peer.last_told), actions


def _announced(peer: Peer, actions: list[Action]) -> Step:
    """A member that is up is told of, once."""
    if peer.state is not State.UP or peer.info is None or peer.told is not None:
        return peer, actions
    again = 0 < peer.last_told < peer.incarnation
    fire = Fire("peer_restart" if again else "peer_up", peer.info)
    return replace(peer, told=peer.info, last_told=peer.incarnation), [*actions, fire]


def _ended(peer: Peer, who: PeerId, reason: str) -> Step:
    actions: list[Action] = [Act("set_down", who)]
    if peer.told is not None:
        actions.append(Fire("peer_down", peer.told, reason))
    return replace(peer, state=State.DOWN, told=None), actions


def _here(peer: Peer, news: Here) -> Step:
    actions: list[Action] = []
    if peer.state is not State.UP:
        actions.append(Act("set_up", news.peer))
        if peer.state in (State.SUSPECT, State.DOWN):
            actions.append(Act("mend", news.peer))
    if news.info.leaving and not (peer.info is not None and peer.info.leaving):
        actions.append(Act("avoid", news.peer))
    return _announced(replace(peer, state=State.UP, info=news.info), actions)


def _gone(peer: Peer, news: Gone) -> Step:
    if peer.state is State.DOWN:
        return replace(peer, info=None), []
    return _ended(replace(peer, info=None), news.peer, news.reason)


def _missing(peer: Peer, _: Missing) -> Step:
    return (replace(peer, state=State.SUSPECT) if peer.state is State.UP else peer), []


def _dialled(peer: Peer, _: Dialled) -> Step:
    return (replace(peer, state=State.CONNECTING) if peer.state is State.UNKNOWN else peer), []


def _unreached(peer: Peer, _: Unreached) -> Step:
    return (replace(peer, state=State.UNKNOWN) if peer.state is State.CONNECTING else peer), []


def _connected(peer: Peer, news: Connected) -> Step:
    if peer.state is State.DOWN and peer.info is None:
        return peer, []  # it may just have ended: only the coordinator can say that it is back
    actions: list[Action] = [] if peer.state in (State.UP, State.SUSPECT) else [Act("set_up", news.peer)]
    return _announced(replace(peer, state=State.UP), actions)


def _stream_lost(peer: Peer, news: StreamLost) -> Step:
    state = peer.state if peer.state is State.DOWN else State.SUSPECT
    return replace(peer, state=state), [Act("probe", news.peer, news.at)]


def _refused(peer: Peer, news: Refused) -> Step:
    return _ended(peer, news.peer, "nobody listens where it did")


def _answered(peer: Peer, news: Answered) -> Step:
    state = State.UP if peer.state is State.SUSPECT else peer.state
    return replace(peer, state=state), [Act("mend", news.peer)]


_RULES: dict[type, Callable[..., Step]] = {
    Here: _here,
    Gone: _gone,
    Missing: _missing,
    Dialled: _dialled,
    Unreached: _unreached,
    Connected: _connected,
    StreamLost: _stream_lost,
    Refused: _refused,
    Answered: _answered,
}


# All of them


class Peers:
    """Everybody that one endpoint has heard of. `me` is listed, and nothing is ever to be done about it."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._peers: dict[str, Peer] = {}
        self._epoch = b""
        self._awaited: dict[str, float] = {}  # by the new coordinator, and until when

    def hear(self, news: News) -> list[Action]:
        """Takes one piece of news; what is to be done."""
        name = news.peer.name
        before = self.get(name)
        after, actions = step(before, news)
        if after != before:
            self._peers[name] = after
        if isinstance(news, Here | Gone) or after.incarnation > before.incarnation:
            self._awaited.pop(name, None)  # a connection doesn't make it a member
        return [] if name == self._me else actions

    def snapshot(self, epoch: bytes, members: Iterable[PeerInfo], *, now: float, grace_s: float) -> list[Action]:
        """Takes over all that a coordinator has. Who isn't there any more is gone, but where it is another coordinator than
        before, has `grace_s` seconds to join it."""
        present = list(members)
        names = {info.name for info in present}
        missing = [info.id for info in self.members() if info.name not in names]
        actions = [action for info in present for action in self.hear(Here(info))]
        for peer in missing:
            if epoch == self._epoch:
                actions += self.hear(Gone(peer, "it left unseen"))
            else:
                self._awaited[peer.name] = now + grace_s
                actions += self.hear(Missing(peer))
        self._epoch = epoch
        return actions

    def expire(self, now: float) -> list[Action]:
        """Gives up those that did not join the new coordinator in time."""
        late = sorted(name for name, until in self._awaited.items() if until <= now)
        gone = [PeerId(name, self._peers[name].incarnation) for name in late]
        return [action for peer in gone for action in self.hear(Gone(peer, "it did not join the new coordinator"))]

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        return min(self._awaited.values(), default=None)

    def get(self, name: str) -> Peer:
        """What is known of a name."""
        return self._peers.get(name) or Peer()

    def member(self, name: str) -> PeerInfo | None:
        """The live member of this name."""
        peer = self.get(name)
        return None if peer.state is State.DOWN else peer.info

    def members(self) -> list[PeerInfo]:
        """All live members, by name."""
        found = (self.member(name) for name in sorted(self._peers))
        return [info for info in found if info is not None]

    def incarnations(self) -> dict[str, int]:
        """The highest incarnation of each name."""
        return {name: peer.incarnation for name, peer in self._peers.items() if peer.incarnation}
