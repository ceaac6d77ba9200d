"""The synchronisation of `rl_weight_sync.py`: what a worker and the trainer do, whoever starts them."""

from __future__ import annotations

import argparse
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from rl_policy import DIGITS, GROUP, LENGTH, PROMPTS, Policy, Rollout, grade, improve, sample
from torch import Tensor

import tensorlink as tl
from tensorlink.errors import TransferTimeoutError

LEARNING_RATE, WARM_UP = 2.5e-3, 10
STALE = 8  # rollouts sampled with weights older than this many versions are dropped
TICK_S, GRACE_S, PATIENCE_S = 0.1, 10.0, 120.0  # between looks at the workers; wait for the rest; wait for the first
RETRIES = 3  # starts of a worker that fail in a row before the trainer gives up


def work(name: str, seed: int, lag: int) -> None:
    """A rollout worker: pull weights, sample, send, until the trainer is gone, which raises PeerLostError.

    A worker may be `lag` turns ahead of the weights, so that it samples while the trainer computes the next ones. One
    that was started again begins at the newest version.
    """
    torch.set_num_threads(1)
    policy = Policy()
    with tl.init(name):
        weights = tl.WeightSubscriber("policy", into=policy.state_dict())
        turn = weights.pull()
        while True:
            asked_at = time.time()
            version = weights.pull(min_version=max(1, turn - lag))
            pulled_at = time.time()
            torch.manual_seed(seed + 1_000_003 * turn)
            prompts = torch.randint(DIGITS, (PROMPTS, LENGTH))
            answers, logps = sample(policy, prompts)
            rollout = {
                "worker": name,
                "pid": os.getpid(),
                "version": version,
                "asked_at": asked_at,  # one clock for all processes of a host; between hosts as good as they keep it
                "pulled_at": pulled_at,
                "prompts": prompts,
                "answers": answers,
                "logps": logps,
                "grades": grade(prompts.repeat_interleave(GROUP, dim=0), answers),
            }
            tl.send(rollout, "trainer", tag="rollout")
            turn = max(turn, version) + 1


class Crew(ABC):
    """The workers: who has sent what, and whom a step waits for. As a context it starts them, and leaves none behind."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.names = [f"worker-{i}" for i in range(options.workers)]
        self.awaited = set(self.names)
        """Whom a step waits for: not for a worker that is on its way back, or was slow and has not been heard since."""
        self.inbox: dict[str, deque[Rollout]] = {name: deque() for name in self.names}
        self.restarts = 0
        self._dead: set[tuple[str, int]] = set()  # names and process ids
        self._failures = dict.fromkeys(self.names, 0)  # how often in a row each died before it had sent anything

    def __enter__(self) -> Crew:
        for name in self.names:
            self.start(name)
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """The trainer has left by now, so workers end by themselves; those on their way, or stuck, are made to."""

    @abstractmethod
    def start(self, name: str) -> None:
        """Starts a worker, or sees to it that one which has ended starts again."""

    @abstractmethod
    def kill(self, name: str) -> None:
        """Kills a worker, without a word."""

    @abstractmethod
    def ended(self) -> list[tuple[str, int]]:
        """Names and process ids of workers that have died since the last time."""

    def joined(self) -> None:  # noqa: B027 - not all need it
        """Called once the trainer is a peer."""

    def seed(self, name: str) -> int:
        return 1_000 * int(self.options.seed) + self.names.index(name)

    def accept(self, rollout: Rollout, step: int) -> None:
        name = rollout["worker"]
        if step - rollout["version"] <= STALE:
            self.inbox[name].append(rollout)
        if (name, rollout["pid"]) not in self._dead:  # else these are the last words of one that died
            self.awaited.add(name)
            self._failures[name] = 0

    def look_after(self) -> None:
        """Has dead workers start again, under their old names. Raises: RuntimeError: one can't even begin."""
        for name, pid in self.ended():
            self._dead.add((name, pid))
            self.awaited.discard(name)
            self._failures[name] += 1
            if self._failures[name] > RETRIES:
                raise RuntimeError(f"{name} ended {RETRIES + 1} times in a row before it sent anything")
            self.restarts += 1
            self.start(name)


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


def train(options: argparse.Namespace, crew: Crew) -> Iterator[dict[str, Any]]:
    """The trainer: publish, gather, improve. Yields what happened at each step, as `rl_report.Series` has it."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))
    ready: dict[int, float] = {}
    with crew, tl.init("trainer"):  # on the way out the endpoint closes first, and the workers notice
        crew.joined()
        weights = policy.state_dict()
        publisher = tl.WeightPublisher("policy", weights)
        for step in range(1, options.steps + 1):
            ready[step], began = time.time(), time.monotonic()
            publisher.publish(version=step)
            published = time.monotonic()
            if step == options.kill_worker:
                crew.kill(crew.names[0])
            batch = gather(crew, step)
            for group in optimizer.param_groups:  # a short warm-up, then down to a tenth
                group["lr"] = LEARNING_RATE * min(step / WARM_UP, 1 - 0.9 * step / options.steps)
            improve(policy, optimizer, batch)
            grades = torch.cat([r["grades"] for r in batch])
            yield {
                "step": step,
                "reward": float(grades.mean()),
                "exact": float(grades.amin(dim=1).mean()),
                "workers": [r["worker"] for r in batch],
                "versions": [r["version"] for r in batch],
                "publish_s": published - began,
                # A worker that asks before there are new weights waits for training, not for the pull.
                "pull_s": [max(0.0, r["pulled_at"] - max(r["asked_at"], ready[r["version"]])) for r in batch],
                "weight_bytes": len(batch) * tensor_bytes(weights),
                "rollout_bytes": sum(map(tensor_bytes, batch)),
                "restarts": crew.restarts,
                "step_s": time.monotonic() - began,
            }


def tensor_bytes(tree: dict[str, Any]) -> int:
    return sum(value.nbytes for value in tree.values() if isinstance(value, Tensor))
