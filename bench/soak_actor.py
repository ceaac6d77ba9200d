"""One actor of the soak: does random things with the others and checks all that comes back.

Every array says what it is: `content(seed, nbytes)` can be made again by whoever knows the seed, which travels beside it. So the
model of what is right needs no memory that two processes share. An actor writes one JSON object a line to its output.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import tensorlink as tl

KIB, MIB = 1 << 10, 1 << 20
TIMEOUT_S = 5.0
GRACE_S = 3.0
"""Beyond a call's timeout: the fence, and a machine with more processes than processors."""
SIZES = (8, 3 * KIB, 40 * KIB, 700 * KIB, 3 * MIB)
KEPT_OUTS = 8
TENSORS = 40
WEIGHTS = "soak"

Array = np.ndarray[Any, Any]


class Wrong(Exception):
    """Something that must never be: the soak has found a bug."""


def content(seed: int, nbytes: int) -> Array:
    return _base(nbytes) + np.uint8(seed % 256)


@functools.lru_cache(maxsize=8)
def _base(nbytes: int) -> Array:
    return (np.arange(nbytes, dtype=np.uint32) * 2654435761).astype(np.uint8)


def check(array: Array, seed: int, nbytes: int, what: str) -> None:
    if array.nbytes != nbytes or not np.array_equal(array, content(seed, nbytes)):
        raise Wrong(f"{what}: wrong bytes (seed {seed}, {nbytes} bytes)")


@dataclass
class Life:
    """What one sender's process has sent so far, as its receiver has seen it."""

    last: int = 0
    failed: int = 0
    pauses: int = 0


@dataclass
class Actor:
    link: tl.Endpoint
    others: list[str]
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    lives: dict[tuple[str, int], Life] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    outs: list[tuple[Array, Array]] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    # What is sent

    def send(self, other: str, obj: Any, how: Callable[..., Any]) -> None:
        """A numbered message. One that fails may have arrived, or not: the next ones say how many did."""
        self.sent[other] += 1
        head = {"life": LIFE, "number": self.sent[other], "failed": self.failed[other], "pauses": len(_pauses)}
        try:
            how(head | obj, other, tag="soak", timeout=TIMEOUT_S)
        except BaseException:
            self.failed[other] += 1
            raise

    def array(self) -> dict[str, Any]:
        seed, nbytes = self.rng.randrange(1 << 30), self.rng.choice(SIZES)
        return {"seed": seed, "nbytes": nbytes, "array": content(seed, nbytes)}

    def op_send(self, other: str) -> None:
        self.send(other, self.array(), self.link.send)

    def op_tree(self, other: str) -> None:
        seed = self.rng.randrange(1 << 30)
        tree = {f"layers.{i}": content(seed + i, 4 * KIB) for i in range(TENSORS)}
        self.send(other, {"seed": seed, "nbytes": 4 * KIB, "tree": tree}, self.link.send)

    def op_isend(self, other: str) -> None:
        """Sent in the background; the array is the caller's again when it is done."""

        def how(obj: Any, to: str, **named: Any) -> None:
            self.link.isend(obj, to, **named).wait(TIMEOUT_S)
            obj["array"][...] = 0

        self.send(other, self.array(), how)

    def op_ref(self, other: str) -> None:
        """A handle that ends after one read, or soon."""
        told = self.array()
        ref = self.link.put(told.pop("array"), reads=1, ttl=3 * TIMEOUT_S, checksum=self.rng.random() < 0.3)
        self.send(other, told | {"ref": ref}, self.link.send)

    OPS = (op_send, op_send, op_tree, op_isend, op_ref)

    # What is received

    def received(self, message: dict[str, Any]) -> None:
        self.in_order(message)
        seed, nbytes = message["seed"], message["nbytes"]
        if "array" in message:
            check(message["array"], seed, nbytes, "a message")
        for i, array in enumerate(message.get("tree", {}).values()):
            check(array, seed + i, nbytes, f"tensor {i} of a tree")
        if "ref" in message:
            self.read(message["ref"], seed, nbytes)

    def in_order(self, message: dict[str, Any]) -> None:
        """No message comes twice or overtakes. One may be lost only with a process, or with the lease of one that was stopped."""
        name, since = message["life"]
        life = self.lives.setdefault((name, since), Life())
        number, failed, pauses = message["number"], message["failed"], message["pauses"] + len(_pauses)
        if number <= life.last:
            raise Wrong(f"message {number} of {name} came after {life.last}")
        excused = pauses > life.pauses or (life.last == 0 and since < LIFE[1])  # it knew one before us
        if number - life.last - 1 > failed - life.failed + self.unread[name] and not excused:
            raise Wrong(f"messages between {life.last} and {number} of {name} are lost; {failed} had failed")
        life.last, life.failed, life.pauses, self.unread[name] = number, failed, pauses, 0

    def receive(self) -> None:
        try:
            message = self.link.recv(tag="soak", timeout=TIMEOUT_S)
        except (tl.PeerLostError, tl.StaleRefError) as error:  # it came, and what it offered went with its owner
            self.unread[str(error.peer).partition("#")[0]] += 1
            raise
        self.received(message)

    def read(self, ref: tl.TensorRef, seed: int, nbytes: int) -> None:
        way = self.rng.choice(("view", "out", "cancel"))
        if way == "view":
            check(self.link.get(ref, timeout=TIMEOUT_S), seed, nbytes, "a view")
            return
        out = np.zeros(nbytes, np.uint8)
        transfer = self.link.iget(ref, out=out, timeout=TIMEOUT_S)
        try:
            if way == "cancel" and transfer.cancel():
                raise tl.TransferCancelledError("as was wanted")
            transfer.wait(TIMEOUT_S + GRACE_S)
        except tl.TensorLinkError:
            self.outs = [*self.outs[-KEPT_OUTS:], (out, out.copy())]  # nobody may write it any more
            raise
        check(out, seed, nbytes, "what was read into out")

    # Both for ever

    def guarded(self, name: str, act: Callable[[], Any]) -> None:
        """One operation: it ends in time, rightly or with a typed error."""
        began = time.monotonic()
        try:
            act()
            self.counts[name] += 1
        except tl.TensorLinkError as error:
            if isinstance(error, tl.CorruptTransferError | tl.LayoutMismatchError):
                raise Wrong(f"{name}: {error!r}") from error
            self.counts[type(error).__name__] += 1
        took = time.monotonic() - began
        if took > TIMEOUT_S + GRACE_S and not paused(began):
            raise Wrong(f"{name} took {took:.1f} s")
        for out, seen in self.outs:
            if not np.array_equal(out, seen):
                raise Wrong(f"{name}: memory was written after its transfer had failed")

    def send_for_ever(self) -> None:
        while not self.stopping.is_set():
            op, other = self.rng.choice(self.OPS), self.rng.choice(self.others)
            self.guarded(op.__name__[3:], partial(op, self, other))

    def receive_for_ever(self) -> None:
        while not self.stopping.is_set():
            self.guarded("recv", self.receive)

    def stop_with_the_input(self) -> None:
        sys.stdin.read()
        self.stopping.set()

    def publish_for_ever(self) -> None:
        state = {f"layers.{i}": np.zeros(64 * KIB, np.float32) for i in range(8)}
        with tl.WeightPublisher(WEIGHTS, state, endpoint=self.link) as publisher:
            for number in range(1, 1 << 60):
                for array in state.values():
                    array.fill(number)
                self.guarded("publish", publisher.publish)
                if self.stopping.wait(0.2):
                    return

    def pull_for_ever(self) -> None:
        state = {f"layers.{i}": np.zeros(64 * KIB, np.float32) for i in range(8)}
        with tl.WeightSubscriber(WEIGHTS, state, endpoint=self.link) as subscriber:
            while not self.stopping.wait(0.1):
                self.guarded("pull", lambda: subscriber.pull(timeout=TIMEOUT_S))
                seen = {float(value) for array in state.values() for value in (array.min(), array.max())}
                if len(seen) != 1:
                    raise Wrong(f"weights of several versions: {seen}")


