"""`send` and `recv` between processes: order, credit, failures that consume nothing, peers that die and come back."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorlink as tl
from tensorlink.control import PeerClient
from tests.peer import DEADLINE_S, Nursery, Peer, eventually, kept, nursery, say, spawn

__all__ = ["nursery", "spawn"]

MIB = 1 << 20
SIZES = (0, 10, 5_000, 100_000, 3 * MIB)  # in the frame, in the frame, and offered
Spawn = Callable[..., Peer]


@dataclass
class Pair:
    """An endpoint `a` of this process, and a child that is the peer `b`."""

    a: tl.Endpoint
    b: Peer
    control: str


@pytest.fixture(scope="module", params=["auto", "grpc"])
def control(request: pytest.FixtureRequest) -> str:
    """What carries the messages: the lane, or gRPC."""
    mode: str = request.param
    return mode


@pytest.fixture(scope="module")
def pair(control: str, nursery: Nursery) -> Iterator[Pair]:
    child = nursery.start(TENSORLINK_CONTROL=control)
    with tl.init("a", control=control) as a:
        child.call(tl.init, "b")
        yield Pair(a, child, control)
        child.call(tl.shutdown)
    child.close()


@pytest.fixture
def join(spawn: Spawn, control: str) -> Callable[..., Peer]:
    """Starts a child that joins under a name, in the run-time directory of the test."""

    def start(name: str, **environment: str) -> Peer:
        peer = spawn(TENSORLINK_CONTROL=control, **environment)
        peer.call(tl.init, name)
        return peer

    return start


def here(name: str, control: str, **settings: Any) -> tl.Endpoint:
    return tl.init(name, control=control, **settings)


# What the children do


def send_numbers(to: str, tags: list[str], count: int) -> None:
    """Message `i` is filled with `i` and sent under a tag and in a size that change from one to the next."""
    for i in range(count):
        tl.send(np.full(SIZES[i % len(SIZES)], i % 251, np.uint8), to, tag=tags[i % len(tags)])


def flood(to: str, stop_tag: str) -> None:
    """Sends in a thread of its own until a message with the stop tag comes."""
    stop = threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            tl.send(b"flood", to, tag="flood")

    thread = threading.Thread(target=go_on)
    thread.start()
    tl.recv(tag=stop_tag)
    stop.set()
    thread.join()
    tl.send(b"end", to, tag="flood")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def send_then_recv(to: str, nbytes: int, fill: int) -> tuple[int, int]:
    tl.send(torch.full((nbytes,), fill, dtype=torch.uint8), to, tag="first")
    got = tl.recv(to, tag="first")
    return int(got[0]), int(got[-1])


def recv_sum(source: str | None, tag: str, timeout: float = DEADLINE_S) -> float:
    return float(tl.recv(source, tag=tag, timeout=timeout).sum())


def recv_kind(source: str, tag: str, like: str | None) -> str:
    return type(tl.recv(source, tag=tag, like=like)["x"]).__module__


def read_ref_in_tree(source: str) -> float:
    tree = tl.recv(source, tag="ref")
    return float(tl.get(tree["inner"][0]).sum()) + tree["n"]


def send_and_leave(to: str, how: str) -> None:
    tl.send(np.arange(10), to, tag="last")
    tl.send(np.full(8 * MIB, 7, np.uint8), to, tag="last")
    if how == "shutdown":
        tl.shutdown()
    say("sent")


def interrupted(kind: str) -> float:
    """Waits without end in one way or another, until SIGINT; how long ago that was, by what the handler noted."""
    noted: list[float] = []

    def handler(*_: object) -> None:
        noted.append(time.monotonic())
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)
    say("waiting")
    try:
        WAITS[kind]()
    except KeyboardInterrupt:
        return time.monotonic() - noted[0]
    raise AssertionError("the wait ended without an interrupt")


def _send_to_nobody() -> None:
    tl.send(1, "nobody", timeout=DEADLINE_S)


def _send_without_room() -> None:
    for _ in itertools.count():
        tl.send(np.zeros(4 * MIB, np.uint8), "a", tag="never", timeout=DEADLINE_S)


def _get_of_a_stopped_owner() -> None:
    tl.get(kept["ref"], timeout=DEADLINE_S)


WAITS: dict[str, Callable[[], object]] = {
    "recv": lambda: tl.recv("a", tag="never", timeout=None),
    "recv from anyone": lambda: tl.recv(tag="never", timeout=None),
    "send to a name that never joins": _send_to_nobody,
    "send without room": _send_without_room,
    "irecv": lambda: tl.irecv("a", tag="never").wait(),
    "wait": lambda: tl.wait([tl.irecv("a", tag="never"), tl.irecv(tag="never")], timeout=None),
    "isend": lambda: tl.isend(1, "nobody", timeout=DEADLINE_S).wait(),
}


# Order and matching


def test_messages_of_one_source_and_tag_come_in_order(pair: Pair) -> None:
    tags = ["x", "y", ""]
    pair.b.start(send_numbers, "a", tags, 150)
    for start, tag in enumerate(tags):
        for i in range(start, 150, 3):
            got = pair.a.recv("b", tag=tag, timeout=DEADLINE_S)
            assert got.size == SIZES[i % len(SIZES)]
            assert (got == i % 251).all(), (tag, i)
    pair.b.finish()


def test_a_source_that_floods_does_not_starve_another(join: Callable[..., Peer], control: str) -> None:
    with here("a", control) as a, here("c", control) as c:
        b = join("b")
        b.start(flood, "a", "stop flood")
        a.recv("b", tag="flood", timeout=DEADLINE_S)
        c.send(b"one", "a", tag="flood")
        while a.recv(tag="flood", timeout=DEADLINE_S) != b"one":
            pass
        c.send(b"", "b", tag="stop flood")
        while a.recv(tag="flood", timeout=DEADLINE_S) != b"end":
            pass
        b.finish()


def test_the_empty_tag_matches_only_itself(pair: Pair) -> None:
    pair.b.call(tl.send, 1, "a", tag="some")
    with pytest.raises(tl.TransferTimeoutError):
        pair.a.recv("b", timeout=0.05)
    pair.b.call(tl.send, 2, "a")
    with pytest.raises(tl.TransferTimeoutError):
        pair.a.recv("b", tag="other", timeout=0.05)
    assert pair.a.recv("b", timeout=DEADLINE_S) == 2
    assert pair.a.recv("b", tag="some", timeout=DEADLINE_S) == 1


def test_tags_and_names_may_hold_any_text(pair: Pair) -> None:
    for tag in ("é∀", "a\0b", " ", "x" * 5000):
        pair.b.call(tl.send, tag, "a", tag=tag)
        assert pair.a.recv("b", tag=tag, timeout=DEADLINE_S) == tag


def test_a_tag_that_no_frame_can_carry_is_refused(pair: Pair) -> None:
    with pytest.raises((ValueError, TypeError)):
        pair.a.send(1, "b", tag="x" * (1 << 17))
    pair.a.send(2, "b", tag="after")
    assert pair.b.call(tl.recv, "a", tag="after") == 2


def test_send_to_self(pair: Pair) -> None:
    for size in SIZES:
        pair.a.send(torch.arange(size), "a", tag="self")
        assert torch.equal(pair.a.recv("a", tag="self"), torch.arange(size))


def test_a_sent_object_may_be_changed_at_once(pair: Pair) -> None:
    for size in (10, 100_000, 8 * MIB):
        array = np.ones(size, np.uint8)
        pair.a.send(array, "b", tag="local completion")
        array[:] = 9
        assert pair.b.call(recv_sum, "a", "local completion") == size


def test_two_peers_that_both_send_first_do_not_wait_for_each_other(pair: Pair) -> None:
    nbytes = 256 * MIB
    pair.b.start(send_then_recv, "a", nbytes, 5)
    pair.a.send(torch.full((nbytes,), 6, dtype=torch.uint8), "b", tag="first")
    got = pair.a.recv("b", tag="first", timeout=DEADLINE_S)
    assert (int(got[0]), int(got[-1])) == (5, 5)
    assert pair.b.finish() == (6, 6)


# What a failed receive leaves


def test_a_receive_that_times_out_takes_nothing(pair: Pair) -> None:
    with pytest.raises(tl.TransferTimeoutError):
        pair.a.recv("b", tag="late", timeout=0.05)
    pair.b.call(tl.send, "here", "a", tag="late")
    assert pair.a.recv("b", tag="late", timeout=DEADLINE_S) == "here"


@pytest.mark.parametrize("size", [10, 100_000, 2 * MIB])
def test_a_mismatch_writes_nothing_and_takes_nothing(pair: Pair, size: int) -> None:
    pair.b.call(tl.send, np.arange(size, dtype=np.float32), "a", tag="out")
    pair.b.call(tl.send, "next", "a", tag="out")
    for wrong in (
        np.full(size, 7, np.int32),
        np.full(size + 1, 7, np.float32),
        np.full(size - 1, 7, np.float32),
        np.full((size, 1), 7, np.float32),
        {"x": np.full(size, 7, np.float32)},
    ):
        with pytest.raises(tl.LayoutMismatchError):
            pair.a.recv("b", tag="out", out=wrong, timeout=DEADLINE_S)
        assert ((wrong["x"] if isinstance(wrong, dict) else wrong) == 7).all()
    out = np.empty(size, np.float32)
    assert pair.a.recv("b", tag="out", out=out, timeout=DEADLINE_S) is out
    assert (out == np.arange(size, dtype=np.float32)).all()
    assert pair.a.recv("b", tag="out", timeout=DEADLINE_S) == "next"


def test_out_that_cannot_be_written_takes_nothing(pair: Pair) -> None:
    pair.b.call(tl.send, np.arange(5), "a", tag="frozen")
    frozen = np.zeros(5, np.int64)
    frozen.flags.writeable = False
    with pytest.raises((tl.LayoutMismatchError, TypeError, ValueError)):
        pair.a.recv("b", tag="frozen", out=frozen, timeout=DEADLINE_S)
    assert (frozen == 0).all()
    assert pair.a.recv("b", tag="frozen", timeout=DEADLINE_S).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [10, 2 * MIB])
def test_out_of_a_tree_is_filled_in_place(pair: Pair, size: int) -> None:
    sent = {"w": np.arange(size, dtype=np.float32), "l": [np.ones(3, np.int8), "text", None, 4]}
    pair.b.call(tl.send, sent, "a", tag="tree")
    out = {"w": torch.empty(size), "l": [np.zeros(3, np.int8), None, None, 0]}
    try:
        got = pair.a.recv("b", tag="tree", out=out, timeout=DEADLINE_S)
    except tl.LayoutMismatchError:
        out["l"] = [np.zeros(3, np.int8), "text", None, 4]
        got = pair.a.recv("b", tag="tree", out=out, timeout=DEADLINE_S)
    assert got["w"] is out["w"]
    assert torch.equal(out["w"], torch.arange(size, dtype=torch.float32))
    assert out["l"][0].tolist() == [1, 1, 1]


def test_like_names_the_framework(pair: Pair) -> None:
    for made, like, module in ((torch.ones, "numpy", "numpy"), (np.ones, "torch", "torch"), (np.ones, None, "numpy")):
        pair.a.send({"x": made(4)}, "b", tag="like")
        assert pair.b.call(recv_kind, "a", "like", like) == module
    pair.a.send({"x": np.ones(4)}, "b", tag="like")
    with pytest.raises((TypeError, ValueError)):
        pair.b.call(recv_kind, "a", "like", "no-such-framework")
    assert pair.b.call(recv_kind, "a", "like", None) == "numpy"


def test_handles_travel_inside_trees(pair: Pair) -> None:
    with pair.a.put(np.ones(100_000)) as ref:
        pair.a.send({"inner": [ref], "n": 5}, "b", tag="ref")
        assert pair.b.call(read_ref_in_tree, "a") == 100_005


def test_what_cannot_travel_is_refused_and_sends_nothing(pair: Pair) -> None:
    for bad in (object(), {1, 2}, np.array([object()]), torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(TypeError):
            pair.a.send(bad, "b", tag="bad")
    pair.a.send("good", "b", tag="bad")
    assert pair.b.call(tl.recv, "a", tag="bad") == "good"


def test_only_a_wait_for_somebodys_act_may_have_no_end(pair: Pair) -> None:
    ref = pair.a.put(1)
    for move in (
        lambda: pair.a.send(1, "b", timeout=None),
        lambda: pair.a.isend(1, "b", timeout=None),
        lambda: pair.a.get(ref, timeout=None),
        lambda: pair.a.iget(ref, timeout=None),
        lambda: pair.a.recv("b", timeout=-1),
    ):
        with pytest.raises(ValueError):
            move()
    ref.release()
    pair.b.call(tl.send, 1, "a", tag="endless")
    assert pair.a.recv("b", tag="endless", timeout=None) == 1


# Names


def test_a_name_not_yet_joined_is_waited_for(join: Callable[..., Peer], control: str) -> None:
    with here("a", control) as a:
        sending = a.isend(np.ones(8 * MIB, np.uint8), "late", timeout=DEADLINE_S)
        late = join("late")
        assert late.call(recv_sum, "a", "") == 8 * MIB
        sending.wait(DEADLINE_S)


def test_recv_from_a_name_not_yet_joined_waits(join: Callable[..., Peer], control: str) -> None:
    with here("a", control) as a:
        receiving = a.irecv("late")
        join("late").call(tl.send, "hello", "a")
        assert receiving.wait(DEADLINE_S) == "hello"


def test_an_unknown_name_is_reported_with_near_ones(control: str) -> None:
    with here("trainer", control) as trainer:
        for attempt in (lambda: trainer.send(1, "trianer", timeout=0.2), lambda: trainer.recv("trianer", timeout=0.2)):
            with pytest.raises(tl.PeerUnknownError, match="trainer"):
                attempt()


# Death and return


def test_the_receiver_is_gone_and_its_successor_gets_messages_at_once(join: Callable[..., Peer], control: str) -> None:
    with here("a", control) as a:
        for round_number in range(3):
            b = join("b")
            a.send(round_number, "b", timeout=DEADLINE_S)
            assert b.call(tl.recv, "a") == round_number
            b.kill()
            started = time.monotonic()
            with pytest.raises(tl.PeerLostError):
                while True:  # the news of the death may take a moment
                    a.send(np.zeros(100_000), "b", timeout=10)
            assert time.monotonic() - started < 10


@pytest.mark.shm  # elsewhere what is offered goes with its sender
@pytest.mark.parametrize("how", ["kill", "shutdown"])
def test_what_was_sent_completely_is_still_delivered(join: Callable[..., Peer], control: str, how: str) -> None:
    with here("a", control) as a:
        b = join("b")
        b.call(send_and_leave, "a", how)
        if how == "kill":
            b.kill()
            eventually(lambda: "b" not in [peer.name for peer in a.peers()], "b is gone")
        assert a.recv("b", tag="last", timeout=10).tolist() == list(range(10))
        large = a.recv("b", tag="last", timeout=10)
        assert large.size == 8 * MIB
        assert (large == 7).all()
        with pytest.raises(tl.PeerLostError):
            a.recv("b", tag="last", timeout=10)


def test_a_receive_that_names_the_dead_fails_and_others_go_on(join: Callable[..., Peer], control: str) -> None:
    with here("a", control) as a:
        b, c = join("b"), join("c")
        for peer in (b, c):
            peer.call(tl.send, 1, "a")
            a.recv(timeout=DEADLINE_S)
        named, anyone = a.irecv("b", tag="x"), a.irecv(tag="x")
        b.kill()
        with pytest.raises(tl.PeerLostError):
            named.wait(10)
        assert not anyone.done()
        with pytest.raises(tl.PeerLostError):
            a.recv("b", tag="x", timeout=10)
        c.call(tl.send, "c", "a", tag="x")
        assert anyone.wait(DEADLINE_S) == "c"


# Room


def test_a_sender_far_ahead_is_held_back_and_nothing_is_lost(join: Callable[..., Peer], control: str) -> None:
    count = 100_000 if control == "auto" else 2_000
    with here("a", control) as a:
        b = join("b")
        b.call(tl.send, 0, "a")
        a.recv("b")
        before = b.call(resident_bytes)
        a.send(-1, "b", tag="probe")
        assert b.call(tl.recv, "a", tag="probe") == -1
        payload = np.zeros(1000, np.uint8)
        sent = 0
        try:
            for _ in range(count):
                a.send(payload, "b", tag="ahead", timeout=0.2)
                sent += 1
        except (tl.PoolExhaustedError, tl.TransferTimeoutError):
            pass
        assert sent >= min(count, 4 * MIB // 1000)
        assert b.call(resident_bytes) - before < 64 * MIB
        assert b.call(count_messages, "a", "ahead", sent) == sent * 1000


def count_messages(source: str, tag: str, count: int) -> int:
    return sum(tl.recv(source, tag=tag).size for _ in range(count))


def test_without_room_a_send_ends_at_its_deadline_and_says_why(join: Callable[..., Peer], control: str) -> None:
    with here("a", control, pool_bytes=32 * MIB) as a:
        b = join("b")
        a.send(0, "b")
        b.call(tl.recv, "a")
        sent = 0
        with pytest.raises(tl.PoolExhaustedError, match=r"of 33,554,432 are used"):
            for _ in range(100):
                a.send(np.ones(6 * MIB, np.uint8), "b", timeout=0.3)
                sent += 1
        assert sent == 5
        for _ in range(sent):
            assert b.call(recv_sum, "a", "") == 6 * MIB
        a.send(np.ones(20 * MIB, np.uint8), "b", timeout=DEADLINE_S)
        assert b.call(recv_sum, "a", "") == 20 * MIB


def test_a_send_that_waits_for_room_goes_on_when_there_is_some(join: Callable[..., Peer], control: str) -> None:
    with here("a", control, pool_bytes=32 * MIB) as a:
        b = join("b")
        sending = [a.isend(np.ones(20 * MIB, np.uint8), "b", timeout=DEADLINE_S) for _ in range(4)]
        for _ in range(4):
            assert b.call(recv_sum, "a", "") == 20 * MIB
        tl.wait(sending, timeout=DEADLINE_S)
        for transfer in sending:
            transfer.result()


# Ctrl-C


@pytest.mark.parametrize("kind", list(WAITS))
def test_an_interrupt_ends_a_wait_at_once(join: Callable[..., Peer], control: str, kind: str) -> None:
    with here("a", control) as a:
        b = join("b", TENSORLINK_POOL_BYTES=str(16 * MIB))
        b.call(tl.send, 0, "a")
        a.recv("b")
        b.start(interrupted, kind)
        assert b.hear() == "waiting"
        eventually(lambda: _sleeps(b.pid), "it waits")
        b.signal(signal.SIGINT)
        assert b.finish(10) < 5.0
        b.call(tl.send, "well", "a", tag="after")  # it goes on as if nothing had been
        assert a.recv("b", tag="after", timeout=DEADLINE_S) == "well"


def _sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_a_message_lost_on_the_way_holds_up_none_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    with tl.init("a", control="grpc") as a, tl.init("b") as b:
        a.send("first", "b")
        assert b.recv("a") == "first"
        deliver, lost = PeerClient.deliver, ["second"]

        def lossy(self: PeerClient, sequence: int, tag: str, frame: bytes, timeout: float) -> bytes:
            if lost and tag == "lost":
                lost.clear()
                raise tl.TransferTimeoutError("no answer before the deadline")
            return deliver(self, sequence, tag, frame, timeout)

        monkeypatch.setattr(PeerClient, "deliver", lossy)
        with pytest.raises(tl.TransferTimeoutError):
            a.send("second", "b", tag="lost")
        a.send("third", "b")
        assert b.recv("a", timeout=DEADLINE_S) == "third"
