"""Reinforcement learning across processes: one trainer, N rollout workers, weights and rollouts through TensorLink.

A transformer of 100,000 parameters learns from nothing but a reward to sort five digits. Every step the trainer
publishes its weights; each worker pulls them by subscription, samples answers, and sends them back as a tree of
tensors; the trainer improves the policy by GRPO with whatever arrived. Workers are plain processes without a launcher
or a group: kill one (`--kill-worker 60`), and training goes on while it is started again under its name.

    python examples/rl_weight_sync.py [--workers 2] [--steps 180] [--seed 0] [--kill-worker STEP] [--out DIR]

Read `work` and `train` first: they are all there is to the synchronisation.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rl_report import Display, Series, draw, summarize
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import tensorlink as tl
from tensorlink.errors import PeerLostError, TensorLinkError, TransferTimeoutError

DIGITS, LENGTH = 10, 5  # the task: sort LENGTH digits
WIDTH, HEADS, LAYERS = 64, 4, 2
PROMPTS, GROUP = 16, 16  # a rollout: GROUP sampled answers to each of PROMPTS prompts
LEARNING_RATE, WARM_UP, ENTROPY, CLIP = 2.5e-3, 10, 0.005, 0.2
STEPS, TARGET = 180, 0.9
STALE = 8  # rollouts sampled with weights older than this many versions are dropped
TICK_S, GRACE_S, PATIENCE_S = 0.1, 10.0, 120.0  # between looks at the workers; wait for the rest; wait for the first
RETRIES = 3  # starts of a worker that fail in a row before the trainer gives up


Rollout = dict[str, Any]


# ---------------------------------------------------------------------------------------------------- task and model


def grade(prompts: Tensor, answers: Tensor) -> Tensor:
    """Which digits of `answers` (n, LENGTH) are where they belong in the sorted `prompts`: float32 (n, LENGTH)."""
    return (answers == prompts.sort(dim=1).values).float()


Cache = list[tuple[Tensor, Tensor]]  # keys and values of each layer, (n, HEADS, tokens so far, WIDTH / HEADS)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        n, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, tokens, WIDTH))
        return x + self.mlp(self.norm2(x)), (k, v)


class Policy(nn.Module):
    """A decoder-only transformer over the digits and one separator, DIGITS, between prompt and answer."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(DIGITS + 1, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIGITS)

    def forward(self, tokens: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        """Logits (n, tokens, DIGITS) and the cache to go on with. With `past`, `tokens` is (n, 1): the next token."""
        start = past[0][0].shape[2] if past else 0
        x = self.token(tokens) + self.position.weight[start : start + tokens.shape[1]]
        cache: Cache = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, past[i] if past else None)
            cache.append(kv)
        return self.head(self.norm(x)), cache


def with_separator(prompts: Tensor) -> Tensor:
    return F.pad(prompts, (0, 1), value=DIGITS)