LIFE = (os.environ.get("SOAK_NAME", ""), time.time_ns())
_beats = [time.monotonic()]
_pauses: list[float] = []


def watch_the_clock() -> None:
    """Notes when this process was stopped from outside: then nobody can keep a deadline."""
    while True:
        time.sleep(0.1)
        now = time.monotonic()
        if now - _beats[0] > 1.0:
            _pauses.append(now)
        _beats[0] = now


def paused(since: float) -> bool:
    return any(when >= since for when in _pauses)


def usage() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"fds": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(), "mib": pages * 4 // 1024}


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main(name: str, others: list[str], publishes: bool, seed: int) -> None:
    threading.Thread(target=watch_the_clock, daemon=True).start()
    with tl.init(name) as link:
        actor = Actor(link, others, random.Random(seed))
        roles = [actor.send_for_ever, actor.receive_for_ever]
        roles.append(actor.publish_for_ever if publishes else actor.pull_for_ever)

        def play(role: Callable[[], None]) -> None:
            try:
                role()
            except tl.ClosedError:
                pass
            except BaseException as error:
                say(wrong=f"{name}: {type(error).__name__}: {error}")

        threads = [threading.Thread(target=play, args=(role,)) for role in roles]
        for thread in threads:
            thread.start()
        threading.Thread(target=actor.stop_with_the_input, daemon=True).start()
        while not actor.stopping.wait(1.0):
            say(counts=actor.counts, usage=usage())
        for thread in threads:
            thread.join(TIMEOUT_S + GRACE_S)
            if thread.is_alive():
                say(wrong=f"{name}: a thread hangs")
        say(counts=actor.counts, usage=usage())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","), sys.argv[3] == "publishes", int(sys.argv[4]))
