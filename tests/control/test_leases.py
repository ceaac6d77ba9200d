"""Heartbeats and leases, with real processes that are stopped and killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tensorlink.control import ControlClient
from tensorlink.settings import Settings
from tests.control.control_member import connect
from tests.control.control_processes import Member, coordinator_pids, environment, eventually

Start = Callable[..., Member]
SHORT = {"TENSORLINK_LEASE_S": "1"}


def test_name_in_use_and_superseding(member: Start) -> None:
    first = member("a")
    incarnation = first.joined()
    began = time.monotonic()
    line = member("a").wait(error=...)
    assert line["error"] == "NameInUseError" and str(first.pid) in line["message"]
    assert time.monotonic() - began < 4
    watcher = member("w")
    watcher.joined()
    first.kill()
    began = time.monotonic()
    assert member("a").joined() > incarnation
    assert time.monotonic() - began < 4, "superseded at once, before the lease of 5 s"
    assert watcher.wait(event="restart", name="a")["incarnation"] > incarnation


def test_death_is_seen_at_once_even_if_a_forked_child_keeps_the_stream(member: Start) -> None:
    watcher, a = member("w"), member("a")
    watcher.joined()
    a.joined()
    watcher.wait(event="up", name="a")
    began = time.monotonic()
    a.kill()
    watcher.wait(event="down", name="a")
    assert time.monotonic() - began < 3
    script = FORKING.format(folder=str(Path(__file__).parent))
    child = subprocess.Popen([sys.executable, "-c", script], env=environment(), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    watcher.wait(event="up", name="f")
    began = time.monotonic()
    child.kill()
    child.wait()
    assert watcher.wait(event="down", name="f")["reason"] == "its process died"
    assert time.monotonic() - began < 3
    os.kill(grandchild, signal.SIGKILL)
    child.stdout.close()


FORKING = """
import os, signal, sys
sys.path.insert(0, {folder!r})
from control_member import connect
from tensorlink.control import ControlClient
from tensorlink.settings import Settings
client = ControlClient(Settings.load(), name="f", address="unix:/nowhere")
membership = client.join(30)
stream = connect(membership.heartbeat_address)
stream.sendall(membership.lease_key)
assert stream.recv(1) == bytes(1)
child = os.fork()
if child:
    print(child, flush=True)
signal.pause()
"""


def test_a_stopped_peer_is_down_after_its_lease_and_back_when_it_wakes(member: Start) -> None:
    watcher, a = member("w", **SHORT), member("a", **SHORT)
    watcher.joined()
    incarnation = a.joined()
    watcher.wait(event="up", name="a")
    a.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert "heartbeat" in watcher.wait(event="down", name="a")["reason"]
    assert 0.5 < time.monotonic() - began < 3
    a.process.send_signal(signal.SIGCONT)
    assert watcher.wait(event="up", name="a")["incarnation"] == incarnation
    assert a.wait(rejoined=...)["rejoined"] == incarnation


def test_a_stopped_holder_is_superseded_after_its_lease_and_learns_it(member: Start) -> None:
    a = member("a", **SHORT)
    incarnation = a.joined()
    a.process.send_signal(signal.SIGSTOP)
    assert member("a", **SHORT).joined() > incarnation
    a.process.send_signal(signal.SIGCONT)
    a.wait(failed="NameInUseError")


def test_a_stopped_coordinator_declares_nobody_down(member: Start, run_dir: Path) -> None:
    watcher, a = member("w", **SHORT), member("a", **SHORT)
    incarnation = a.joined()
    watcher.joined()
    eventually(lambda: watcher.call("peers") == ["a", "w"], "both are seen")
    (pid,) = coordinator_pids(run_dir)
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    eventually(lambda: time.monotonic() - stopped > 2.5, "two leases and a half passed")
    os.kill(pid, signal.SIGCONT)
    assert watcher.call("resolve", "a", 10)["incarnation"] == incarnation
    woken = time.monotonic()
    eventually(lambda: time.monotonic() - woken > 1.5, "a lease and a half passed")
    assert watcher.call("peers") == ["a", "w"]
    assert coordinator_pids(run_dir) == [pid]
    assert not [line for line in watcher.lines() + a.lines() if line.get("event") in ("down", "restart")]


def test_junk_on_the_heartbeat_socket_closes_it(member: Start, run_dir: Path) -> None:
    a = member("a")
    a.joined()
    address = f"unix:{run_dir / 'c-default.hb'}"
    for seed in range(20):
        noise = random.Random(seed).randbytes(random.Random(seed).choice([1, 15, 17, 200, 100_000]))
        with connect(address, timeout=20) as stream, contextlib.suppress(ConnectionError):
            stream.sendall(noise)
            stream.shutdown(1)
            while answer := stream.recv(4096):
                assert set(answer) == {1}
    with connect(address, timeout=20) as idle, contextlib.suppress(ConnectionError):
        assert idle.recv(1) == b"", "an idle stream is closed after a lease"
    assert a.call("resolve", "a", 5)["name"] == "a"


def test_a_lost_key_is_answered_with_join_again(run_dir: Path) -> None:
    client = ControlClient(Settings.load(), name="a", address="unix:/nowhere")
    membership = client.join(30)
    with connect(membership.heartbeat_address) as stream:
        stream.sendall(membership.lease_key)
        assert stream.recv(1) == b"\0"
        client.leave()
        stream.sendall(membership.lease_key)
        assert stream.recv(1) == b"\1"
    client.close()


def test_a_stream_that_was_replaced_may_close(run_dir: Path) -> None:
    client = ControlClient(Settings.load(), name="a", address="unix:/nowhere")
    membership = client.join(30)
    old, new = connect(membership.heartbeat_address), connect(membership.heartbeat_address)
    with new:
        with old:
            for stream in (old, new):
                stream.sendall(membership.lease_key)
                assert stream.recv(1) == b"\0"
        assert client.resolve("a", 5).name == "a"
        new.sendall(membership.lease_key)
        assert new.recv(1) == b"\0"
    eventually(lambda: client.known("a") is None, "the last stream's close ends the lease", 3)
    client.leave()
    client.close()
