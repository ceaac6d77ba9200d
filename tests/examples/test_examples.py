"""The examples as a reader runs them: real processes, killed and interrupted, with nothing left behind."""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.timeout(300)  # three processes that train: minutes where others want the processors too

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DEADLINE_S = 120.0
LEAVE_S = 20.0  # for workers and the coordinator to notice that they are alone, and go


class Run:
    """Starts examples in a namespace of their own, by which every process of theirs is found again."""

    def __init__(self, namespace: str) -> None:
        self.mark = f"TENSORLINK_NAMESPACE={namespace}"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.env = os.environ | {"TENSORLINK_NAMESPACE": namespace, "PYTHONPATH": path}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / script), *arguments],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def finish(self, script: str, *arguments: str) -> tuple[int, str, str]:
        process = self.start(script, *arguments)
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err

    def processes(self) -> list[int]:
        """Pids of all processes of these examples that are alive: workers and the coordinator too."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended meanwhile, or belongs to someone else
        return found

    def left_after(self, seconds: float) -> list[int]:
        """The processes that are still there after at most so many seconds; returns as soon as there are none."""
        deadline = time.monotonic() + seconds
        while pids := self.processes():
            try:
                ended = os.pidfd_open(pids[0])
            except ProcessLookupError:
                continue
            try:
                if not select.select([ended], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    return pids
            finally:
                os.close(ended)
        return []

    def close(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.communicate()


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    examples = Run(f"{request.node.name.replace('[', '-').rstrip(']')}-{os.getpid()}")
    yield examples
    examples.close()


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("rl_policy")


def wait_for_line(process: subprocess.Popen[str], start: str) -> None:
    """Returns once the process has printed such a line; it is killed, and the test fails, at the deadline."""
    assert process.stdout is not None
    timer = threading.Timer(DEADLINE_S, process.kill)
    timer.start()
    try:
        assert any(line.startswith(start) for line in process.stdout), f"no line began with {start!r}"
    finally:
        timer.cancel()


def report(folder: Path) -> dict[str, Any]:
    assert (folder / "rl_weight_sync.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "rl_weight_sync.json").read_text())  # type: ignore[no-any-return]


def check_series(series: dict[str, list[Any]], steps: int) -> None:
    assert series["step"] == list(range(1, steps + 1))
    assert all(len(values) == steps for values in series.values())
    assert all(0 <= reward <= 1 for reward in series["reward"])
    assert all(seconds > 0 for seconds in series["publish_s"] + series["step_s"])
    newest: dict[str, int] = {}
    for step, workers, versions in zip(series["step"], series["workers"], series["versions"], strict=True):
        assert workers, "a step without a rollout"
        for worker, version in zip(workers, versions, strict=True):
            assert newest.get(worker, 1) <= version <= step, "weights went back, or came before they were published"
            newest[worker] = version


def test_send_recv_starts_its_other_half(run: Run) -> None:
    code, out, err = run.finish("send_recv.py")
    assert (code, err) == (0, "")
    assert "step 7 with a sum of 499999500000.0" in out
    assert "thank you" in out
    assert run.left_after(LEAVE_S) == []


@pytest.mark.parametrize("roles", [("sender", "receiver"), ("receiver", "sender")])
def test_send_recv_in_two_shells(run: Run, roles: tuple[str, str]) -> None:
    processes = [run.start("send_recv.py", role) for role in roles]
    assert [process.communicate(timeout=DEADLINE_S)[1] for process in processes] == ["", ""]
    assert [process.returncode for process in processes] == [0, 0]


def test_training_goes_on_without_a_killed_worker(run: Run, tmp_path: Path) -> None:
    code, out, err = run.finish("rl_weight_sync.py", "--steps=8", "--kill-worker=4", "--seed=3", f"--out={tmp_path}")
    assert (code, err) == (0, "")
    assert "a worker died and is started again" in out
    assert "sync share of a step" in out
    result = report(tmp_path)
    check_series(result["series"], 8)
    assert result["config"] == {"workers": 2, "steps": 8, "seed": 3, "lag": 1, "kill_worker": 4, "ray": False}
    assert set(result["series"]["workers"][0]) == {"worker-0", "worker-1"}
    assert any(workers == ["worker-1"] for workers in result["series"]["workers"][3:]), "nobody was killed"
    assert result["summary"]["restarts"] == 1
    assert result["summary"]["weight_bytes"] > 10 * 400_000
    assert run.left_after(LEAVE_S) == []


def test_a_killed_worker_comes_back_under_its_name(run: Run, tmp_path: Path) -> None:
    """With one worker there is nobody else: the steps after the kill are all of the one that was started again."""
    code, _, err = run.finish("rl_weight_sync.py", "--workers=1", "--steps=8", "--kill-worker=3", f"--out={tmp_path}")
    assert (code, err) == (0, "")
    result = report(tmp_path)
    check_series(result["series"], 8)
    assert result["summary"]["restarts"] == 1
    assert result["series"]["workers"][-1] == ["worker-0"]
    assert result["series"]["versions"][-1][0] >= 7
    assert run.left_after(LEAVE_S) == []


def test_equal_seeds_learn_alike_in_step(run: Run, tmp_path: Path) -> None:
    curves = []
    for folder in ("a", "b"):
        code, _, err = run.finish("rl_weight_sync.py", "--lag=0", "--steps=3", "--seed=5", f"--out={tmp_path / folder}")
        assert (code, err) == (0, "")
        curves.append(report(tmp_path / folder)["series"]["reward"])
    assert curves[0] == curves[1]


def test_ctrl_c_leaves_nobody_behind(run: Run, tmp_path: Path) -> None:
    trainer = run.start("rl_weight_sync.py", "--steps=1000", f"--out={tmp_path}")
    wait_for_line(trainer, "step    1/")
    trainer.send_signal(signal.SIGINT)
    _, err = trainer.communicate(timeout=DEADLINE_S)
    assert trainer.returncode == 130
    assert "Traceback" not in err
    assert run.left_after(LEAVE_S) == []


def test_workers_leave_when_the_trainer_is_killed(run: Run, tmp_path: Path) -> None:
    trainer = run.start("rl_weight_sync.py", "--steps=1000", f"--out={tmp_path}")
    wait_for_line(trainer, "step    1/")
    trainer.kill()
    _, err = trainer.communicate(timeout=DEADLINE_S)
    assert err == ""
    assert run.left_after(LEAVE_S) == []


def test_the_reward_counts_digits_in_place(demo: ModuleType) -> None:
    prompts = torch.tensor([[3, 1, 2, 9, 1], [5, 4, 3, 2, 1]])
    answers = torch.tensor([[1, 1, 2, 3, 9], [1, 2, 3, 5, 4]])
    assert demo.grade(prompts, answers).tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_the_policy_scores_answers_as_it_sampled_them(demo: ModuleType) -> None:
    """Token by token from the cache, or all at once as the trainer does: the importance ratio starts at one."""
    torch.manual_seed(0)
    policy = demo.Policy()
    prompts = torch.randint(demo.DIGITS, (3, demo.LENGTH))
    answers, logps = demo.sample(policy, prompts)
    asked = demo.with_separator(prompts).repeat_interleave(demo.GROUP, dim=0)
    logits, _ = policy(torch.cat([asked, answers[:, :-1]], dim=1))
    again = logits[:, demo.LENGTH :].log_softmax(dim=-1).gather(2, answers.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(again, logps, atol=1e-5, rtol=1e-5)


def test_one_update_favours_what_was_rewarded(demo: ModuleType) -> None:
    torch.manual_seed(0)
    policy = demo.Policy()
    prompts = torch.randint(demo.DIGITS, (demo.PROMPTS, demo.LENGTH))
    answers, logps = demo.sample(policy, prompts)
    grades = torch.zeros(answers.shape)
    grades[:, 0] = (answers[:, 0] == 7).float()  # an arbitrary wish
    batch = [{"prompts": prompts, "answers": answers, "logps": logps, "grades": grades}]
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for _ in range(3):
        demo.improve(policy, optimizer, batch)
    wished, _ = demo.sample(policy, prompts)
    assert (wished[:, 0] == 7).float().mean() > 1.3 * grades[:, 0].mean()
