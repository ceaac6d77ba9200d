"""`rl_weight_sync.py --ray`: trainer and workers are actors. Ray starts a killed worker again; nobody else does anything.

Where nodes have the label `role` (`ray start --labels role=trainer`, `role=rollout`), each goes to its own; elsewhere, and
on one node, anywhere. The labels of a node are those of its peers, so `tl.peers()` says where everybody is.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import queue
from collections.abc import Iterator
from typing import Any

import ray
from rl_loop import GRACE_S, Crew, train, work

import tensorlink as tl
from tensorlink.errors import PeerLostError, TensorLinkError


def placed(role: str) -> dict[str, Any]:
    """Options of an actor that prefers the nodes of its role."""
    return {"label_selector": {"role": role}, "fallback_strategy": [{"label_selector": {}}]}


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Worker:
    @ray.method(retry_exceptions=[TensorLinkError])
    def work(self, name: str, seed: int, lag: int) -> None:
        """Until the trainer has left. Where this process dies, Ray calls it again in the next one."""
        with contextlib.suppress(PeerLostError):
            work(name, seed, lag)


class Workers(Crew):
    """Workers that Ray looks after."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._actors: dict[str, Any] = {}
        self._work: dict[str, Any] = {}
        self._down: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def start(self, name: str) -> None:
        if name not in self._actors:
            actor = Worker.options(name=name, **placed("rollout")).remote()  # type: ignore[attr-defined]
            self._actors[name] = actor
            self._work[name] = actor.work.remote(name, self.seed(name), self.options.lag)

    def joined(self) -> None:
        tl.on("peer_down", lambda peer, reason: self._down.put((peer.name, peer.pid)))

    def ended(self) -> list[tuple[str, int]]:
        down = [self._down.get() for _ in range(self._down.qsize())]
        return [(name, pid) for name, pid in down if name in self._actors]

    def kill(self, name: str) -> None:
        ray.kill(self._actors[name], no_restart=False)

    def __exit__(self, *_: object) -> None:
        here = [self._work[name] for name in self.awaited]
        if here:
            ray.wait(here, num_returns=len(here), timeout=GRACE_S)
        for actor in self._actors.values():
            ray.kill(actor)


@ray.remote(num_cpus=0)
class Trainer:
    @ray.method(num_returns="streaming")
    def train(self, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
        for step in train(options, Workers(options)):
            yield {**step, "places": {peer.name: place(peer) for peer in tl.peers()}}


def place(peer: tl.PeerInfo) -> str:
    return f"node {peer.labels['ray.io/node-id'][:8]}, role {peer.labels.get('role', 'any')}"


def train_in_ray(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What happens at each step, in the Ray that RAY_ADDRESS names, or in one of its own on this machine."""
    ray.init(logging_level=logging.ERROR, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
    try:
        trainer = Trainer.options(name="trainer", **placed("trainer")).remote()  # type: ignore[attr-defined]
        told: dict[str, str] = {}
        for ref in trainer.train.remote(options):
            step = ray.get(ref)
            for name, where in step["places"].items():
                if told.get(name) != where:
                    print(f"{name}: {where}", flush=True)
                    told[name] = where
            yield step
    finally:
        ray.shutdown()
