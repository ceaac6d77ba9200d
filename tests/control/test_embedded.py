"""Peers of one user meet on one host with nothing configured, whatever dies when."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorlink.control import ControlClient, runtime_dir
from tensorlink.errors import AuthenticationError
from tensorlink.settings import Settings
from tests.control.control_processes import Member, coordinator_pids, environment, eventually

Start = Callable[..., Member]


def test_two_processes_meet(member: Start, run_dir: Path) -> None:
    a, b = member("a"), member("b")
    first = a.joined()
    assert b.call("resolve", "a", 20)["incarnation"] == first
    assert eventually(lambda: a.call("peers") == ["a", "b"], "both are seen")
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


def test_twenty_at_once_elect_one_coordinator(member: Start, run_dir: Path) -> None:
    members = [member(f"m{i}") for i in range(20)]
    for one in members:
        one.joined()
    assert len(coordinator_pids(run_dir)) == 1
    eventually(lambda: len(members[0].call("peers")) == 20, "all are seen")


def test_the_coordinator_outlives_its_starter_and_goes_with_the_last_peer(member: Start, run_dir: Path) -> None:
    a, b = member("a"), member("b")
    a.joined()
    b.joined()
    pids = coordinator_pids(run_dir)
    a.kill()
    b.wait(event="down", name="a")
    assert coordinator_pids(run_dir) == pids
    b.stop()
    eventually(lambda: not coordinator_pids(run_dir), "the coordinator ended", 10)
    assert list(run_dir.iterdir()) == []


def test_it_is_a_small_process_of_its_own(member: Start, run_dir: Path) -> None:
    a = member("a")
    a.joined()
    (pid,) = coordinator_pids(run_dir)
    assert os.getsid(pid) not in (os.getsid(a.pid), os.getsid(0))
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent != a.pid
    children = Path(f"/proc/{a.pid}/task/{a.pid}/children").read_text().split()
    assert children == []
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "numpy" not in maps and "torch" not in maps
    own = {os.readlink(f"/proc/{a.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{a.pid}/fd")}
    its = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    assert not {link for link in own & its if link.startswith(("socket:", "pipe:"))}


def test_killed_coordinator_is_replaced_and_nobody_is_lost(member: Start, run_dir: Path) -> None:
    members = {name: member(name) for name in "abc"}
    incarnations = {name: one.joined() for name, one in members.items()}
    members["a"].call("advertise", "weights/policy")
    for one in members.values():
        eventually(lambda one=one: len(one.call("peers")) == 3, "all are seen")
    (pid,) = coordinator_pids(run_dir)
    os.kill(pid, signal.SIGKILL)
    for name, one in members.items():
        assert one.wait(rejoined=...)["rejoined"] == incarnations[name]
    (new,) = coordinator_pids(run_dir)
    assert new != pid
    assert members["b"].call("find", "weights/policy", 20)["name"] == "a"
    assert members["c"].call("resolve", "b", 20)["incarnation"] == incarnations["b"]
    for one in members.values():
        assert one.call("peers") == ["a", "b", "c"]
        assert not [line for line in one.lines() if line.get("event") in ("down", "restart")]


def test_two_coordinators_at_once_become_one(member: Start, run_dir: Path) -> None:
    a, older = member("a"), member("twice")
    ids = {"a": a.joined(), "twice": older.joined()}
    eventually(lambda: a.call("peers") == ["a", "twice"], "both are seen")
    (first,) = coordinator_pids(run_dir)
    os.kill(first, signal.SIGSTOP)
    for name in ("c-default.lock", "c-default.sock", "c-default.hb"):
        (run_dir / name).unlink()
    b, newer = member("b"), member("twice")
    ids |= {"b": b.joined(), "twice": newer.joined()}
    assert len(coordinator_pids(run_dir)) == 2
    os.kill(first, signal.SIGCONT)
    older.wait(failed="NameInUseError")
    assert a.wait(rejoined=...)["rejoined"] == ids["a"]
    for one in (a, b, newer):
        eventually(lambda one=one: one.call("peers") == ["a", "b", "twice"], "all are in one")
        assert one.call("resolve", "twice", 5)["incarnation"] == ids["twice"]
    assert a.wait(event="restart", name="twice")["incarnation"] == ids["twice"]
    assert member("late").joined(), "the first one took nothing of the second with it"
    assert first not in coordinator_pids(run_dir) and len(coordinator_pids(run_dir)) == 1


@pytest.mark.parametrize("lost", ["sock", "hb"])
def test_one_whose_files_were_cleaned_away_makes_room(member: Start, run_dir: Path, lost: str) -> None:
    a = member("a")
    incarnation = a.joined()
    (first,) = coordinator_pids(run_dir)
    (run_dir / f"c-default.{lost}").unlink()
    assert a.wait(rejoined=...)["rejoined"] == incarnation
    b = member("b")
    b.joined()
    assert b.call("resolve", "a", 5)["incarnation"] == incarnation
    assert first not in coordinator_pids(run_dir)


def test_stale_and_foreign_files_do_not_block(member: Start, run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(run_dir / "c-default.sock"))
    dead.close()
    (run_dir / "c-default.hb").write_text("not a socket")
    (run_dir / "c-default.lock").write_text("")
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    orphan = run_dir / f"p-{int(child.stdout)}-00000000.sock"
    orphan.write_text("")
    member("a").joined()
    assert not orphan.exists()


def test_a_directory_at_the_place_of_the_socket_does_not_block(member: Start, run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    (run_dir / "c-default.sock").mkdir()
    member("a").joined()


@pytest.mark.parametrize("length", [90, 107, 108, 200])
@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR"])
def test_long_paths_meet(member: Start, run_dir: Path, tmp_path: Path, variable: str, length: int) -> None:
    base = run_dir.parent
    deep = str(base / "x") + "/" * 0
    while len(deep) < length:
        deep += "/" + "y" * min(50, length - len(deep) - 1) if length - len(deep) > 1 else "z"
    assert len(deep) == length
    os.makedirs(deep)
    namespace = f"t{os.getpid()}-{variable[0]}{length}"  # the fallback directory is the user's own: stay apart in it
    a = member("a", TENSORLINK_NAMESPACE=namespace, **{variable: deep})
    a.joined()
    b = member("b", TENSORLINK_NAMESPACE=namespace, **({} if variable == "TMPDIR" else {variable: deep}))
    assert b.call("resolve", "a", 20)["name"] == "a"
    for one in (a, b):
        one.stop()


def test_namespaces_are_apart(member: Start, run_dir: Path) -> None:
    long = "n" * 64
    a, b = member("same"), member("same", TENSORLINK_NAMESPACE=long)
    a.joined()
    b.joined()
    assert len(coordinator_pids(run_dir)) == 2
    assert a.call("peers") == b.call("peers") == ["same"]


def test_wrong_token_is_refused(member: Start) -> None:
    member("a", TENSORLINK_TOKEN="open sésame").joined()
    assert member("b", TENSORLINK_TOKEN="open sésame").joined()
    for extra in ({"TENSORLINK_TOKEN": "wrong"}, {}):
        line = member("c", **extra).wait(error=...)
        assert line["error"] == "AuthenticationError"
        assert "sésame" not in line["message"]


def test_a_directory_of_somebody_else_is_refused(run_dir: Path) -> None:
    target = run_dir.parent / "elsewhere"
    target.mkdir()
    run_dir.symlink_to(target)
    with pytest.raises(AuthenticationError, match="XDG_RUNTIME_DIR"):
        runtime_dir.runtime_dir()
    run_dir.unlink()
    if os.geteuid() == 0:
        run_dir.mkdir()
        os.chown(run_dir, 65534, 65534)
        with pytest.raises(AuthenticationError, match="does not|not a directory"):
            runtime_dir.runtime_dir()


def test_ctrl_c_of_the_starter_spares_the_coordinator(member: Start, run_dir: Path) -> None:
    a, b = member("a"), member("b")
    a.joined()
    b.joined()
    (pid,) = coordinator_pids(run_dir)
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGHUP)
    assert b.call("resolve", "a", 5)["name"] == "a"
    assert coordinator_pids(run_dir) == [pid]


FORKER = """
import os, sys
from tensorlink.control import ControlClient, PeerServer
from tensorlink.errors import ClosedError
from tensorlink.settings import Settings
sys.path.insert(0, {folder!r})
from control_member import Handlers
server = PeerServer(Handlers(), name="parent")
client = ControlClient(Settings.load(), name="parent", address=server.address)
client.join(30)
child = os.fork()
if child == 0:
    try:
        client.resolve("parent", 1)
    except ClosedError:
        client.leave(); client.close(); server.close()
        sys.exit(7)
    sys.exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert client.resolve("parent", 5).pid == os.getpid()
{ending}
"""


@pytest.mark.parametrize("ending", ["client.close(); server.close()", "pass"], ids=["closed", "left open"])
def test_fork_and_exit(run_dir: Path, ending: str) -> None:
    script = FORKER.format(folder=str(Path(__file__).parent), ending=ending)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), timeout=40, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_close_ends_threads_and_is_quick(run_dir: Path) -> None:
    import threading

    before = threading.active_count()
    client = ControlClient(Settings.load(), name="a", address="unix:/nowhere")
    client.join(30)
    client.leave()
    began = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - began < 2
    eventually(lambda: threading.active_count() <= before + 1, "threads ended")  # gRPC keeps one for all its channels
