"""The membership table, with a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tensorlink.control.membership import Change, Lease, Membership
from tensorlink.errors import NameInUseError, PeerLostError
from tensorlink.types import PeerId, PeerInfo

LEASE_S = 5.0


def peer(name: str, incarnation: int = 0, *services: str, address: str = "unix:/a") -> PeerInfo:
    return PeerInfo(PeerId(name, incarnation), address, "host", 1, tuple(services))


class Table:
    """A membership under a clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0
        self.utc_us = 1_000
        self.changes: list[Change] = []
        self.members = Membership(LEASE_S, self.changes.append, clock=lambda: self.now, utc_us=lambda: self.utc_us)

    def kinds(self) -> list[tuple[str, str]]:
        return [(change.kind, change.peer.name) for change in self.changes]


def test_incarnation_is_the_time_or_above_all_known() -> None:
    table = Table()
    first = table.members.join(peer("a"), b"1")
    assert first.peer.incarnation == 1_000
    table.members.end(first.key, "left")
    assert table.members.join(peer("a"), b"2").peer.incarnation == 1_001
    table.members.learn({"b": 5_000})
    assert table.members.join(peer("b"), b"3").peer.incarnation == 5_001


def test_a_peer_keeps_its_incarnation_unless_a_higher_one_is_known() -> None:
    table = Table()
    assert table.members.join(peer("a", 77), b"1").peer.incarnation == 77
    table.members.learn({"b": 100})
    with pytest.raises(NameInUseError, match="b#100"):
        table.members.join(peer("b", 77), b"2")
    assert table.members.join(peer("b", 100), b"3").peer.incarnation == 100, "the later one loses nothing by that"


def test_a_live_name_is_taken_and_a_retry_is_not_a_rival() -> None:
    table = Table()
    lease = table.members.join(peer("a"), b"1")
    with pytest.raises(NameInUseError):
        table.members.join(peer("a"), b"2")
    assert table.members.join(peer("a"), b"1") is lease
    assert table.kinds() == [("up", "a")]


def test_on_a_merge_the_higher_incarnation_wins() -> None:
    table = Table()
    low = table.members.join(peer("a", 10), b"1")
    high = table.members.join(peer("a", 11), b"2")
    assert table.members.beat(low.key) is None and table.members.beat(high.key) is high
    assert table.kinds() == [("up", "a"), ("down", "a"), ("up", "a")]


def test_a_holder_below_a_known_incarnation_is_none_any_more() -> None:
    table = Table()
    lease = table.members.join(peer("a"), b"1")
    table.members.learn({"a": lease.peer.incarnation + 10})
    assert table.members.beat(lease.key) is None
    with pytest.raises(NameInUseError):
        table.members.join(peer("a", lease.peer.incarnation), b"1")
    assert table.members.join(peer("a"), b"2").peer.incarnation > lease.peer.incarnation + 10


def test_who_will_leave_serves_nothing_any_more() -> None:
    table = Table()
    a, b = table.members.join(peer("a"), b"a" * 16), table.members.join(peer("b"), b"b" * 16)
    table.members.advertise(a, ["weights/x", "weights/y"])
    table.members.retire(a)
    assert (a.peer.leaving, a.peer.services) == (True, ())
    table.members.advertise(b, ["weights/x"])
    said = len(table.changes)
    table.members.retire(a)
    assert len(table.changes) == said, "it is said once"
    assert table.members.join(peer("a"), b"a" * 16).peer.leaving is False, "a join says what is true now"


def test_leases_run_out_unless_beaten_or_extended() -> None:
    table = Table()
    beaten = table.members.join(peer("beaten"), b"1")
    table.members.join(peer("silent"), b"2")
    for _ in range(5):
        assert len(table.members) == 2
        table.now += LEASE_S / 5
        table.members.beat(beaten.key)
        table.members.expire()
    assert table.kinds()[2:] == [("down", "silent")]
    table.now += 3 * LEASE_S
    table.members.extend(3 * LEASE_S)
    table.members.expire()
    assert table.members.holder("beaten") is beaten


