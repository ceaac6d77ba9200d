"""`FaultsContract`: what must hold of a transport while it, its peer or its network fails."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import ClassVar

import numpy as np
import pytest

from tensorlink.errors import (
    PeerLostError,
    TensorLinkError,
    TransferCancelledError,
    TransferTimeoutError,
    TransportError,
)
from tensorlink.testing.data import GRACE_S, MIB, PAGE, DataContract, Pairs, expected
from tensorlink.testing.ends import EndsContract
from tensorlink.testing.faults import Dice, FaultyTransport, Plan, Relay, strike
from tensorlink.testing.pairs import Bytes, Pair, buffer_of, digest, eventually, pattern

DELAYED = Plan(seed=1, delay=0.5, delay_s=0.01)
"""Under it all of the contract holds; this class has the part of it that is about time and order."""
FAILING = Plan(seed=2, delay=0.2, fail=0.2, hang=0.2, after_bytes=1000)
NETWORK_ROUNDS = 20
WAIT_S = 0.3
NETWORK = ("cut", "cut after", "cuts", "stall", "delay", "dribble", "refuse")


class FaultsContract(Pairs):
    """Subclass it beside `TransportContract` as `Test...`, with the same `transport` and `make_pairs`.

    The near side's transport is wrapped in a `FaultyTransport`. A transport whose address names a host and a TCP port says in
    `through` how it is sent through a relay; then its network fails too.
    """

    plan: ClassVar[Plan] = DELAYED

    @classmethod
    def through(cls, address: bytes, relayed: Callable[[str, int], int]) -> bytes | None:
        """The address, with the port `relayed(host, port)` on 127.0.0.1 in the place of its own; None: it has none."""
        return None

    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        self.pairs.plan = self.plan
        made = self.pairs.pair(connected=False)
        wrapped(made).dice = Dice(Plan())
        made.connect()
        wrapped(made).dice = Dice(self.plan)
        yield made
        made.close()

    test_both_directions = DataContract.test_both_directions
    test_several_fetches_at_once = DataContract.test_several_fetches_at_once
    test_a_larger_target_keeps_what_lies_behind = DataContract.test_a_larger_target_keeps_what_lies_behind
    test_a_target_that_is_too_small_gets_no_byte = DataContract.test_a_target_that_is_too_small_gets_no_byte
    test_retracted_is_stale = DataContract.test_retracted_is_stale
    test_cancel_is_a_fence = DataContract.test_cancel_is_a_fence
    test_a_cancelled_fetch_says_so = DataContract.test_a_cancelled_fetch_says_so
    test_a_timeout_is_a_fence = DataContract.test_a_timeout_is_a_fence
    test_a_stopped_peer_delays_no_one = DataContract.test_a_stopped_peer_delays_no_one_beyond_the_deadline
    test_garbage_is_no_descriptor = DataContract.test_garbage_is_no_descriptor
    test_use_after_the_end = EndsContract.test_use_after_the_end
    test_the_end_is_a_fence = EndsContract.test_the_end_is_a_fence
    test_it_connects_again = EndsContract.test_it_connects_again
    test_close_races_with_map = EndsContract.test_close_races_with_map
    mortal = EndsContract.mortal
    test_killed_while_connected = EndsContract.test_killed_while_connected
    test_killed_between_expose_and_fetch = EndsContract.test_killed_between_expose_and_fetch
    test_killed_during_a_fetch = EndsContract.test_killed_during_a_fetch

    # The wrapper itself keeps the contract

    def test_every_fetch_is_right_or_says_why(self, pair: Pair) -> None:
        descriptor, want = pair.far.expose(1, [MIB])[0], expected(1, [MIB])[0]
        wrapped(pair).dice = dice = Dice(FAILING)
        fenced: list[Bytes] = []
        for _ in range(40):
            target = np.zeros(MIB, np.uint8)
            if not fetched(pair, descriptor, target, want, (TransportError, TransferTimeoutError)):
                fenced.append(target)
        assert fenced
        assert set(dice.struck) == {"delay", "fail", "hang"}
        wrapped(pair).dice = Dice(Plan())
        assert pair.near.fetch([descriptor], [MIB]) == [want]
        assert all((target == 7).all() for target in fenced)

    @pytest.mark.parametrize("end", ["cancel", "close", "abort"])
    def test_what_hangs_ends_with_a_fence(self, pair: Pair, end: str) -> None:
        descriptor = pair.far.expose(1, [PAGE])[0]
        wrapped(pair).dice = Dice(Plan(hang=1.0, after_bytes=10))
        target = np.zeros(PAGE, np.uint8)
        fetch = pair.near.connection.fetch([(descriptor, buffer_of(target))])
        eventually(lambda: digest(target[:10]) == digest(pattern(1, PAGE)[:10]), "the first bytes came")
        (fetch.cancel if end == "cancel" else getattr(pair.near, end))()
        target.fill(7)
        with pytest.raises(TransferCancelledError):
            fetch.wait(10)
        assert (target == 7).all()

    def test_what_hangs_ends_with_the_peer(self, mortal: Pair) -> None:
        descriptor = mortal.far.expose(1, [PAGE])[0]
        wrapped(mortal).dice = Dice(Plan(hang=1.0))
        fetch = mortal.near.connection.fetch([(descriptor, buffer_of(np.zeros(PAGE, np.uint8)))])
        mortal.kill_far()
        with pytest.raises(PeerLostError):
            fetch.wait(10)

    def test_what_fails_has_brought_so_many_bytes(self, pair: Pair) -> None:
        descriptors = pair.far.expose(1, [PAGE, PAGE])
        wrapped(pair).dice = Dice(Plan(fail=1.0, after_bytes=PAGE + 5))
        target = np.full(2 * PAGE, 7, np.uint8)
        pairs = [(descriptors[i], buffer_of(target[i * PAGE : (i + 1) * PAGE])) for i in range(2)]
        with pytest.raises(TransportError, match="made to fail"):
            pair.near.connection.fetch(pairs).wait(10)
        assert (target[:PAGE] == pattern(1, PAGE)).all()
        assert (target[PAGE : PAGE + 5] == pattern(2, PAGE)[:5]).all()
        assert (target[PAGE + 5 :] == 7).all()

    def test_what_is_corrupt_differs_by_a_bit(self, pair: Pair) -> None:
        wrapped(pair).dice = Dice(Plan(corrupt=1.0))
        target = np.zeros(PAGE, np.uint8)
        pair.near.connection.fetch([(pair.far.expose(1, [PAGE])[0], buffer_of(target))]).wait(10)
        assert sum(int(byte).bit_count() for byte in target ^ pattern(1, PAGE)) == 1

    def test_a_map_that_hangs_has_a_deadline(self, pair: Pair) -> None:
        descriptor = pair.far.expose(1, [PAGE])[0]
        wrapped(pair).dice = Dice(Plan(hang=1.0))
        began = time.monotonic()
        with pytest.raises(TransferTimeoutError):
            pair.near.connection.map(descriptor, 0.1)
        assert time.monotonic() - began < 0.1 + GRACE_S

    # Its network

    @pytest.mark.parametrize("kind", [*NETWORK, "corrupt"])
    def test_its_network_fails(self, unconnected: Pair, kind: str) -> None:
        chance, (peer, address, _) = random.Random(kind), unconnected.far.facts()
        with ExitStack() as stack:
            relays: list[Relay] = []

            def relayed(host: str, port: int) -> int:
                relays.append(stack.enter_context(Relay(host, port)))
                return relays[-1].port

            told = self.through(address, relayed)
            if told is None:
                pytest.skip("this transport goes through no relay")
            self._fails(unconnected, kind, chance, relays[0], lambda: unconnected.near.connect(peer, told))
            unconnected.close()

    def _fails(self, pair: Pair, kind: str, chance: random.Random, relay: Relay, connect: Callable[[], None]) -> None:
        connect()
        pair.far.connect(*pair.near.facts()[:2])
        descriptor, want = pair.far.expose(1, [MIB])[0], expected(1, [MIB])[0]
        fenced: list[Bytes] = []

        def works() -> bool:
            try:
                if not pair.near.connection.up:
                    connect()
                return pair.near.fetch([descriptor], [MIB], 5.0) == [want]
            except TensorLinkError:
                return False

        for _ in range(NETWORK_ROUNDS // len(NETWORK) + 1):
            strike(relay, kind, chance, MIB)
            target, before = np.zeros(MIB, np.uint8), relay.counters.flips
            try:
                good = fetched(pair, descriptor, target, want, (TensorLinkError,))
            except AssertionError:  # nothing checks the payload at this level: above it a checksum does
                good = relay.counters.flips > before
                assert good, "wrong bytes, and none was changed on the way"
            if not good:
                fenced.append(target)
            relay.heal()
            eventually(works, "it works again")
            assert all((target == 7).all() for target in fenced)


def wrapped(pair: Pair) -> FaultyTransport:
    assert isinstance(pair.near.transport, FaultyTransport)
    return pair.near.transport


def fetched(pair: Pair, descriptor: bytes, target: Bytes, want: str, errors: tuple[type[TensorLinkError], ...]) -> bool:
    """Whether it came; if not, the target is filled with 7s. Fails for wrong bytes, and for what came too late."""
    began = time.monotonic()
    try:
        pair.near.connection.fetch([(descriptor, buffer_of(target))]).wait(WAIT_S)
    except errors:
        target.fill(7)
        came = False
    else:
        came = True
    assert time.monotonic() - began < WAIT_S + GRACE_S
    if came:
        assert digest(target) == want
    return came
