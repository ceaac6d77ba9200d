"""A network that cuts, stalls and delays: each transfer ends right, or with a typed error in time and not a byte later."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

import tensorlink as tl
from tensorlink.testing.faults import Relay
from tensorlink.testing.pairs import digest, pattern
from tensorlink.transports.tcp import TcpAddress
from tests.cluster import forget, get, put
from tests.peer import DEADLINE_S, Nursery, Peer, eventually, kept, nursery, say

__all__ = ["nursery"]

KIB, MIB = 1 << 10, 1 << 20
ENVIRONMENT = {"TENSORLINK_TRANSPORTS": "tcp", "TENSORLINK_TOKEN": "a secret of the tests", "TENSORLINK_LEASE_S": "2"}
LEASE_S = 2.0
GRACE_S = 2.0  # a second by the contract, and as much again for a busy machine
FAULTS = int(os.environ.get("TENSORLINK_FAULTS", "25"))


@dataclass
class Reach:
    """Peer `a` reaches `b`, and what `b` has, through a relay."""

    a: Peer
    b: Peer
    relay: Relay


@pytest.fixture(scope="module")
def peers(nursery: Nursery) -> Iterator[Reach]:
    a, b = nursery.start(**ENVIRONMENT), nursery.start(**ENVIRONMENT)
    b.call(tl.init, "b")
    a.call(tl.init, "a")
    with Relay("127.0.0.1", b.call(listens_at)) as relay:
        b.call(advertise, relay.port)
        yield Reach(a, b, relay)
        for peer in (a, b):
            peer.call(tl.shutdown)
            peer.close()


@pytest.fixture
def reach(peers: Reach) -> Iterator[Reach]:
    yield peers
    peers.relay.heal()
    for peer in (peers.a, peers.b):
        peer.call(forget)


def listens_at() -> int:
    return TcpAddress.decode(tl.current()._links.transports["tcp"].address()).port


def advertise(port: int) -> None:
    transport = tl.current()._links.transports["tcp"]
    told = dataclasses.replace(TcpAddress.decode(transport.address()), port=port).encode()
    transport.address = lambda: told  # type: ignore[method-assign]


def expected(seed: int, nbytes: int) -> str:
    return digest(pattern(seed, nbytes))


# Lanes


def numbered(number: int) -> tuple[int, bytes]:
    return number, bytes([number % 256]) * (number * 7919 % 20_000)


def send_numbered(count: int, to: str) -> None:
    for number in range(count):
        tl.send(numbered(number), to)


def receive_numbered(count: int, source: str) -> None:
    for number in range(count):
        got = tl.recv(source, timeout=DEADLINE_S)
        assert got == numbered(number), f"{got[0]} with {len(got[1])} bytes came for {number}"
    with pytest.raises(tl.TransferTimeoutError):
        tl.recv(source, timeout=0.05)


def test_a_lane_that_is_cut_again_and_again_loses_and_doubles_nothing(reach: Reach) -> None:
    reach.relay.cut_after(400 * KIB, once=False)
    reach.b.start(receive_numbered, 2000, "a")
    reach.a.call(send_numbered, 2000, "b")
    reach.b.finish()
    assert reach.relay.counters.cuts > 20


def test_a_record_whose_size_changed_on_its_way_is_not_waited_for(reach: Reach) -> None:
    reach.b.start(receive_numbered, 1, "a")
    reach.a.call(send_numbered, 1, "b")
    reach.b.finish()
    reach.relay.corrupt_once(1)  # of the size, which is still a possible one
    reach.b.start(receive_numbered, 1, "a")
    reach.a.call(send_numbered, 1, "b")
    reach.b.finish()
    assert reach.relay.counters.flips == 1


# Reads


def get_under(ref: tl.TensorRef, timeout: float) -> tuple[str | None, str | None, float]:
    """The digest or the error's name, and the seconds it took. After an error the buffer is filled, for `untouched`."""
    out = np.full(ref.nbytes, 7, np.uint8)
    started = time.monotonic()
    try:
        tl.get(ref, out=out, timeout=timeout)
    except tl.TensorLinkError as error:
        took = time.monotonic() - started
        out.fill(9)
        kept.setdefault("fenced", []).append(out)
        return None, type(error).__name__, took
    took = time.monotonic() - started
    return digest(out), None, took


def untouched() -> bool:
    return all(bool((out == 9).all()) for out in kept.pop("fenced", []))


