"""The life of a peer: every state and every piece of news, random orders of them, and coordinators that change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tensorlink.lifecycle import (
    Act,
    Action,
    Answered,
    Connected,
    Dialled,
    Fire,
    Gone,
    Here,
    Missing,
    News,
    Peer,
    Peers,
    Refused,
    State,
    StreamLost,
    Unreached,
    step,
)
from tensorlink.types import PeerId, PeerInfo


def info(incarnation: int, name: str = "a", *services: str, leaving: bool = False) -> PeerInfo:
    return PeerInfo(PeerId(name, incarnation), "unix:/a", "host", 1, services, leaving=leaving)


NEWS: dict[str, Callable[[PeerId], News]] = {
    "here": lambda peer: Here(info(peer.incarnation, peer.name)),
    "gone": lambda peer: Gone(peer, "it died"),
    "missing": Missing,
    "dialled": Dialled,
    "unreached": Unreached,
    "connected": Connected,
    "stream lost": lambda peer: StreamLost(peer, ("10.0.0.1", 5)),
    "refused": Refused,
    "answered": Answered,
}
BEFORE = {
    State.UNKNOWN: Peer(State.UNKNOWN, 5),
    State.CONNECTING: Peer(State.CONNECTING, 5),
    State.UP: Peer(State.UP, 5, info(5), info(5), 5),
    State.SUSPECT: Peer(State.SUSPECT, 5, info(5), info(5), 5),
    State.DOWN: Peer(State.DOWN, 5, None, None, 5),
}
ENDED = "set_down abort peer_down"
# For each piece of news, in the order of BEFORE: the state after it, and what is to be done.
OF_THE_SAME = {
    "here": ["up set_up peer_up", "up set_up peer_up", "up", "up set_up mend", "up set_up mend peer_up"],
    "gone": ["down set_down", "down set_down", "down set_down peer_down", "down set_down peer_down", "down"],
    "missing": ["unknown", "connecting", "suspect", "suspect", "down"],
    "dialled": ["connecting", "connecting", "up", "suspect", "down"],
    "unreached": ["unknown", "unknown", "up", "suspect", "down"],
    "connected": ["up set_up", "up set_up", "up", "up", "down"],
    "stream lost": ["suspect probe", "suspect probe", "suspect probe", "suspect probe", "down probe"],
    "refused": [
        "down set_down",
        "down set_down",
        "down set_down peer_down",
        "down set_down peer_down",
        "down set_down",
    ],
    "answered": ["unknown mend", "connecting mend", "up mend", "up mend", "down mend"],
}
OF_A_NEWER_ONE = {
    "here": [
        *["up abort set_up peer_up"] * 2,
        *[f"up {ENDED} set_up peer_restart"] * 2,
        "up abort set_up peer_restart",
    ],
    "gone": ["unknown", "connecting", "up", "suspect", "down"],
    "missing": ["unknown", "connecting", "up", "suspect", "down"],
    "dialled": ["connecting", "connecting", "up", "suspect", "down"],
    "unreached": ["unknown", "unknown", "up", "suspect", "down"],
    "connected": [*["up abort set_up"] * 2, *[f"up {ENDED} set_up"] * 2, "up abort set_up"],
    "stream lost": [
        *["suspect abort probe"] * 2,
        *[f"suspect {ENDED} probe"] * 2,
        "suspect abort probe",
    ],
    "refused": ["unknown", "connecting", "up", "suspect", "down"],
    "answered": ["unknown", "connecting", "up", "suspect", "down"],
}


def words(actions: list[Action]) -> list[str]:
    return [action.hook if isinstance(action, Fire) else action.do for action in actions]


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("kind", list(NEWS))
def test_every_state_and_every_piece_of_news(state: State, kind: str) -> None:
    before, column = BEFORE[state], list(State).index(state)
    for incarnation, expected in ((5, OF_THE_SAME), (6, OF_A_NEWER_ONE)):
        after, actions = step(before, NEWS[kind](PeerId("a", incarnation)))
        assert " ".join([after.state.value, *words(actions)]) == expected[kind][column]
        for action in actions:
            old = words([action])[0] in ENDED.split() and incarnation == 6
            named = action.info.id if isinstance(action, Fire) else action.peer
            assert named == PeerId("a", 5 if old else incarnation)


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("kind", list(NEWS))
def test_an_older_incarnation_changes_nothing(state: State, kind: str) -> None:
    assert step(BEFORE[state], NEWS[kind](PeerId("a", 4))) == (BEFORE[state], [])


def test_who_was_wrongly_taken_for_gone_is_up_when_it_is_connected_to() -> None:
    peers = Peers("me")
    peers.hear(Here(info(1)))
    assert words(peers.hear(Refused(PeerId("a", 1)))) == ["set_down", "peer_down"]
    assert peers.member("a") is None
    assert words(peers.hear(Connected(PeerId("a", 1)))) == ["set_up", "peer_up"]
    assert peers.member("a") == info(1)


def test_who_will_leave_is_avoided_once() -> None:
    peers = Peers("me")
    peers.hear(Here(info(1)))
    assert words(peers.hear(Here(info(1, leaving=True)))) == ["avoid"]
    assert peers.hear(Here(info(1, "a", "weights/x", leaving=True))) == []
    assert words(peers.hear(Here(info(2)))) == ["set_down", "abort", "peer_down", "set_up", "peer_restart"]
    assert words(peers.hear(Here(info(1, "b", leaving=True)))) == ["set_up", "avoid", "peer_up"]


def test_a_change_of_services_is_news_to_nobody_but_is_kept() -> None:
    peers = Peers("me")
    peers.hear(Here(info(1)))
    assert peers.hear(Here(info(1, "a", "weights/x"))) == []
    assert peers.members() == [info(1, "a", "weights/x")]


def test_nothing_is_done_about_oneself() -> None:
    peers = Peers("me")
    assert peers.hear(Here(info(1, "me"))) == []
    assert peers.hear(Here(info(2, "me"))) == []
    assert peers.members() == [info(2, "me")]


def test_a_new_coordinator_is_given_time() -> None:
    peers = Peers("me")
    peers.snapshot(b"1", [info(1), info(1, "b")], now=0, grace_s=5)
    assert peers.snapshot(b"2", [], now=10, grace_s=5) == []
    assert (peers.next_deadline(), peers.get("a").state) == (15, State.SUSPECT)
    assert words(peers.hear(Here(info(1)))) == ["set_up", "mend"]
    assert peers.expire(14.9) == []
    assert [member.name for member in peers.members()] == ["a", "b"]
    assert words(peers.expire(15)) == ["set_down", "peer_down"]
    assert peers.next_deadline() is None
    assert words(peers.snapshot(b"2", [], now=20, grace_s=5)) == ["set_down", "peer_down"]
    assert peers.members() == []


def test_a_connection_is_no_membership() -> None:
    peers = Peers("me")
    peers.snapshot(b"1", [info(1)], now=0, grace_s=5)
    peers.snapshot(b"2", [], now=10, grace_s=5)
    assert peers.hear(Connected(PeerId("a", 1))) == []
    assert peers.get("a").state is State.UP
    assert words(peers.expire(15)) == ["set_down", "peer_down"]


def test_a_watch_that_missed_a_restart_tells_of_both() -> None:
    peers = Peers("me")
    peers.snapshot(b"1", [info(1), info(1, "b")], now=0, grace_s=5)
    actions = peers.snapshot(b"1", [info(2)], now=1, grace_s=5)
    assert words(actions) == [*ENDED.split(), "set_up", "peer_restart", "set_down", "peer_down"]


NAMES, INCARNATIONS = st.sampled_from("ab"), st.integers(1, 4)


class LifeMachine(RuleBasedStateMachine):
    """Any news in any order; `used` is what the engine was told, `hooks` what the application was."""

    def __init__(self) -> None:
        super().__init__()
        self.peers = Peers("me")
        self.now = 0.0
        self.newest: dict[str, int] = defaultdict(int)
        self.used: dict[str, set[int]] = defaultdict(set)
        self.up: dict[str, int] = {}
        self.last_up: dict[str, int] = {}

    @rule(kind=st.sampled_from(sorted(NEWS)), name=NAMES, incarnation=INCARNATIONS)
    def hear(self, kind: str, name: str, incarnation: int) -> None:
        before = self.peers.get(name)
        actions = self.peers.hear(NEWS[kind](PeerId(name, incarnation)))
        if incarnation < before.incarnation:
            assert (self.peers.get(name), actions) == (before, [])
        self.carry_out(actions)

    @rule(epoch=st.sampled_from([b"1", b"2"]), there=st.dictionaries(NAMES, INCARNATIONS))
    def snapshot(self, epoch: bytes, there: dict[str, int]) -> None:
        members = [info(incarnation, name) for name, incarnation in there.items()]
        self.carry_out(self.peers.snapshot(epoch, members, now=self.now, grace_s=5))

    @rule(seconds=st.integers(1, 6))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.carry_out(self.peers.expire(self.now))
        deadline = self.peers.next_deadline()
        assert deadline is None or deadline > self.now

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Act):
                name, incarnation = action.peer.name, action.peer.incarnation
                if action.do == "set_up":
                    self.used[name].add(incarnation)
                elif action.do in ("set_down", "abort"):
                    self.used[name].discard(incarnation)
                continue
            name, incarnation = action.info.name, action.info.incarnation
            if action.hook == "peer_down":
                assert self.up.pop(name) == incarnation
                continue
            assert name not in self.up
            assert (action.hook == "peer_restart") == (0 < self.last_up.get(name, 0) < incarnation)
            assert incarnation >= self.last_up.get(name, 0)
            self.up[name] = self.last_up[name] = incarnation

    @invariant()
    def holds(self) -> None:
        for name in "ab":
            peer = self.peers.get(name)
            assert peer.incarnation >= self.newest[name]
            self.newest[name] = peer.incarnation
            lives = peer.state in (State.UP, State.SUSPECT)
            assert (peer.told is not None) == (lives and peer.info is not None) == (name in self.up)
            assert peer.told is None or peer.told.incarnation == peer.incarnation == self.up[name]
            assert self.used[name] <= ({peer.incarnation} if lives else set())
            assert name not in self.peers._awaited or peer.info is not None
            assert self.peers.member(name) is None or peer.state is not State.DOWN


LifeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLifeMachine = LifeMachine.TestCase
