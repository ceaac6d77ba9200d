"""Ranks of torchrun meet with no arguments. First in this process, over a real store; then under the real torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorlink as tl
from tensorlink import rendezvous
from tensorlink.integrations import torchrun
from tests.control.control_processes import eventually

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")
distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the first of a process keeps a pipe

ROOT = Path(tl.__file__).parents[1]

Enter = Callable[..., tl.Endpoint]


@pytest.fixture
def store() -> Any:
    """What the agent has."""
    return distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def enter(store: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Enter]:
    """Makes this process a rank, and then another one beside it; `attempt` is how often torchrun has restarted them."""
    opened: list[tl.Endpoint] = []

    def init(rank: int, attempt: int = 0, name: str | None = None, **settings: Any) -> tl.Endpoint:
        environment = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": store.port, "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": True}
        for variable, value in {**environment, "TORCHELASTIC_RESTART_COUNT": attempt}.items():
            monkeypatch.setenv(variable, str(value))
        opened.append(tl.init(name, **{"lease_s": 2.0, **settings}))
        return opened[-1]

    yield init
    for endpoint in opened:
        endpoint.shutdown()
    # What nobody has joined stays for a while.
    for pid in coordinators():
        os.kill(pid, signal.SIGKILL)


def coordinators() -> list[int]:
    """Those that this process started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"tensorlink.control.hosted" in words and str(os.getpid()).encode() in words:
            found.append(int(entry.name))
    return found


def exchange(one: tl.Endpoint, other: tl.Endpoint) -> None:
    one.send(torch.arange(3), other.name)
    assert other.recv(one.name, timeout=20).tolist() == [0, 1, 2]


class TestStore:
    def test_ranks_meet(self, enter: Enter) -> None:
        zero, one = enter(0), enter(1)
        assert (zero.name, one.name) == ("rank0", "rank1")
        assert (zero.settings.coordinator or "").startswith("127.0.0.1:")
        assert zero.settings.token == one.settings.token and len(zero.settings.token or "") == 64
        exchange(zero, one)
        assert enter(0) is zero  # the current one

    def test_two_endpoints_of_rank_0_have_one_coordinator(self, enter: Enter) -> None:
        exchange(enter(0), enter(0, name="another"))
        assert len(coordinators()) == 1

    def test_a_rank_waits_for_rank_0_and_says_so(self, enter: Enter) -> None:
        with pytest.raises(tl.PeerLostError, match=r"rank 0 has not called tensorlink.init\(\) yet .*127.0.0.1"):
            enter(1, timeout=0.3)

    def test_a_store_that_is_not_there_is_named(self, enter: Enter, store: Any) -> None:
        lost = torchrun.Torchrun({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
        with pytest.raises(tl.PeerLostError, match=r"the store of torchrun at 127.0.0.1:1 cannot be used"):
            lost.find(tl.Settings(), 0.1)

    def test_what_a_rank_0_of_before_left_is_not_taken(self, enter: Enter, store: Any) -> None:
        """torchrun counts no restart when nodes come or go."""
        key = "tensorlink/default/0"
        zero = enter(0)
        left = json.loads(store.get(key)) | {"starter": "another process"}
        store.set(key, json.dumps(left))
        again = enter(0, name="again")
        assert again.settings.coordinator != zero.settings.coordinator
        assert json.loads(store.get(key))["coordinator"] == again.settings.coordinator

    def test_a_killed_coordinator_is_replaced_under_its_token(self, enter: Enter, store: Any) -> None:
        zero, one = enter(0), enter(1)
        before = store.get("tensorlink/default/0")
        (pid,) = coordinators()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: store.get("tensorlink/default/0") != before, "rank 0 has started another one")
        late = enter(1, name="late")
        assert coordinators() != [pid]
        exchange(late, zero)
        exchange(one, late)

    def test_namespaces_and_attempts_are_apart(self, enter: Enter) -> None:
        zero, later, mine = enter(0), enter(0, attempt=1, name="later"), enter(0, name="mine", namespace="mine")
        assert len({endpoint.settings.coordinator for endpoint in (zero, later, mine)}) == 3

    def test_a_token_of_the_user_is_not_shown(self, enter: Enter, store: Any) -> None:
        zero = enter(0, token="the user's own")
        assert zero.settings.token == "the user's own"
        assert json.loads(store.get("tensorlink/default/0"))["token"] is None
        with pytest.raises(tl.AuthenticationError):
            enter(1, token="another")
        exchange(zero, enter(1, token="the user's own"))

    def test_a_coordinator_that_is_named_and_none_at_all(self, enter: Enter) -> None:
        zero = enter(0)
        other = enter(1, coordinator=zero.settings.coordinator, token=zero.settings.token)
        assert other.name == "rank1"
        alone = enter(1, rendezvous="none")
        assert alone.settings.coordinator is None and alone.name != "rank1"


def test_variables_of_torch_alone_count_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(variable, value)
    assert rendezvous.detect(None) is None
    found = rendezvous.detect("torchrun")
    assert found is not None and found.peer_name == "rank1"


# The real thing


def torchrun_command(folder: Path, do: str, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tests.integrations.ranks", do, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TENSORLINK_LEASE_S": "2"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(*jobs: subprocess.Popen[str]) -> None:
    for job in jobs:
        words, _ = job.communicate(timeout=100)
        assert job.returncode == 0, words[-4000:]


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.soak
@pytest.mark.parametrize("do", ["meet", "meet_after"])
def test_ranks_meet_and_disturb_no_process_group(tmp_path: Path, do: str) -> None:
    ended(torchrun_command(tmp_path, do, "--standalone", "--nproc-per-node=2"))
    assert [(row["me"], row["got"], row["total"]) for row in told(tmp_path)] == [
        ("rank0", [1] * 4, 2),
        ("rank1", [0] * 4, 2),
    ]


@pytest.mark.soak
@pytest.mark.parametrize("do", ["meet", "meet_after"])
def test_a_store_in_rank_0_is_shared_with_its_process_group(
    tmp_path: Path, do: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    ended(torchrun_command(tmp_path, do, "--standalone", "--nproc-per-node=2"))
    assert [row["total"] for row in told(tmp_path)] == [2, 2]


def test_a_restart_brings_the_same_names_and_what_was_put_before_is_gone(tmp_path: Path) -> None:
    ended(torchrun_command(tmp_path, "restart", "--standalone", "--nproc-per-node=2", "--max-restarts=1"))
    for rank, row in enumerate(told(tmp_path)):
        assert row == {"got": [1 - rank] * 4, "failed": "PeerRestartedError", "later": True}


@pytest.mark.parametrize("backend", ["c10d", pytest.param("static", marks=pytest.mark.soak)])
def test_two_nodes(tmp_path: Path, backend: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = (
        ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", "--local-addr=127.0.0.1"]
        if backend == "c10d"
        else ["--master-addr=127.0.0.1", f"--master-port={port}"]
    )
    nodes = [
        torchrun_command(tmp_path, "meet", "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1", *where)
        for rank in (0, 1)
    ]
    ended(*nodes)
    zero, one = told(tmp_path)
    assert (zero["got"], one["got"]) == ([1] * 4, [0] * 4) and zero["coordinator"] == one["coordinator"]
    assert zero["total"] == one["total"] == 2
    eventually(lambda: not list(Path(os.environ["XDG_RUNTIME_DIR"]).glob("tensorlink/*")), "no file is left")