def hurt(relay: Relay, chance: random.Random, nbytes: int, *, checked: bool) -> None:
    kinds = ["cut", "cuts", "stall", "delay", "dribble", "refuse", "nothing"]
    kind = chance.choice([*kinds, "corrupt", "corrupt"] if checked else kinds)
    if kind == "cut":
        relay.cut_after(chance.randrange(1, nbytes), "backward")
    elif kind == "cuts":
        relay.cut_after(chance.randrange(nbytes // 8, nbytes), "backward", once=False)
    elif kind == "stall":
        relay.stall(chance.choice(["forward", "backward", None]))
    elif kind == "delay":
        relay.delay(chance.random() * 0.2)
    elif kind == "dribble":
        relay.dribble(chance.randrange(1 * KIB, 256 * KIB), 0.001)
    elif kind == "corrupt":
        relay.corrupt(
            chance.choice([100, 10 * KIB, MIB, 2 * nbytes]),
            chance.choice(["forward", "backward"]),
            seed=chance.randrange(1 << 30),
        )
    elif kind == "refuse":
        relay.refuse()
        relay.cut()


@pytest.mark.timeout(600)
def test_random_faults(reach: Reach) -> None:
    chance = random.Random(1)
    nbytes, outcomes = 3 * MIB + 5, []
    refs = {checked: reach.b.call(put, 4, nbytes, checksum=checked) for checked in (False, True)}
    for _ in range(FAULTS):
        checked = chance.random() < 0.5
        ref = refs[checked]
        reach.a.call(get, ref)
        hurt(reach.relay, chance, nbytes, checked=checked)
        got, error, took = reach.a.call(get_under, ref, 0.5)
        assert got in (None, expected(4, nbytes))
        assert took < 0.5 + GRACE_S, (error, took)
        outcomes.append(error)
        reach.relay.heal()
        eventually(partial(reach.a.call, works, ref), "it works again")
        assert reach.a.call(untouched)
    told = {"TransferTimeoutError", "TransportError", "PeerLostError", "NoPathError"}
    told |= {"CorruptTransferError", "AuthenticationError", "StaleRefError"}  # where bytes were changed on the way
    assert set(outcomes) <= {None, *told}, outcomes
    assert None in outcomes and "TransferTimeoutError" in outcomes


def works(ref: tl.TensorRef) -> bool:
    try:
        return bool(get(ref, timeout=5.0))
    except tl.TensorLinkError:
        return False


def cancel_halfway(ref: tl.TensorRef) -> float:
    """Seconds that the cancel took."""
    out = kept["out"] = np.zeros(ref.nbytes, np.uint8)
    transfer = tl.iget(ref, out=out)
    eventually(lambda: out[0] != 0, "the first bytes are there")
    started = time.monotonic()
    assert transfer.cancel()
    took = time.monotonic() - started
    out.fill(9)
    with pytest.raises(tl.TransferCancelledError):
        transfer.wait(DEADLINE_S)
    return took


def all_nines() -> bool:
    return bool((kept["out"] == 9).all())


def test_a_cancel_in_the_middle_is_a_fence(reach: Reach) -> None:
    ref = reach.b.call(put_ones, 32 * MIB)
    for _ in range(5):
        reach.a.call(get, ref)
        reach.relay.dribble(64 * KIB, 0.002, "backward")
        assert reach.a.call(cancel_halfway, ref) < GRACE_S
        reach.relay.heal()
        reach.a.call(get, ref)
        assert reach.a.call(all_nines)


def put_ones(nbytes: int) -> tl.TensorRef:
    kept["ref"] = tl.put(np.ones(nbytes, np.uint8))
    return kept["ref"]


# Weights


def publish(value: int, nbytes: int) -> None:
    """Version `value`, all of whose bytes are that."""
    if "publisher" not in kept:
        kept["state"] = {"w": np.zeros(nbytes, np.uint8)}
        kept["publisher"] = tl.WeightPublisher("policy", kept["state"])
    kept["state"]["w"].fill(value)
    kept["publisher"].publish(value)


def pull(nbytes: int, timeout: float, least: int | None = None) -> tuple[str | None, set[int]]:
    if "subscriber" not in kept:
        kept["into"] = {"w": np.zeros(nbytes, np.uint8)}
        kept["subscriber"] = tl.WeightSubscriber("policy", kept["into"])
    error = None
    try:
        kept["subscriber"].pull(least, timeout=timeout)
    except tl.TensorLinkError as raised:
        error = type(raised).__name__
    return error, set(np.unique(kept["into"]["w"]).tolist())


def test_a_link_cut_in_the_middle_of_a_pull_leaves_into_as_it_was(reach: Reach) -> None:
    nbytes = 16 * MIB
    reach.b.call(publish, 1, nbytes)
    assert reach.a.call(pull, nbytes, DEADLINE_S) == (None, {1})
    reach.b.call(publish, 2, nbytes)
    reach.relay.dribble(256 * KIB, 0.02, "backward")  # takes 1.3 s
    assert reach.a.call(pull, nbytes, 0.5, 2) == ("TransferTimeoutError", {1})
    reach.relay.heal()
    reach.relay.cut_after(5 * MIB, "backward")
    assert reach.a.call(pull, nbytes, DEADLINE_S, 2) == (None, {2})  # it went on where it had been cut


# A busy owner


def hold_lock(seconds: float) -> None:
    """Holds the interpreter's lock."""
    sleep = ctypes.PyDLL(None).usleep
    say("holding")
    sleep(ctypes.c_uint(int(seconds * 1e6)))


def test_an_owner_that_holds_its_interpreter_stalls_no_reader(reach: Reach) -> None:
    ref = reach.b.call(put, 6, MIB)
    reach.b.call(publish, 3, MIB)
    assert reach.a.call(pull, MIB, DEADLINE_S) == (None, {3})
    reach.b.call(publish, 4, MIB)
    reach.a.call(get, ref)
    reach.b.start(hold_lock, 2 * LEASE_S)
    reach.b.hear()
    until = time.monotonic() + 1.6 * LEASE_S
    slowest = 0.0
    while time.monotonic() < until:
        started = time.monotonic()
        assert reach.a.call(get, ref) == expected(6, MIB)
        slowest = max(slowest, time.monotonic() - started)
    assert reach.a.call(pull, MIB, DEADLINE_S, 4) == (None, {4})
    reach.b.finish()
    assert slowest < LEASE_S / 2
