"""Actors that are killed at any time while tensors go between them, and what the others must see of it."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import ray
import torch

import tensorlink as tl
from tests import leaks
from tests.integrations.ray import actors
from tests.integrations.ray.clusters import ROOT

COUNT = 4  # actors
REFS, SIZE = 3, 50_000  # of a round: values, and float64 of each, above the size that is copied
LONGEST_S = 0.02


class Kills:
    """Rounds of transfers between two of the actors and the driver, in each of which one of all is killed at a random moment.

    Calls are retried by Ray, so whatever isn't about the tensors of a dead actor must succeed.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        make = actors.Actor.options(max_restarts=-1, max_task_retries=-1)
        self._actors = [make.remote() for _ in range(COUNT)]
        self._pids: dict[int, int] = {i: self._pid(i) for i in range(COUNT)}
        """Of those that aren't on their way back."""
        self.lost = 0
        """How many values were lost with their actor."""

    def _pid(self, i: int) -> int:
        return ray.get(self._actors[i].call.remote(actors.pid), timeout=100)  # type: ignore[no-any-return]

    def round(self) -> None:
        source, reader, victim = (self._random.randrange(COUNT) for _ in range(3))
        if source == reader:
            reader = (source + 1) % COUNT
        self._pids[victim] = self._pid(victim)
        refs = [self._actors[source].make.remote(torch.full, (SIZE,), float(i)) for i in range(REFS)]
        read = self._actors[reader].total.remote(*refs)
        select.select([], [], [], self._random.uniform(0, LONGEST_S))  # any time, not a wait for something
        os.kill(self._pids.pop(victim), signal.SIGKILL)
        wanted = float(SIZE * sum(range(REFS)))
        for get in (
            lambda: ray.get(read, timeout=100),
            lambda: float(sum(t.sum() for t in ray.get(refs, timeout=100))),
        ):
            try:
                assert get() == wanted
            except tl.PeerLostError as error:
                assert victim == source, f"{error} and its owner wasn't killed"
                assert error.peer.startswith(f"Actor-{self._actors[source]._actor_id.hex()[:8]}"), error.peer
                self.lost += 1
        assert all(leaks.alive(pid) for pid in self._pids.values()), "another was killed too"

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


DRIVER = """
import os, sys, ray
from tests.integrations.ray import actors
hook = {"worker_process_setup_hook": "tensorlink.integrations.ray.register"}
ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False, runtime_env=hook)
lent, reader = ray.get_actor("lent"), ray.remote(num_cpus=0, enable_tensor_transport=True)(actors.Reader).remote()
refs = [ref for _ in range(20) for ref in ray.get(lent.call.remote(actors.put, actors.ranged, 50_000))]
print(ray.get(reader.total.remote(refs[0])), flush=True)
reading = [reader.total.remote(ref) for ref in refs]
os._exit(0)
"""


def brief_driver() -> subprocess.CompletedProcess[str]:
    """Another driver of this Ray namespace, which exits while tensors go from the actor `lent` to one of its own."""
    context = ray.get_runtime_context()
    return subprocess.run(
        [sys.executable, "-c", DRIVER, context.gcs_address, context.namespace],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
