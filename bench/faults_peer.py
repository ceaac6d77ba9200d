"""What the peers of bench/faults.py do: one asks, the other answers, and both check all that they get.

Every array can be made again by whoever knows its seed, so the model of what is right needs no memory that both share. All
functions are called in a child of `tests.peer`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import tensorlink as tl
from bench.soak_actor import Array, Wrong, check, content
from tensorlink import _core
from tensorlink.testing.faults import Dice, FaultyDeliveries, FaultyTransport, Plan
from tensorlink.transports.tcp import TcpAddress

KIB, MIB = 1 << 10, 1 << 20
GRACE_S = 3.0
"""Beyond a deadline: a second by the contract, and what a machine with more processes than processors needs."""
SIZES = (8, 3 * KIB, 40 * KIB, 700 * KIB, 3 * MIB)
TENSORS = 40
WEIGHTS = "hurt"
KEPT_OUTS = 8
FENCED = 9


@dataclass
class Heard:
    """What has come of one life of the other one."""

    last: int = 0
    failed: int = 0
    excuses: int = -1


@dataclass
class Talk:
    """The numbers of messages, both ways: none comes twice or overtakes, and one is lost only where somebody was told so."""

    sent: int = 0
    failed: int = 0
    excuses: int = 0
    """Times that this process lost the other one, or its own lease: what was under way then may be gone."""
    heard: dict[tuple[int, int], Heard] = field(default_factory=dict)

    def head(self) -> dict[str, Any]:
        self.sent += 1
        return {"life": LIFE[0], "number": self.sent, "failed": self.failed, "excuses": self.excuses}

    def check(self, head: dict[str, Any]) -> None:
        heard = self.heard.setdefault(head["life"], Heard())
        number, failed = head["number"], head["failed"]
        if number <= heard.last:
            raise Wrong(f"message {number} came after {heard.last}")
        if number - heard.last - 1 > failed - heard.failed and not self.excused(head, heard.excuses):
            raise Wrong(f"messages between {heard.last} and {number} are lost: {failed - heard.failed} had failed")
        heard.last, heard.failed, heard.excuses = number, failed, head["excuses"] + self.excuses

    def excused(self, head: dict[str, Any], before: int) -> bool:
        """Whether one of both lost the other one meanwhile; the thread that is told of it may be a moment late."""
        deadline = time.monotonic() + 1.0
        while head["excuses"] + self.excuses == before:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


class Lapses(logging.Handler):
    """Notes that this process lost its lease, which is told by the log alone."""

    def emit(self, record: logging.LogRecord) -> None:
        if "joined again" in record.getMessage():
            peer().talk.excuses += 1


@dataclass
class Peer:
    link: tl.Endpoint
    other: str
    rng: random.Random
    transports: list[FaultyTransport]
    deliveries: FaultyDeliveries
    talk: Talk = field(default_factory=Talk)
    refs: list[tuple[tl.TensorRef, int, int]] = field(default_factory=list)
    """Of the other one: handle, seed and bytes."""
    outs: deque[Array] = field(default_factory=lambda: deque(maxlen=KEPT_OUTS))
    """Buffers of transfers that have failed: nobody may write them."""
    wrong: list[str] = field(default_factory=list)
    into: dict[str, Array] = field(default_factory=dict)
    subscriber: tl.WeightSubscriber | None = None
    publisher: tl.WeightPublisher | None = None
    server: threading.Thread | None = None

    # Both

    def send(self, message: dict[str, Any], tag: str, timeout: float) -> int:
        head = self.talk.head()
        try:
            self.link.send(head | message, self.other, tag=tag, timeout=timeout)
        except BaseException:
            self.talk.failed += 1
            raise
        return int(head["number"])

    def recv(self, tag: str, timeout: float) -> dict[str, Any]:
        try:
            message: dict[str, Any] = self.link.recv(tag=tag, timeout=timeout)
        except (tl.PeerLostError, tl.StaleRefError, tl.CorruptTransferError):  # one came, and was lost
            self.talk.excuses += 1
            raise
        self.talk.check(message)
        return message

    def something(self) -> dict[str, Any]:
        seed, nbytes = self.rng.randrange(1 << 30), self.rng.choice(SIZES)
        if self.rng.random() < 0.2:
            tree = {f"layers.{i}": content(seed + i, 4 * KIB) for i in range(TENSORS)}
            return {"seed": seed, "nbytes": 4 * KIB, "tree": tree}
        return {"seed": seed, "nbytes": nbytes, "array": content(seed, nbytes)}

    def checked(self, message: dict[str, Any]) -> None:
        seed, nbytes = message.get("seed", 0), message.get("nbytes", 0)
        if "array" in message:
            check(message["array"], seed, nbytes, "a message")
        for i, array in enumerate(message.get("tree", {}).values()):
            check(array, seed + i, nbytes, f"tensor {i} of a tree")

    # Who answers

    def serve(self) -> None:
        while True:
            try:
                self.answer(self.recv("ask", 1.0))
            except tl.ClosedError:
                return
            except tl.TensorLinkError:
                continue
            except BaseException as error:
                self.wrong.append("".join(traceback.format_exception(error)))
                return

    def answer(self, ask: dict[str, Any]) -> None:
        self.checked(ask)
        told: dict[str, Any] = {"to": ask["number"]}
        if ask["how"] == "read":
            out = np.zeros(ask["nbytes"], np.uint8)
            self.unwritten()
            try:
                self.link.get(ask["ref"], out=out, timeout=ask["timeout"])
            except BaseException:
                self.fence(out)
                raise
            check(out, ask["seed"], ask["nbytes"], "what was lent")
        elif ask["how"] == "publish":
            told["version"] = self.publish()
        else:
            told |= self.something()
        self.send(told, "answer", ask["timeout"])

    def publish(self) -> int:
        if self.publisher is None:
            self.into = {f"layers.{i}": np.zeros(64 * KIB, np.float32) for i in range(8)}
            self.publisher = tl.WeightPublisher(WEIGHTS, self.into, endpoint=self.link)
        version = (self.publisher.version or 0) + 1
        for array in self.into.values():
            array.fill(version)
        return self.publisher.publish(version)

    # Who asks: each ends rightly, or with a typed error

    def ask(self, timeout: float, **what: Any) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        number = self.send(what | {"timeout": timeout}, "ask", timeout)
        while True:
            answer = self.recv("answer", max(deadline - time.monotonic(), 0.0))
            if answer["to"] == number:  # else it answers one that was given up
                self.checked(answer)
                return answer

    def op_echo(self, timeout: float) -> None:
        self.ask(timeout, how="echo", **self.something())

    def op_lend(self, timeout: float) -> None:
        """The other one reads from here."""
        seed, nbytes = self.rng.randrange(1 << 30), self.rng.choice(SIZES)
        with self.link.put(content(seed, nbytes), reads=self.rng.choice((None, 1))) as ref:
            self.ask(timeout, how="read", ref=ref, seed=seed, nbytes=nbytes)

    def op_get(self, timeout: float) -> None:
        ref, seed, nbytes = self.rng.choice(self.refs)
        if self.rng.random() < 0.3:
            check(self.link.get(ref, timeout=timeout), seed, nbytes, "a view")
            return
        out = np.zeros(nbytes, np.uint8)
        try:
            self.link.get(ref, out=out, timeout=timeout)
        except BaseException:
            self.fence(out)
            raise
        check(out, seed, nbytes, "what was read")

    def op_cancel(self, timeout: float) -> None:
        ref, seed, nbytes = self.rng.choice(self.refs)
        out = np.zeros(nbytes, np.uint8)
        transfer = self.link.iget(ref, out=out, timeout=5.0)  # longer than the cancel may take
        pause = threading.Event()
        pause.wait(self.rng.uniform(0, 0.02))
        began = time.monotonic()
        transfer.cancel()
        if (took := time.monotonic() - began) > GRACE_S:
            raise Wrong(f"a cancel took {took:.1f} s")
        try:
            transfer.wait(0)
        except BaseException:
            self.fence(out)
            raise
        check(out, seed, nbytes, "what was read before the cancel")

    def op_weights(self, timeout: float) -> None:
        if self.subscriber is None:
            self.into = {f"layers.{i}": np.zeros(64 * KIB, np.float32) for i in range(8)}
            self.subscriber = tl.WeightSubscriber(WEIGHTS, self.into, endpoint=self.link)
        before = float(self.into["layers.0"][0])
        deadline = time.monotonic() + timeout
        try:
            self.ask(timeout, how="publish")
            want = float(self.subscriber.pull(timeout=max(deadline - time.monotonic(), 0.0)))
        except BaseException:
            want = before
            raise
        finally:
            seen = {float(value) for array in self.into.values() for value in (array.min(), array.max())}
            if seen != {want}:
                raise Wrong(f"weights are {seen}, not {want}")

    def fence(self, out: Array) -> None:
        out.fill(FENCED)
        self.outs.append(out)

    def unwritten(self) -> None:
        if not all((out == FENCED).all() for out in self.outs):
            raise Wrong("memory was written after its transfer had failed")


OPS = ("echo", "echo", "lend", "get", "get", "cancel", "weights")
LIFE: list[tuple[int, int]] = [(0, 0)]
_peer: list[Peer] = []


def peer() -> Peer:
    return _peer[0]


def join(name: str, other: str, seed: int) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    LIFE[0] = (os.getpid(), time.time_ns())
    link = tl.init(name)
    made = Peer(link, other, random.Random(seed), FaultyTransport.into(link, Plan()), FaultyDeliveries(link, Plan()))
    _peer[:] = [made]
    logger = logging.getLogger("tensorlink")
    logger.handlers[:] = [Lapses()]
    logger.propagate = False

    def lost(peer: tl.PeerInfo, reason: str) -> None:
        made.talk.excuses += peer.name == other

    link.on("peer_down", lost)


def serve() -> list[tuple[tl.TensorRef, int, int]]:
    """From now on it answers; what others may read of it."""
    made = peer()
    made.server = threading.Thread(target=made.serve, name="serve", daemon=True)
    made.server.start()
    told = [(made.rng.randrange(1 << 30), nbytes) for nbytes in SIZES]
    made.refs = [(made.link.put(content(seed, nbytes)), seed, nbytes) for seed, nbytes in told]
    return made.refs


def know(refs: list[tuple[tl.TensorRef, int, int]]) -> None:
    peer().refs = refs


def listens_at() -> int:
    return TcpAddress.decode(tl.current()._links.transports["tcp"].address()).port


def advertise(port: int) -> None:
    transport = tl.current()._links.transports["tcp"]
    old = TcpAddress.decode(transport.address())
    told = TcpAddress(old.host, port, old.key).encode()
    transport.address = lambda: told  # type: ignore[method-assign]


def hurt(plan: Plan) -> None:
    for transport in peer().transports:
        transport.dice = Dice(plan)
    peer().deliveries.dice = Dice(plan)


def act(op: str, timeout: float) -> tuple[str, float]:
    """`right`, or the error's name; and the seconds it took."""
    made = peer()
    began = time.monotonic()
    try:
        getattr(made, f"op_{op}")(timeout)
        outcome = "right"
    except tl.TensorLinkError as error:
        outcome = type(error).__name__
    took = time.monotonic() - began
    made.unwritten()
    return outcome, took


def works(seconds: float) -> str:
    """Empty once an echo came back without a fault; else why not."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            peer().op_echo(2.0)
            return ""
        except tl.TensorLinkError as error:
            if time.monotonic() > deadline:
                return repr(error)
            time.sleep(0.01)


def where() -> str:
    """What each thread of this process is at, and what it knows of its peers."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame)[-6:])}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join([*stacks, repr(peer().link.stats()), repr(peer().link.peers())])


def found_wrong() -> list[str]:
    return peer().wrong


def usage() -> dict[str, int]:
    gc.collect()
    stats = peer().link.stats()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "native": len(os.listdir("/proc/self/task")),
        "mib": pages * 4 // 1024,
        "pool_kib": stats["pool"]["used_bytes"] // KIB,
        "queued": stats["queued"],
    }


def leave(how: str) -> None:
    """Leaves, and joins no more."""
    made = peer()
    if how == "drain":
        with contextlib.suppress(tl.TensorLinkError):
            made.link.drain(timeout=0.5)
    made.link.shutdown()
    if made.server is not None:
        made.server.join(10)
        if made.server.is_alive():
            raise Wrong("the answering thread hangs after shutdown")


def arm(plan: str) -> None:
    _core.arm_points(plan)
