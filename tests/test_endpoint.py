"""An endpoint's life: names, use before and after, fork, shutdown from anywhere, a held GIL, hooks."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorlink as tl
from tests.peer import DEADLINE_S, Peer, eventually, kept, nursery, say, spawn

__all__ = ["nursery", "spawn"]

MIB = 1 << 20
LEASE_S = 1.0
Join = Callable[..., Peer]


@pytest.fixture
def join(spawn: Callable[..., Peer]) -> Join:
    """Starts a child that joins under a name, in the run-time directory of the test."""

    def start(name: str, **environment: str) -> Peer:
        peer = spawn(**environment)
        peer.call(tl.init, name)
        return peer

    return start


# What the children do


def hold(ref: tl.TensorRef) -> None:
    kept["view"] = tl.get(ref)


def sum_of_held() -> float:
    return float(kept["view"].sum())


def fork_and_use() -> tuple[int, list[str]]:
    """Forks; what the child's calls raised, and the exit status of the child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(writing, " ".join(_try_everything()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        names = pipe.read().split()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), names


def _try_everything() -> list[str]:
    names = []
    ref = kept.get("ref")
    for call in (
        lambda: tl.send(1, "a"),
        lambda: tl.recv("a", timeout=None),
        lambda: tl.put(1),
        lambda: tl.get(ref),
        lambda: tl.irecv(),
        lambda: tl.empty(3, np.uint8),
        tl.peers,
        tl.stats,
        lambda: tl.init("child"),
    ):
        try:
            call()
            names.append("nothing")
        except tl.TensorLinkError as error:
            names.append(type(error).__name__)
    tl.shutdown()
    return names


def fork_and_exit(normally: bool) -> int:
    """Forks a child that has the endpoint and the views of this process, and ends."""
    pid = os.fork()
    if pid == 0:
        gc.collect()
        if normally:
            atexit._run_exitfuncs()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def put_and_keep(nbytes: int) -> tl.TensorRef:
    kept["ref"] = tl.put(np.ones(nbytes, np.uint8))
    ref: tl.TensorRef = kept["ref"]
    return ref


def hold_the_gil(seconds: float) -> None:
    say("holding")
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def get_often_until_told(ref: tl.TensorRef) -> tuple[float, int]:
    """The longest get, and how many there were, until a message comes."""
    longest, count = 0.0, 0
    tl.get(ref, timeout=DEADLINE_S)  # to connect, it takes the owner's help
    say("reading")
    while True:
        started = time.monotonic()
        view = tl.get(ref, timeout=DEADLINE_S)
        assert view[-1] == 1
        longest, count = max(longest, time.monotonic() - started), count + 1
        del view
        try:
            tl.recv(tag="stop", timeout=0)
        except tl.TransferTimeoutError:
            continue
        return longest, count


def shutdown_in_a_handler() -> None:
    def handler(*_: object) -> None:
        tl.shutdown()
        say("handled")

    signal.signal(signal.SIGTERM, handler)
    say("ready")
    try:
        tl.recv(tag="never", timeout=None)
    except tl.ClosedError:
        say("closed")


# Names and use


def test_a_live_name_is_in_use(join: Join) -> None:
    b = join("b")
    with pytest.raises(tl.NameInUseError, match="b"):
        tl.init("b")
    with tl.init("a") as a:
        with pytest.raises(tl.NameInUseError):
            tl.init("a")
        a.send(1, "b")
        assert b.call(tl.recv) == 1
        assert tl.current() is a


def test_a_name_is_free_again_after_shutdown_and_after_a_kill(join: Join) -> None:
    with tl.init("a") as a:
        for how in ("shutdown", "kill", "shutdown"):
            b = join("b")
            a.send(how, "b", timeout=DEADLINE_S)
            assert b.call(tl.recv) == how
            b.call(tl.shutdown) if how == "shutdown" else b.kill()