@torch.no_grad()
def sample(policy: Policy, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """GROUP answers to each prompt: tokens int64 and their log-probabilities, both (PROMPTS * GROUP, LENGTH)."""
    logits, cache = policy(with_separator(prompts))
    logits = logits.repeat_interleave(GROUP, dim=0)  # a prompt is read once for all its answers
    cache = [(k.repeat_interleave(GROUP, dim=0), v.repeat_interleave(GROUP, dim=0)) for k, v in cache]
    answers, logps = [], []
    for i in range(LENGTH):
        logp = logits[:, -1].log_softmax(dim=-1)
        answers.append(torch.multinomial(logp.exp(), 1))
        logps.append(logp.gather(1, answers[-1]))
        if i < LENGTH - 1:
            logits, cache = policy(answers[-1], cache)
    return torch.cat(answers, dim=1), torch.cat(logps, dim=1)


def improve(policy: Policy, optimizer: torch.optim.Optimizer, batch: list[Rollout]) -> None:
    """One step of GRPO: a token is favoured as far as the answer went better from there on than others of its group.

    The rollouts may come from older weights, hence PPO's clipped importance ratio of each token.
    """
    prompts, answers, old, grades = (
        torch.cat([rollout[key] for rollout in batch]) for key in ("prompts", "answers", "logps", "grades")
    )
    to_go = grades.flip(1).cumsum(dim=1).flip(1).view(-1, GROUP, LENGTH)
    advantage = (to_go - to_go.mean(dim=1, keepdim=True)) / (to_go.std(dim=1, keepdim=True) + 0.01)
    advantage = advantage.view(-1, LENGTH)
    asked = with_separator(prompts).repeat_interleave(GROUP, dim=0)
    logits, _ = policy(torch.cat([asked, answers[:, :-1]], dim=1))
    logps = logits[:, LENGTH:].log_softmax(dim=-1)
    ratio = (logps.gather(2, answers.unsqueeze(2)).squeeze(2) - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    entropy = -(logps.exp() * logps).sum(dim=-1).mean()
    optimizer.zero_grad()
    (-gain - ENTROPY * entropy).backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


# ------------------------------------------------------------------------------------------------------------ worker


def work(name: str, seed: int, lag: int) -> None:
    """A rollout worker: pull weights, sample, send, until the trainer is gone.

    A worker may be `lag` turns ahead of the weights, so that it samples while the trainer computes the next ones. One
    that was started again begins at the newest version.
    """
    policy = Policy()
    with tl.init(name):
        weights = tl.WeightSubscriber("policy", into=policy.state_dict())
        turn = weights.pull()
        while True:
            asked_at = time.monotonic()
            version = weights.pull(min_version=max(1, turn - lag))
            pulled_at = time.monotonic()
            torch.manual_seed(seed + 1_000_003 * turn)
            prompts = torch.randint(DIGITS, (PROMPTS, LENGTH))
            answers, logps = sample(policy, prompts)
            rollout = {
                "worker": name,
                "pid": os.getpid(),
                "version": version,
                "asked_at": asked_at,  # CLOCK_MONOTONIC is one clock for all processes of a host
                "pulled_at": pulled_at,
                "prompts": prompts,
                "answers": answers,
                "logps": logps,
                "grades": grade(prompts.repeat_interleave(GROUP, dim=0), answers),
            }
            tl.send(rollout, "trainer", tag="rollout")
            turn = max(turn, version) + 1


def worker_main(name: str, seed: int, lag: int) -> int:
    """Exit code 0 when the trainer has left, for whatever reason; 1 for any other failure of the transport."""
    try:
        work(name, seed, lag)
    except PeerLostError:
        return 0
    except TensorLinkError as error:
        print(f"{name}: {error}", file=sys.stderr)
    return 1


# ----------------------------------------------------------------------------------------------------------- trainer


class Crew:
    """Starts the workers, starts again those that die, and leaves none behind."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.names = [f"worker-{i}" for i in range(options.workers)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.awaited = set(self.names)
        """Whom a step waits for: not for a worker that is on its way back, or was slow and has not been heard since."""
        self.inbox: dict[str, deque[Rollout]] = {name: deque() for name in self.names}
        self.restarts = 0
        self.failures = dict.fromkeys(self.names, 0)
        """How often in a row each one died before it had sent anything."""

    def __enter__(self) -> Crew:
        for name in self.names:
            self._start(name)
        return self

    def _start(self, name: str) -> None:
        seed = 1_000 * self.options.seed + self.names.index(name)
        role = [f"--role={name}", f"--seed={seed}", f"--lag={self.options.lag}"]
        # A session of its own: Ctrl-C reaches the trainer alone, which then leaves in order.
        self.processes[name] = subprocess.Popen(
            [sys.executable, __file__, *role], stdin=subprocess.DEVNULL, start_new_session=True
        )

    def accept(self, rollout: Rollout, step: int) -> None:
        name = rollout["worker"]
        if step - rollout["version"] <= STALE:
            self.inbox[name].append(rollout)
        if rollout["pid"] == self.processes[name].pid:  # else these are the last words of one that died
            self.awaited.add(name)
            self.failures[name] = 0

    def look_after(self) -> None:
        """Starts dead workers again, under their old names. Raises: RuntimeError: one can't even begin."""
        for name, process in self.processes.items():
            if process.poll() is None:
                continue
            self.awaited.discard(name)
            self.failures[name] += 1
            if self.failures[name] > RETRIES:
                raise RuntimeError(f"{name} ended {RETRIES + 1} times in a row before it sent anything")
            self.restarts += 1
            self._start(name)

    def __exit__(self, *_: object) -> None:
        """The trainer has left by now, so workers end by themselves; those on their way, or stuck, are made to."""
        deadline = time.monotonic() + GRACE_S
        for name, process in self.processes.items():
            if name not in self.awaited:
                process.terminate()
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def gather(crew: Crew, step: int) -> list[Rollout]:
    """The next rollout of each worker that is there, at least one. Waits for no dead worker, nor long for a slow one.

    Raises: RuntimeError: no worker sent anything within PATIENCE_S.
    """
    began = time.monotonic()
    grace = GRACE_S if step > 1 else PATIENCE_S  # starting up takes as long as the machine is busy
    while not (here := [name for name in crew.names if crew.inbox[name]]) or crew.awaited.difference(here):
        try:
            crew.accept(tl.recv(tag="rollout", timeout=TICK_S), step)
        except TransferTimeoutError:
            waited = time.monotonic() - began
            if here and waited > grace:
                crew.awaited.intersection_update(here)
            elif waited > PATIENCE_S:
                raise RuntimeError(f"no worker sent a rollout for {PATIENCE_S:.0f} s") from None
        crew.look_after()
    return [crew.inbox[name].popleft() for name in here]


def train(options: argparse.Namespace, show: Callable[[Series], None]) -> Series:
    """The trainer: publish, gather, improve. Returns what happened at each step."""
    torch.manual_seed(options.seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))
    series: Series = {}
    ready: dict[int, float] = {}
    with Crew(options) as crew, tl.init("trainer"):  # on the way out the endpoint closes first, and the workers notice
        weights = policy.state_dict()
        publisher = tl.WeightPublisher("policy", weights)
        for step in range(1, options.steps + 1):
            ready[step] = began = time.monotonic()
            publisher.publish(version=step)
            published = time.monotonic()
            if step == options.kill_worker:
                crew.processes[crew.names[0]].kill()
            batch = gather(crew, step)
            for group in optimizer.param_groups:  # a short warm-up, then down to a tenth
                group["lr"] = LEARNING_RATE * min(step / WARM_UP, 1 - 0.9 * step / options.steps)
            improve(policy, optimizer, batch)
            grades = torch.cat([r["grades"] for r in batch])
            record(
                series,
                step=step,
                reward=float(grades.mean()),
                exact=float(grades.amin(dim=1).mean()),
                workers=[r["worker"] for r in batch],
                versions=[r["version"] for r in batch],
                publish_s=published - began,
                # A worker that asks before there are new weights waits for training, not for the pull.
                pull_s=[r["pulled_at"] - max(r["asked_at"], ready[r["version"]]) for r in batch],
                weight_bytes=len(batch) * tensor_bytes(weights),
                rollout_bytes=sum(map(tensor_bytes, batch)),
                restarts=crew.restarts,
                step_s=time.monotonic() - began,
            )
            show(series)
    return series


def tensor_bytes(tree: dict[str, Any]) -> int:
    return sum(value.nbytes for value in tree.values() if isinstance(value, Tensor))


def record(series: Series, **values: Any) -> None:
    for key, value in values.items():
        series.setdefault(key, []).append(value)


def main() -> int:
    parser = argparse.ArgumentParser(description="A policy learns to sort; its weights travel through TensorLink.")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lag", type=int, default=1, help="turns a worker may be ahead; 0: in step, and reproducible")
    parser.add_argument("--kill-worker", type=int, metavar="STEP", help="kill a worker with SIGKILL at this step")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the chart and the JSON go")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.workers < 1 or options.steps < 1:
        parser.error("--workers and --steps must be at least 1")
    torch.set_num_threads(1)
    if options.role:
        return worker_main(options.role, options.seed, options.lag)
    os.environ.setdefault("TENSORLINK_NAMESPACE", f"rl-{os.getpid()}")  # several runs side by side don't meet
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with` blocks end
    options.out.mkdir(parents=True, exist_ok=True)
    with Display(options.steps) as display:
        try:
            series = train(options, display.show)
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
