"""The whole library between two hosts: all that works over shared memory works over a network, and is said as soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

import tensorlink as tl
from tensorlink.testing.pairs import digest, pattern
from tests.cluster import (
    LEASE_S,
    Cluster,
    cluster,
    forget,
    get,
    networks,
    nursery,
    pool_bytes,
    put,
    receive,
    receive_each,
    send,
    send_each,
)
from tests.hosts import Network
from tests.peer import DEADLINE_S, Peer, eventually, kept, say

__all__ = ["cluster", "networks", "nursery"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = (0, 10, 5_000, 100 * KIB, 3 * MIB, 48 * MIB)
SOON_S = LEASE_S / 2
Pair = tuple[Peer, Peer]


@pytest.fixture(scope="module", params=["auto", "grpc"])
def control(request: pytest.FixtureRequest) -> str:
    """What carries the messages: the lane, or gRPC."""
    return str(request.param)


@pytest.fixture(scope="module")
def pair(cluster: Cluster, control: str) -> Iterator[Pair]:
    """`a` and `b`, a host each."""
    a, b = (cluster.peer(host, name, TENSORLINK_CONTROL=control) for host, name in enumerate("ab"))
    yield a, b
    for peer in (a, b):
        peer.call(tl.shutdown)
        peer.close()


@pytest.fixture
def join(cluster: Cluster) -> Iterator[Callable[..., Peer]]:
    """`join(1, "c")`: one more peer, which ends with the test."""
    made: list[Peer] = []

    def start(host: int, name: str, **environment: str) -> Peer:
        made.append(cluster.peer(host, name, **environment))
        return made[-1]

    yield start
    for peer in made:
        peer.close()


def expected(seed: int, nbytes: int) -> str:
    return digest(pattern(seed, nbytes))


# Messages


def test_messages_of_every_size_both_ways(pair: Pair) -> None:
    for source, sink, to, name in ((*pair, "b", "a"), (*pair[::-1], "a", "b")):
        for like in ("numpy", "torch"):
            for nbytes in SIZES:
                sink.start(receive, name)
                source.call(send, nbytes + 1, nbytes, to, like=like)
                assert sink.finish() == expected(nbytes + 1, nbytes)


def send_tree(to: str) -> None:
    shared = torch.arange(200_000.0)
    half = torch.ones(5, dtype=torch.bfloat16)
    tl.send(
        {"a": shared, "b": [shared, None, True, 2.5, "text", b"bytes", half], "c": (np.ones((2, 0)), np.ones(()))}, to
    )


def receive_tree(source: str) -> tuple[bool, list[Any]]:
    tree = tl.recv(source)
    tree["a"][0] = 77  # two names for one tensor
    *rest, half = tree["b"][1:]
    shapes = [part.shape for part in tree["c"]]
    good = bool((tree["a"][1:] == torch.arange(200_000.0)[1:]).all()) and half.dtype == torch.bfloat16
    return good, [float(tree["b"][0][0]), *rest, float(half.sum()), *shapes]


def test_a_tree_with_aliases(pair: Pair) -> None:
    a, b = pair
    a.call(send_tree, "b")
    assert b.call(receive_tree, "a") == (True, [77.0, None, True, 2.5, "text", b"bytes", 5.0, (2, 0), ()])


def receive_now(source: str) -> Any:
    return tl.recv(source, timeout=0.01)


def test_tags_keep_their_order(pair: Pair) -> None:
    a, b = pair
    messages = [(number, bytes(SIZES[number % 4])) for number in range(200)]
    a.call(send_each, messages, "b", "first")
    a.call(send_each, ["other"], "b", "second")
    assert b.call(receive_each, 1, "a", "second") == ["other"]
    assert b.call(receive_each, 200, None, "first") == messages
    with pytest.raises(tl.TransferTimeoutError):
        b.call(receive_now, "a")


async def _gather(other: str, count: int) -> list[str]:
    loop_alive = asyncio.create_task(asyncio.sleep(0))
    arriving = [tl.irecv(other, tag=str(number)) for number in range(count)]
    sending = [tl.isend(pattern(number, SIZES[number % 5]), other, tag=str(number)) for number in range(count)]
    arrived = await asyncio.gather(*arriving, *sending)
    await loop_alive
    return [digest(array) for array in arrived[:count]]


def gather(other: str, count: int) -> list[str]:
    return asyncio.run(_gather(other, count))


def test_asyncio_in_both_at_once(pair: Pair) -> None:
    a, b = pair
    a.start(gather, "b", 40)
    assert b.call(gather, "a", 40) == a.finish() == [expected(number, SIZES[number % 5]) for number in range(40)]


def mismatch_then_fill(source: str) -> tuple[bool, str]:
    wrong, right = np.full(3 * MIB - 1, 7, np.uint8), np.full(3 * MIB, 7, np.uint8)
    with suppress(tl.LayoutMismatchError):
        tl.recv(source, out=wrong)
        raise AssertionError("it fitted")
    return bool((wrong == 7).all()), digest(tl.recv(source, out=right))


def test_receive_into_out(pair: Pair) -> None:
    a, b = pair
    a.call(send, 5, 3 * MIB, "b")
    assert b.call(mismatch_then_fill, "a") == (True, expected(5, 3 * MIB))


# Handles and weights


@pytest.mark.parametrize("into", [False, True], ids=["new", "out"])
def test_what_was_put_is_read_both_ways(pair: Pair, into: bool) -> None:
    for owner, reader in (pair, pair[::-1]):
        for nbytes in SIZES:
            ref = owner.call(put, nbytes, nbytes)
            assert reader.call(get, ref, into) == expected(nbytes, nbytes)
            owner.call(release, ref)
            with pytest.raises(tl.StaleRefError):
                reader.call(get, ref, into)


def release(ref: tl.TensorRef) -> None:
    tl.current().release(ref)
    kept["refs"].clear()


def test_handles_end_by_themselves(pair: Pair) -> None:
    a, b = pair
    base = a.call(pool_bytes)
    ref = a.call(put, 1, 3 * MIB, reads=2)
    for _ in range(2):
        assert b.call(get, ref) == expected(1, 3 * MIB)
    eventually(lambda: a.call(pool_bytes) == base, "two reads ended the handle")
    with pytest.raises(tl.StaleRefError):
        b.call(get, ref)
    brief = a.call(put, 2, MIB, ttl=0.2)
    eventually(lambda: a.call(pool_bytes) == base, "it expired")
    with pytest.raises(tl.StaleRefError):
        b.call(get, brief)


def read_way(ref: tl.TensorRef) -> tuple[str, str]:
    tl.get(ref)  # connects
    transfer = tl.iget(ref)
    return digest(transfer.wait(DEADLINE_S)), transfer.path


def test_shared_memory_on_a_host_and_tcp_between_hosts(pair: Pair, join: Callable[..., Peer]) -> None:
    a, b = pair
    c = join(1, "c")
    ref = b.call(put, 3, 3 * MIB)
    assert c.call(read_way, ref) == (expected(3, 3 * MIB), "shm")
    assert a.call(read_way, ref) == (expected(3, 3 * MIB), "tcp")
    c.call(send_each, ["here"], "b")
    c.call(send_each, ["there"], "a")
    assert b.call(receive_each, 1, "c") + a.call(receive_each, 1, "c") == ["here", "there"]


def publish(value: int, version: int | None = None) -> int:
    state = {"w": torch.full((1000, 1000), float(value)), "b": torch.full((3,), float(value), dtype=torch.bfloat16)}
    if "publisher" not in kept:
        kept["publisher"] = tl.WeightPublisher("policy", state)
        kept["state"] = state
    for name, tensor in kept["state"].items():
        tensor.copy_(state[name])
    return kept["publisher"].publish(version)


def subscribe() -> None:
    kept["into"] = {"w": torch.zeros(1000, 1000), "b": torch.zeros(3, dtype=torch.bfloat16)}
    kept["subscriber"] = tl.WeightSubscriber("policy", kept["into"])


def pull(min_version: int | None = None, timeout: float = DEADLINE_S) -> tuple[int, set[float]]:
    version = kept["subscriber"].pull(min_version, timeout=timeout)
    return version, {float(value) for tensor in kept["into"].values() for value in tensor.unique()}


def test_weights(pair: Pair) -> None:
    a, b = pair
    b.call(subscribe)
    b.start(pull)
    assert a.call(publish, 5) == 1
    assert b.finish() == (1, {5.0})
    b.start(pull, 3)
    assert a.call(publish, 6) == 2
    assert a.call(publish, 7) == 3
    assert b.finish() == (3, {7.0})
    for value in range(8, 30):
        a.call(publish, value)
    assert b.call(pull, 25) == (25, {29.0})  # news of a version take their own way between hosts
    for peer in pair:
        peer.call(forget)


# Ends


def kill_and_time(victim: Peer, waiting: Peer, kind: type[Exception] = tl.PeerLostError) -> float:
    """Seconds from the death of a peer to the error of one that waits for it."""
    victim.kill()
    started = time.monotonic()
    with pytest.raises(kind):
        waiting.finish()
    return time.monotonic() - started


def test_a_killed_sender(pair: Pair, join: Callable[..., Peer]) -> None:
    a, _ = pair
    c = join(1, "sender")
    c.call(send_each, [1, b"x" * 20_000], "a")
    c.call(send_each, ["last"], "a", "last")
    assert a.call(receive_each, 1, "sender", "last") == ["last"]
    a.start(receive_each, 3, "sender")
    assert kill_and_time(c, a) < SOON_S
    with pytest.raises(tl.PeerLostError):
        a.call(tl.recv, "sender")
    with pytest.raises((tl.PeerLostError, tl.PeerUnknownError)):
        a.call(tl.send, 1, "sender")


def test_a_killed_peer_is_back_under_its_name_at_once(pair: Pair, join: Callable[..., Peer]) -> None:
    a, _ = pair
    first = join(1, "phoenix")
    first.call(send_each, ["before"], "a")
    assert a.call(receive_each, 1, "phoenix") == ["before"]
    first.kill()
    began = time.monotonic()
    second = join(1, "phoenix")
    assert time.monotonic() - began < SOON_S, "its lease didn't have to run out"
    second.call(send_each, ["after"], "a")
    assert a.call(receive_each, 1, None) == ["after"]


def receive_some(source: str) -> int:
    tl.recv(source)
    return 1


def send_for_ever(to: str) -> None:
    while True:
        tl.send(bytes(MIB), to)


def test_a_killed_receiver_of_messages(pair: Pair, join: Callable[..., Peer]) -> None:
    a, _ = pair
    base = a.call(pool_bytes)
    c = join(1, "receiver")
    a.start(send_for_ever, "receiver")
    c.call(receive_some, "a")
    assert kill_and_time(c, a) < SOON_S
    eventually(lambda: a.call(pool_bytes) == base, "what it had not received came back")


def get_for_ever(ref: tl.TensorRef) -> None:
    say(get(ref))
    while True:
        get(ref)


def test_a_killed_owner(pair: Pair, join: Callable[..., Peer]) -> None:
    a, _ = pair
    c = join(1, "owner")
    ref = c.call(put, 1, 16 * MIB)
    a.start(get_for_ever, ref)
    assert a.hear() == expected(1, 16 * MIB)
    assert kill_and_time(c, a) < SOON_S
    again = join(1, "owner")
    with pytest.raises(tl.PeerRestartedError):
        a.call(get, ref)
    assert a.call(get, again.call(put, 2, MIB)) == expected(2, MIB)
    a.call(send_each, ["welcome"], "owner")
    assert again.call(receive_each, 1, "a") == ["welcome"]


def test_a_killed_publisher(pair: Pair, join: Callable[..., Peer]) -> None:
    a, _ = pair
    c = join(1, "publisher")
    c.call(publish, 4, 10)
    a.call(subscribe)
    assert a.call(pull) == (10, {4.0})
    a.start(pull, 11)
    assert kill_and_time(c, a) < SOON_S
    again = join(1, "publisher")
    again.call(publish, 9, 12)
    assert a.call(pull) == (12, {9.0})
    a.call(forget)


def send_and_leave(seed: int, nbytes: int, to: str) -> None:
    send(seed, 10, to)
    send(seed, nbytes, to)
    tl.shutdown()


def test_what_was_sent_before_a_shutdown_arrives(pair: Pair, join: Callable[..., Peer]) -> None:
    a, _ = pair
    c = join(1, "leaver")
    a.start(receive_twice, "leaver")
    c.call(send_and_leave, 3, 64 * MIB, "a")
    c.close()
    assert a.finish() == [expected(3, 10), expected(3, 64 * MIB)]
    started = time.monotonic()
    with pytest.raises(tl.PeerLostError):
        a.call(tl.recv, "leaver")
    assert time.monotonic() - started < SOON_S


def receive_twice(source: str) -> list[str]:
    return [receive(source), receive(source)]


def test_small_messages_survive_their_sender(pair: Pair, join: Callable[..., Peer]) -> None:
    a, _ = pair
    c = join(1, "poor")
    c.call(send_each, [1, b"2", "three"], "a")
    a.start(receive_each, 3, "poor")
    assert a.finish() == [1, b"2", "three"]
    c.call(send_each, ["late", "later"], "a")
    c.call(tl.shutdown)
    assert a.call(receive_each, 2, "poor") == ["late", "later"]


# Addresses


def test_ipv6(networks: Callable[[int], Network], cluster: Cluster) -> None:
    over6 = Cluster(cluster.network, ipv6=True)
    a, b = (over6.peer(host, name) for host, name in enumerate("ab"))
    ref = b.call(put, 8, 3 * MIB)
    assert ref.address.rpartition(",")[2].startswith("[fd00:")
    assert a.call(read_way, ref) == (expected(8, 3 * MIB), "tcp")
    a.call(send, 9, 3 * MIB, "b")
    assert b.call(receive, "a") == expected(9, 3 * MIB)
    for peer in (a, b):
        peer.close()
    over6.close()