@pytest.mark.parametrize("name", ["", "x" * 300, "a\nb", "a\0b"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        tl.init(name)


def test_before_init_every_call_says_so_at_once() -> None:
    for call in (
        lambda: tl.send(1, "a"),
        lambda: tl.recv(timeout=None),
        lambda: tl.put(1),
        tl.peers,
        tl.current,
        tl.stats,
    ):
        with pytest.raises(tl.ClosedError, match="init"):
            call()
    tl.shutdown()


def test_after_shutdown_every_call_says_so_at_once() -> None:
    a = tl.init("a")
    ref = a.put(np.ones(MIB, np.uint8))
    a.shutdown()
    a.shutdown()
    assert a.closed
    for call in (
        lambda: a.send(1, "a"),
        lambda: a.recv(timeout=None),
        lambda: a.put(1),
        lambda: a.get(ref),
        lambda: a.irecv(),
        lambda: a.empty(1, np.uint8),
        lambda: a.release(ref),
        a.peers,
        a.stats,
        tl.peers,
    ):
        with pytest.raises(tl.ClosedError):
            call()


def test_several_endpoints_in_one_process() -> None:
    with tl.init("a") as a, tl.init("b") as b, tl.init() as nameless:
        assert tl.current() is a
        a.send(np.ones(MIB, np.uint8), "b")
        assert b.recv("a").sum() == MIB
        b.send("x", nameless.name)
        assert nameless.recv("b") == "x"
        with a.put(np.ones(MIB, np.uint8)) as ref:
            assert b.get(ref).sum() == MIB
            assert nameless.get(ref).sum() == MIB
        assert {peer.name for peer in a.peers()} == {"a", "b", nameless.name}


# Shutdown


def test_shutdown_ends_the_waits_of_other_threads() -> None:
    a = tl.init("a")
    ends: list[type[BaseException]] = []
    waits = threading.Barrier(5)

    def wait(call: Callable[[], Any]) -> None:
        waits.wait()
        try:
            call()
        except tl.TensorLinkError as error:
            ends.append(type(error))

    receiving = a.irecv(tag="never")
    calls = [
        lambda: a.recv(tag="never", timeout=None),
        lambda: a.send(1, "nobody", timeout=DEADLINE_S),
        receiving.wait,
        lambda: tl.wait([receiving], timeout=None),
    ]
    threads = [threading.Thread(target=wait, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    waits.wait()
    a.shutdown()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert ends[:3] == [tl.ClosedError] * 3


def test_both_ends_shut_down_at_the_same_moment() -> None:
    for _ in range(20):
        a, b = tl.init("a"), tl.init("b")
        a.send(np.ones(100_000), "b")
        view = b.recv()
        b.send(1, "a")
        together = threading.Barrier(4)

        def close(endpoint: tl.Endpoint, together: threading.Barrier = together) -> None:
            together.wait()
            endpoint.shutdown()

        threads = [threading.Thread(target=close, args=(endpoint,)) for endpoint in (a, b, a, b)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert view.sum() == 100_000


def test_shutdown_in_a_signal_handler(join: Join) -> None:
    with tl.init("a") as a:
        b = join("b")
        b.start(shutdown_in_a_handler)
        assert b.hear() == "ready"
        b.signal(signal.SIGTERM)
        assert b.hear() == "handled"
        assert b.hear() == "closed"
        b.finish()
        eventually(lambda: [peer.name for peer in a.peers()] == ["a"], "b is gone")
        assert b.exit() == 0


@pytest.mark.parametrize("end", ["nothing", "tl.shutdown()", "sys.exit(3)", "raise SystemExit(3)", "del endpoint"])
def test_a_program_ends_by_itself(end: str) -> None:
    program = f"""if True:
        import sys
        import numpy as np
        import tensorlink as tl
        endpoint = tl.init("program")
        view = endpoint.get(endpoint.put(np.ones(1 << 20, np.uint8)))
        pending = endpoint.irecv(tag="never")
        endpoint.on("peer_up", print)
        {"pass" if end == "nothing" else end}
    """
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=DEADLINE_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == (3 if "Exit" in end or "exit" in end else 0), done.stderr
    assert done.stderr == ""


def test_views_outlive_the_endpoints_of_both_sides() -> None:
    a, b = tl.init("a"), tl.init("b")
    view = b.get(a.put(np.ones(MIB, np.uint8)))
    a.shutdown()
    b.shutdown()
    del a, b
    gc.collect()
    assert view.sum() == MIB


# Fork


def test_a_forked_child_has_a_closed_endpoint_and_cannot_join(join: Join) -> None:
    with tl.init("a") as a:
        b = join("b")
        a.get(b.call(put_and_keep, MIB))
        b.call(hold, a.put(np.ones(MIB, np.uint8)))
        status, names = b.call(fork_and_use)
        assert names == ["ClosedError"] * 9
        assert status == 0
        a.send("go on", "b")
        assert b.call(tl.recv, "a") == "go on"
        assert b.call(sum_of_held) == MIB


@pytest.mark.parametrize("normally", [True, False])
def test_the_end_of_a_forked_child_harms_nothing(join: Join, normally: bool) -> None:
    with tl.init("a") as a:
        b = join("b")
        theirs = b.call(put_and_keep, MIB)
        with a.put(np.full(MIB, 3, np.uint8)) as ref:
            b.call(hold, ref)
        assert b.call(fork_and_exit, normally) == 0
        for fill in range(100, 110):
            a.put(np.full(MIB, fill, np.uint8)).release()
        assert b.call(sum_of_held) == 3 * MIB
        assert a.get(theirs).sum() == MIB
        a.send("go on", "b")
        assert b.call(tl.recv, "a") == "go on"
        assert "b" in [peer.name for peer in a.peers()]


# A held GIL


def test_a_held_gil_costs_no_lease_and_delays_no_connected_reader(join: Join) -> None:
    owner = join("owner", TENSORLINK_LEASE_S=str(LEASE_S))  # the first: it also starts the coordinator
    with tl.init("watcher", lease_s=LEASE_S) as watcher:
        reader = join("reader", TENSORLINK_LEASE_S=str(LEASE_S))
        downs: list[str] = []
        watcher.on("peer_down", lambda peer, _: downs.append(peer.name))
        watcher.on("peer_restart", lambda peer: downs.append(peer.name))
        reader.start(get_often_until_told, owner.call(put_and_keep, 8 * MIB))
        assert reader.hear() == "reading"
        owner.start(hold_the_gil, 2 * LEASE_S)
        assert owner.hear() == "holding"
        owner.finish()
        watcher.send(1, "reader", tag="stop")
        longest, count = reader.finish()
        assert count > 10
        assert longest < 1.5 * LEASE_S  # it waited for no GIL, which was held for two
        owner.call(tl.send, "alive", "watcher")
        assert watcher.recv("owner") == "alive"
        assert downs == []


# Hooks


def test_hooks_fire_once_each_in_order(join: Join) -> None:
    seen: list[tuple[str, str]] = []
    changed = threading.Condition()

    def note(kind: str) -> Callable[..., None]:
        def callback(peer: tl.PeerInfo, *_: object) -> None:
            with changed:
                seen.append((kind, peer.name))
                changed.notify_all()
            raise RuntimeError("a hook that fails harms nothing")

        return callback

    def expect(*events: tuple[str, str]) -> None:
        with changed:
            assert changed.wait_for(lambda: seen[-len(events) :] == list(events), 10), seen

    with tl.init("a") as a:
        for kind in ("peer_up", "peer_down", "peer_restart"):
            a.on(kind, note(kind))
        first = join("b")
        expect(("peer_up", "b"))
        first.kill()
        expect(("peer_up", "b"), ("peer_down", "b"))
        second = join("b")
        expect(("peer_up", "b"), ("peer_down", "b"), ("peer_restart", "b"))
        second.call(tl.shutdown)
        expect(("peer_up", "b"), ("peer_down", "b"), ("peer_restart", "b"), ("peer_down", "b"))


def test_a_failed_transfer_is_told_to_its_hook_and_an_unsubscribed_one_hears_nothing() -> None:
    with tl.init("a") as a:
        heard: list[tl.TensorLinkError] = []
        came = threading.Event()
        never: list[object] = []
        a.on("transfer_failed", never.append)()
        a.on("transfer_failed", lambda error: (heard.append(error), came.set()))
        with pytest.raises(tl.PeerUnknownError) as raised:
            a.send(1, "nobody", timeout=0.05)
        assert came.wait(10)
        assert heard == [raised.value]
        assert never == []
        with pytest.raises(ValueError, match="peer_up"):
            a.on("no_such_event", print)


def test_shutdown_in_a_hook(join: Join) -> None:
    a = tl.init("a")
    done = threading.Event()
    a.on("peer_up", lambda _: (a.shutdown(), done.set()))
    join("b")
    assert done.wait(10)
    assert a.closed


def test_the_level_of_the_log_may_be_written_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLINK_LOG", "error")
    logger = logging.getLogger("tensorlink")
    level = logger.level
    with tl.init("a"):
        assert logger.level == logging.ERROR
    logger.setLevel(level)
