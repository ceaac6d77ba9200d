"""Processes that are killed at named points of their code (csrc/point.h): the other side goes on, and nothing of theirs stays."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

import tensorlink as tl
from tensorlink import _core
from tests.peer import DEADLINE_S, Peer, eventually, kept, nursery, spawn

__all__ = ["nursery", "spawn"]

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("nursery")]  # that is from before this module

MIB = 1 << 20
TOKEN = "a secret of the tests"


@pytest.mark.parametrize("plan", ["message.sent", "message.sent:burn", ":kill", "message.sent:kill@0", "a:kill,b"])
def test_what_is_no_plan_is_told(plan: str) -> None:
    with pytest.raises(ValueError, match="NAME:kill@N"):
        _core.arm_points(plan)


# What the victim does


def arm(plan: str) -> None:
    _core.arm_points(plan)


def send(nbytes: int) -> None:
    for _ in range(3):
        tl.send(np.ones(nbytes, np.uint8), "a")


def read(ref: tl.TensorRef) -> None:
    tl.get(ref, out=np.zeros(ref.nbytes, np.uint8))


def own(nbytes: int) -> tl.TensorRef:
    kept["own"] = tl.put(np.ones(nbytes, np.uint8))
    return kept["own"]


def publish() -> None:
    if "publisher" not in kept:
        kept["publisher"] = tl.WeightPublisher("policy", {"w": np.ones(MIB, np.uint8)})
    kept["publisher"].publish()


def drain() -> None:
    tl.current().drain()


@dataclass
class Stage:
    a: tl.Endpoint
    b: Peer
    refs: list[tl.TensorRef] = field(default_factory=list)

    def lends(self, nbytes: int) -> tl.TensorRef:
        self.refs.append(self.a.put(np.ones(nbytes, np.uint8), reads=2))
        return self.refs[-1]

    def reads(self, nbytes: int) -> None:
        ref = self.b.call(own, nbytes)
        self.arm("served.part:kill@2")
        with pytest.raises(tl.PeerLostError):
            self.a.get(ref, out=np.zeros(nbytes, np.uint8), timeout=DEADLINE_S)

    def sends(self) -> None:
        self.b.start(tl.recv, "a")
        self.a.send(np.ones(10, np.uint8), "b", timeout=DEADLINE_S)

    def arm(self, plan: str) -> None:
        self.b.call(arm, plan)


DEATHS: dict[str, Callable[[Stage], None]] = {
    "claim.stored:kill": lambda s: s.b.start(send, MIB),
    "message.sent:kill": lambda s: s.b.start(send, 10),
    "message.sent:kill@3": lambda s: s.b.start(send, MIB),
    "message.taken:kill": lambda s: s.sends(),
    "read.acknowledge:kill": lambda s: s.b.start(read, s.lends(MIB)),
    "version.stored:kill@2": lambda s: [s.b.call(publish), s.b.start(publish)],
    "handshake.greeted:kill": lambda s: s.b.start(read, s.lends(10)),
    "handshake.heard:kill": lambda s: s.a.isend(1, "b"),
    "drain.work:kill": lambda s: s.b.start(drain),
}
OF_SHM = {"hold.taken:kill": lambda s: s.b.start(read, s.lends(MIB))}
OF_TCP = {
    "read.part:kill@2": lambda s: s.b.start(read, s.lends(16 * MIB)),
    "read.bytes:kill": lambda s: s.b.start(read, s.lends(MIB)),
    "served.part": lambda s: s.reads(16 * MIB),
}
CASES = [("shm", point) for point in (*DEATHS, *OF_SHM)] + [("tcp", point) for point in (*DEATHS, *OF_TCP)]


@pytest.mark.parametrize(("transport", "point"), CASES)
def test_killed_at(spawn: Callable[..., Peer], transport: str, point: str) -> None:
    victim = spawn(TENSORLINK_TRANSPORTS=transport, TENSORLINK_TOKEN=TOKEN)
    victim.call(tl.init, "b")
    with tl.init("a", transports=transport, token=TOKEN) as a:
        killed_at(Stage(a, victim), point)


def killed_at(stage: Stage, point: str) -> None:
    a = stage.a
    if ":" in point:
        stage.arm(point)
    (DEATHS | OF_SHM | OF_TCP)[point](stage)
    assert stage.b.wait() == -signal.SIGKILL
    with pytest.raises(tl.PeerLostError):
        a.recv("b", tag="never", timeout=DEADLINE_S)
    for ref in stage.refs:
        ref.release()
    while True:  # what it had sent completely is delivered
        try:
            assert a.recv(timeout=0).all()
        except tl.TransferTimeoutError:
            break
        except tl.PeerLostError:
            continue
    gc.collect()
    eventually(lambda: a.stats()["pool"]["used_bytes"] == 0, "nothing is kept for the dead")


def test_killed_while_it_joins(spawn: Callable[..., Peer]) -> None:
    """Before its first heartbeat it is its lease that ends."""
    with tl.init("a", lease_s=0.5) as a:
        for point in ("join.coordinator", "join.answered"):
            victim = spawn(TENSORLINK_TEST_POINT=f"{point}:kill")
            victim.start(tl.init, "b")
            assert victim.wait() == -signal.SIGKILL
        survivor = spawn()
        survivor.call(tl.init, "b")
        a.send("hello", "b", timeout=DEADLINE_S)
        assert survivor.call(tl.recv, "a") == "hello"
        survivor.call(tl.shutdown)


def test_stopped_at_a_point(spawn: Callable[..., Peer]) -> None:
    """It goes on where it stood."""
    victim = spawn()
    victim.call(tl.init, "b")
    with tl.init("a") as a:
        victim.call(arm, "message.sent:stop@2")
        victim.start(send, 10)
        stat = f"/proc/{victim.pid}/stat"

        def stopped() -> bool:
            with open(stat) as file:
                return ") T " in file.read()

        eventually(stopped, "it stands still")
        taken = [a.recv("b", timeout=DEADLINE_S) for _ in range(2)]
        threading.Timer(0.0, victim.signal, (signal.SIGCONT,)).start()
        taken.append(a.recv("b", timeout=DEADLINE_S))
        assert all((array == 1).all() for array in taken)
        victim.finish()
        victim.call(tl.shutdown)
