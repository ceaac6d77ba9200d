"""What is said of paths, and what is done: between processes of one host, and between hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import tensorlink as tl
from tensorlink.cli.app import app
from tensorlink.testing.wrapper import Dice, FaultyTransport, Plan
from tensorlink.types import Figure
from tests.cluster import Cluster, cluster, networks
from tests.joined import join
from tests.peer import ROOT, Peer, eventually, kept, nursery, spawn

__all__ = ["cluster", "join", "networks", "nursery", "spawn"]

pytestmark = pytest.mark.usefixtures("nursery")

TOKEN = "a secret of the tests"
NBYTES = 1 << 20


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLINK_TOKEN", TOKEN)


def facts(report: tl.PathReport) -> tuple[str | None, str | None]:
    return report.chosen.transport if report.chosen is not None else None, report.used


def reasons(report: tl.PathReport) -> dict[str, str]:
    return {candidate.transport: candidate.reason for candidate in report.candidates}


def put() -> bytes:
    """In a child: the bytes of a handle that it keeps."""
    kept["ref"] = tl.put(np.arange(NBYTES // 8))
    return bytes(kept["ref"].to_bytes())


def explained(name: str, nbytes: int | None = None) -> tl.PathReport:
    return tl.explain(name, nbytes)


@pytest.mark.shm
def test_two_peers_of_one_host(join: Callable[..., Peer]) -> None:
    child = join("b")
    with tl.init("a") as a:
        before = a.explain("b")
        assert facts(before) == ("shm", None) and (before.peer, before.nbytes) == ("b", 1 << 20)
        assert a.stats()["peers"] == {}, "it was asked, and not connected"
        assert reasons(before)["local"] == "it is another process"
        assert reasons(before)["tcp"].endswith("by shm")
        ref = tl.TensorRef.from_bytes(child.call(put))
        assert facts(a.explain(ref)) == ("shm", None) and a.explain(ref).nbytes == ref.nbytes
        a.get(ref)
        after = tl.explain("b", 256 << 20)
        assert facts(after) == ("shm", "shm") and after.nbytes == 256 << 20
        assert str(after).splitlines()[0].endswith("; connected by shm")
        assert facts(a.explain("a")) == ("local", None)
        assert a.topology() is tl.topology() and a.topology().source == "this machine"
        assert facts(child.call(explained, "a")) == ("shm", None), "as it is seen from there"


@pytest.mark.shm
def test_the_next_best_where_one_is_excluded(join: Callable[..., Peer]) -> None:
    child = join("b")
    with tl.init("a", transports="^shm") as a:
        report = a.explain("b")
        assert facts(report) == ("tcp", None)
        assert reasons(report)["shm"] == "excluded by the setting transports"
        a.get(tl.TensorRef.from_bytes(child.call(put)))
        assert facts(a.explain("b")) == ("tcp", "tcp")
        # The other side connects for itself, and finds that this one has no shared memory to offer.
        there = child.call(explained, "a")
        assert facts(there) == ("tcp", None) and reasons(there)["shm"] == "a doesn't have it"


@pytest.mark.shm
def test_a_path_for_some_peers(join: Callable[..., Peer]) -> None:
    first, second = join("rollout1"), join("trainer")
    with tl.init("a", paths="rollout*=^shm") as a:
        for name, child, transport in (("rollout1", first, "tcp"), ("trainer", second, "shm")):
            a.get(tl.TensorRef.from_bytes(child.call(put)))
            assert facts(a.explain(name)) == (transport, transport)
        assert reasons(a.explain("rollout1"))["shm"] == "excluded for rollout1 by the setting paths"
    with tl.init("a", paths="rollout1=local") as a:
        with pytest.raises(tl.NoPathError, match=r"tcp: excluded for rollout1 by the setting paths"):
            a.send(1, "rollout1")
        assert a.explain("rollout1").chosen is None


@pytest.mark.shm
def test_two_hosts(cluster: Cluster) -> None:
    there, here = cluster.peer(1, "there"), cluster.peer(0, "here")
    report = here.call(explained, "there", 256 << 20)
    assert facts(report) == ("tcp", None)
    assert reasons(report)["shm"] == "it is on another host" and reasons(report)["local"] == "it is another process"
    assert [hop.what for hop in report.chosen.hops][-1] == "network - cpu"
    here.call(tl.send, 1, "there")
    assert facts(here.call(explained, "there")) == ("tcp", "tcp")
    assert facts(here.call(explained, "here")) == ("local", None)
    command = cluster.network.hosts[0].command(sys.executable, "-m", "tensorlink.cli", "explain", "there", "--json")
    env = {"TENSORLINK_TOKEN": TOKEN, "TENSORLINK_COORDINATOR": cluster.coordinator, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["chosen"] == "tcp"
    for peer in (there, here):
        peer.close()


@pytest.mark.shm
def test_a_call_that_says_what_may_carry_it(join: Callable[..., Peer]) -> None:
    child = join("b")
    with tl.init("a") as a:
        ref = tl.TensorRef.from_bytes(child.call(put))
        assert (a.get(ref) == np.arange(NBYTES // 8)).all()
        assert child.call(tl.stats)["served_bytes"] == 0
        for times in (1, 2):
            assert (a.get(ref, transports="tcp") == np.arange(NBYTES // 8)).all()
            served = times * NBYTES
            eventually(lambda: child.call(tl.stats)["served_bytes"] >= served, "it is counted")  # noqa: B023
        connections = len(a._engine.connections())
        transfer = a.iget(ref, transports="^shm")
        assert (transfer.wait(30) == np.arange(NBYTES // 8)).all() and transfer.path == "tcp"
        assert len(a._engine.connections()) == connections, "the connection beside the first was kept"
        assert facts(a.explain("b")) == ("shm", "shm")
        fast = a.iget(ref, transports="shm,tcp")
        fast.wait(30)
        assert fast.path == "shm", "the one that stands may carry it"
        for tag in ("one", "other"):
            a.send(tag, "b", tag=tag)
            assert child.call(tl.recv, "a", tag=tag) == tag
        with pytest.raises(tl.NoPathError, match="tcp: this call excludes it"):
            a.get(ref, transports="local")
        with pytest.raises(ValueError, match="no transport 'sneakernet' is installed"):
            a.get(ref, transports="sneakernet")
        child.kill()
        with pytest.raises(tl.PeerLostError):
            a.get(ref, transports="tcp", timeout=20)


@pytest.mark.shm
def test_a_transfer_tells_by_what_it_went_when_the_first_path_fails(join: Callable[..., Peer]) -> None:
    child = join("b")
    with tl.init("a") as a:
        ref = tl.TensorRef.from_bytes(child.call(put))
        for transport in FaultyTransport.into(a, Plan()):
            if transport.name == "shm":
                transport.dice = Dice(Plan(fail=1.0, after=1))  # it connects, and then nothing can be read
        transfer = a.iget(ref, out=np.empty(NBYTES // 8, np.int64))
        transfer.wait(30)
        assert transfer.path == "tcp"
        report = a.explain("b")
        assert facts(report) == ("tcp", "tcp") and "has just failed" in reasons(report)["shm"]


def publish() -> None:
    kept["publisher"] = tl.WeightPublisher("policy", {"w": np.ones(9, np.float32)})
    kept["publisher"].publish()


@pytest.mark.shm
def test_transfers_that_connect_tell_by_what_they_went(join: Callable[..., Peer]) -> None:
    child = join("b")
    child.call(publish)
    with tl.init("a") as a:
        sent = a.isend(1, "b")
        sent.wait(30)
        assert sent.path == ("" if a.settings.control == "grpc" else "shm")
        a.get(tl.TensorRef.from_bytes(child.call(put)))
        pulled = tl.WeightSubscriber("policy", into={"w": np.zeros(9, np.float32)}).ipull()
        assert (pulled.wait(30), pulled.path) == (1, "shm")


@pytest.mark.shm
def test_what_was_measured_decides(join: Callable[..., Peer]) -> None:
    child = join("b")
    with tl.init("a") as a:
        asked = []

        def measured(here: str, there: str) -> dict[str, Figure]:
            asked.append((here, there))
            return {"shm": Figure(latency_s=1.0, bytes_per_s=1e9)}

        a._links.ways.measured = measured
        assert facts(a.explain("b")) == ("tcp", None)
        a.get(tl.TensorRef.from_bytes(child.call(put)))
        assert facts(a.explain("b")) == ("tcp", "tcp")
        (me,) = [one for one in a.peers() if one.name == "a"]
        assert set(asked) == {(me.host, me.host)}


def test_who_cannot_be_asked(join: Callable[..., Peer]) -> None:
    child = join("b")
    with tl.init("a") as a:
        ref = tl.TensorRef.from_bytes(child.call(put))
        with pytest.raises(tl.PeerUnknownError):
            a.explain("nobody", timeout=0.1)
        for name in ("", "two\nlines", "x" * 1000):
            with pytest.raises(ValueError, match="a name has"):
                a.explain(name)
            with pytest.raises(ValueError, match="a name has"):
                a.send(1, name)
        for size in (-1, 1 << 64):
            with pytest.raises(ValueError, match="from 0 to"):
                a.explain("b", size)
        for what in ((3,), (None,), ("b", "1MiB"), ("b", 1.5), ("b", True)):
            with pytest.raises(TypeError, match="explain takes|an int, not"):
                a.explain(*what)
        for only, error in (("", ValueError), ("^", ValueError), (["shm"], TypeError)):
            with pytest.raises(error, match="transports"):
                a.get(ref, transports=only)  # type: ignore[arg-type]
        child.kill()
        with pytest.raises(tl.PeerLostError):
            a.explain(ref, timeout=20)
    with pytest.raises(tl.ClosedError):
        a.explain("b")


def test_the_command_without_a_coordinator(runtime_dir: Path) -> None:
    line = [sys.executable, "-m", "tensorlink.cli", "explain", "b"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "error:" in done.stderr and "Traceback" not in done.stderr
    assert list((runtime_dir / "tensorlink").iterdir()) == [], "it has started none"


@pytest.mark.shm
def test_the_command(join: Callable[..., Peer]) -> None:
    def run(*arguments: str, **environment: str) -> Result:
        return CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "140", **environment})

    join("trainer")
    shown = run("trainer", "--nbytes", "256MiB")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("trainer, 256 MiB: shm, 13.4 ms predicted; not connected")
    assert "89.5 ms against 13.4 ms by shm" in shown.stdout
    said: dict[str, Any] = json.loads(run("trainer", "--json", TENSORLINK_TRANSPORTS="^shm").stdout)
    assert (said["chosen"], said["nbytes"], said["used"]) == ("tcp", 1 << 20, None)
    assert run("trainer", TENSORLINK_PATHS="trainer=local").exit_code == 1
    assert "Near names: trainer" in run("trainee").output
    assert "a size is like" in run("trainer", "--nbytes", "much").output