def test_who_hears_nobody_declares_nobody_dead() -> None:
    table = Table()
    leases = [table.members.join(peer(name), name.encode()) for name in "abc"]
    for _ in range(8):
        table.now += LEASE_S
        table.members.expire()
    assert len(table.members) == 3, "it is the coordinator that is cut off"
    table.members.beat(leases[0].key)
    table.now += LEASE_S - 0.1
    assert table.members.join(peer("b", leases[1].peer.incarnation), b"b") is leases[1], (
        "the others have time to come back"
    )
    assert not leases[1].expelled
    for _ in range(5):
        table.now += LEASE_S / 5
        table.members.beat(leases[0].key), table.members.beat(leases[1].key)
        table.members.expire()
    assert table.kinds()[3:] == [("down", "c")]
    table.now += 121 * LEASE_S
    table.members.expire()
    assert len(table.members) == 0, "not for ever"


def test_a_new_incarnation_is_no_earlier_than_the_clock_of_either() -> None:
    table = Table()
    assert table.members.join(peer("a"), b"1", utc_us=5_000).peer.incarnation == 5_000
    assert table.members.join(peer("b"), b"2", utc_us=5).peer.incarnation == 1_000
    assert table.members.join(peer("c", 77), b"3", utc_us=5_000).peer.incarnation == 77


def test_services() -> None:
    table = Table()
    a = table.members.join(peer("a", 0, "weights/x"), b"1")
    b = table.members.join(peer("b", 0, "weights/x", "weights/y"), b"2")
    assert b.peer.services == ("weights/y",)
    with pytest.raises(NameInUseError, match="a#"):
        table.members.advertise(b, ["weights/z", "weights/x"])
    assert table.members.server_of("weights/z") is None
    table.members.advertise(a, remove=["weights/x"])
    table.members.advertise(b, ["weights/x"])
    assert table.members.server_of("weights/x") is b
    assert table.members.near("weights/w", services=True)
    table.members.end(b.key, "left")
    assert table.members.server_of("weights/x") is None
    with pytest.raises(PeerLostError):
        table.members.advertise(b, ["weights/q"])


NAMES = st.sampled_from(["a", "b", "c"])
NONCES = st.sampled_from([b"1", b"2", b"3"])


class MembershipMachine(RuleBasedStateMachine):
    """Whatever joins, dies and merges: incarnations grow, and a name has at most one holder, whose lease runs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.leases: list[Lease] = []
        self.highest: dict[str, int] = {}

    @rule(name=NAMES, nonce=NONCES, claim=st.integers(0, 4_000), service=st.sampled_from(["x", "y"]))
    def join(self, name: str, nonce: bytes, claim: int, service: str) -> None:
        holder = self.table.members.holder(name)
        before = self.highest.get(name, 0)
        try:
            lease = self.table.members.join(peer(name, claim, service), nonce)
        except NameInUseError:
            assert 0 < claim < before or (
                holder is not None and holder.nonce != nonce and claim <= holder.peer.incarnation
            )
            return
        if lease is holder:
            assert holder.nonce == nonce
        else:
            assert lease.peer.incarnation > before or lease.peer.incarnation == claim >= before
        self.highest[name] = lease.peer.incarnation
        self.leases.append(lease)

    @rule(name=NAMES, known=st.integers(1, 5_000))
    def learn(self, name: str, known: int) -> None:
        self.table.members.learn({name: known})
        self.highest[name] = max(self.highest.get(name, 0), known)

    @rule(data=st.data(), action=st.sampled_from(["beat", "end"]))
    def use(self, data: st.DataObject, action: str) -> None:
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases))
            alive = self.table.members.by_key(lease.key) is lease
            result = self.table.members.beat(lease.key) if action == "beat" else self.table.members.end(lease.key, "")
            assert bool(result) == alive

    @rule(seconds=st.floats(0, 2 * LEASE_S), stopped=st.booleans())
    def wait(self, seconds: float, stopped: bool) -> None:
        live = len(self.table.members)
        self.table.now += seconds
        if stopped:
            self.table.members.extend(seconds)
            assert len(self.table.members) == live
        self.table.members.expire()

    @invariant()
    def holders_are_what_was_announced(self) -> None:
        up: dict[str, int] = {}
        for change in self.table.changes:
            if change.kind == "up":
                assert change.peer.name not in up
                up[change.peer.name] = change.peer.incarnation
            elif change.kind == "down":
                assert up.pop(change.peer.name) == change.peer.incarnation
        peers = self.table.members.peers()
        assert {one.name: one.incarnation for one in peers} == up
        assert len({service for one in peers for service in one.services}) == sum(len(one.services) for one in peers)


MembershipMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestMembershipMachine = MembershipMachine.TestCase
