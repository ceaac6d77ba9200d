"""Reinforcement learning across processes: one trainer, N rollout workers, weights and rollouts through TensorLink.

A transformer of 100,000 parameters learns from nothing but a reward to sort five digits. Every step the trainer
publishes its weights; each worker pulls them by subscription, samples answers, and sends them back as a tree of
tensors; the trainer improves the policy by GRPO with whatever arrived. Workers are plain processes without a launcher
or a group: kill one (`--kill-worker 60`), and training goes on while it is started again under its name.

    python examples/rl_weight_sync.py [--workers 2] [--steps 180] [--seed 0] [--kill-worker STEP] [--out DIR] [--ray]

Read `work` and `train` of `rl_loop.py` first: they are all there is to the synchronisation. With `--ray` the same two
run in actors of Ray, `rl_ray.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from rl_loop import GRACE_S, Crew, train, work
from rl_report import Display, Series, draw, summarize

from tensorlink.errors import PeerLostError, TensorLinkError

STEPS, TARGET = 180, 0.9


def worker_main(name: str, seed: int, lag: int) -> int:
    """Exit code 0 when the trainer has left, for whatever reason; 1 for any other failure of the transport."""
    try:
        work(name, seed, lag)
    except PeerLostError:
        return 0
    except TensorLinkError as error:
        print(f"{name}: {error}", file=sys.stderr)
    return 1


class Processes(Crew):
    """Workers that are children of the trainer."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        role = [f"--role={name}", f"--seed={self.seed(name)}", f"--lag={self.options.lag}"]
        # A session of its own: Ctrl-C reaches the trainer alone, which then leaves in order.
        self._processes[name] = subprocess.Popen(
            [sys.executable, __file__, *role], stdin=subprocess.DEVNULL, start_new_session=True
        )

    def kill(self, name: str) -> None:
        self._processes[name].kill()

    def ended(self) -> list[tuple[str, int]]:
        return [(name, process.pid) for name, process in self._processes.items() if process.poll() is not None]

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + GRACE_S
        for name, process in self._processes.items():
            if name not in self.awaited:
                process.terminate()
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A policy learns to sort; its weights travel through TensorLink.")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lag", type=int, default=1, help="turns a worker may be ahead; 0: in step, and reproducible")
    parser.add_argument("--kill-worker", type=int, metavar="STEP", help="kill a worker with SIGKILL at this step")
    parser.add_argument(
        "--ray", action="store_true", help="trainer and workers are actors of Ray (RAY_ADDRESS, or here)"
    )
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the chart and the JSON go")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.workers < 1 or options.steps < 1:
        parser.error("--workers and --steps must be at least 1")
    return options


def steps_of(options: argparse.Namespace) -> Generator[dict[str, Any]]:
    """The training, step by step, wherever it runs."""
    if options.ray:
        from rl_ray import train_in_ray  # nobody else needs Ray

        yield from train_in_ray(options)
    else:
        os.environ.setdefault("TENSORLINK_NAMESPACE", f"rl-{os.getpid()}")  # several runs side by side don't meet
        yield from train(options, Processes(options))


def main() -> int:
    options = parse()
    if options.role:
        return worker_main(options.role, options.seed, options.lag)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with` blocks end
    options.out.mkdir(parents=True, exist_ok=True)
    series: Series = {}
    with Display(options.steps) as display, contextlib.closing(steps_of(options)) as steps:
        try:
            for step in steps:
                for key, value in step.items():
                    series.setdefault(key, []).append(value)
                display.show(series)
        except KeyboardInterrupt:
            return 130
    summary = summarize(series, TARGET)
    display.table(summary)
    config = {key: value for key, value in vars(options).items() if key not in ("role", "out")}
    report = {"config": config, "summary": summary, "series": series}
    (options.out / "rl_weight_sync.json").write_text(json.dumps(report, indent=1))
    draw(series, summary, options.out / "rl_weight_sync.png")
    return 0 if options.steps < STEPS or summary["reward_last"] >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
