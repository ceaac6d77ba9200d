"""Weights between processes: no torn read while the publisher goes on, processes that die, stop and come back."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorlink as tl
from tests.peer import Nursery, Peer, eventually, kept, nursery, say, spawn

__all__ = ["Nursery", "nursery", "spawn"]

Spawn = Callable[..., Peer]
ROUNDS, READERS, TENSORS, LENGTH = 1000, 3, 200, 1024
MIB = 1 << 20
DEADLINE_S = 60.0


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def views(flat: np.ndarray[Any, Any]) -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.from_numpy(row) for i, row in enumerate(flat)}


# What the children run


def begin(name: str, **settings: Any) -> None:
    kept["endpoint"] = tl.init(name, **settings)


def publish_once(value: int, version: int | None = None, nbytes: int = 4096, seconds: float = DEADLINE_S) -> int:
    if "publisher" not in kept:
        kept["live"] = {"w": torch.zeros(nbytes // 4, dtype=torch.int32)}
        kept["publisher"] = tl.WeightPublisher("policy", kept["live"])
    kept["live"]["w"].fill_(value)
    return int(kept["publisher"].publish(version, timeout=seconds))


def pull_once(min_version: int | None = None, nbytes: int = 4096, seconds: float = DEADLINE_S) -> tuple[int, set[int]]:
    """The version, and the values found in the one tensor."""
    if "subscriber" not in kept:
        kept["into"] = {"w": torch.zeros(nbytes // 4, dtype=torch.int32)}
        kept["subscriber"] = tl.WeightSubscriber("policy", kept["into"])
    version = kept["subscriber"].pull(min_version, timeout=seconds)
    return version, set(kept["into"]["w"].tolist())


def pull_and_tell(min_version: int) -> int:
    """Says "waiting" once the pull is waiting for the version."""
    subscriber = kept["subscriber"]
    wait = subscriber._wait

    def told(*arguments: Any) -> None:
        if kept.setdefault("told", 0) == 0:
            kept["told"] = 1
            say("waiting")
        wait(*arguments)

    subscriber._wait = told
    return int(subscriber.pull(min_version, timeout=DEADLINE_S))


def hold_newest() -> int:
    """Opens the newest version as a pull does, and doesn't let it go."""
    source = kept["subscriber"]._sources.current
    version, descriptor = source.lane.read_board("policy")
    kept["view"] = source.connection.map(descriptor, DEADLINE_S)
    return int(version)


def let_go() -> None:
    del kept["view"]


def read_all(rounds: int) -> dict[str, Any]:
    """Pulls until the last version, and checks every element of every one."""
    flat = np.zeros((TENSORS, LENGTH), np.int64)
    pattern = np.arange(TENSORS * LENGTH, dtype=np.int64).reshape(TENSORS, LENGTH)
    subscriber = tl.WeightSubscriber("policy", views(flat))
    say("ready")
    version, pulls, fds = 0, 0, 0
    while version < rounds:
        new = subscriber.pull(min_version=version + 1, timeout=DEADLINE_S)
        assert new > version, (new, version)
        version, pulls = new, pulls + 1
        wrong = np.flatnonzero((flat != pattern + version * 1_000_000).any(axis=1))
        assert not wrong.size, f"version {version} is torn in {wrong.size} tensors, such as {flat[wrong[0]][:4]}"
        fds = fds or open_fds()
    return {"pulls": pulls, "fds": open_fds() - fds}


# Tests


@pytest.fixture(autouse=True)
def _no_current_endpoint() -> Iterator[None]:
    yield
    tl.shutdown()


def test_no_torn_read_in_1000_rounds(spawn: Spawn) -> None:
    readers = [spawn() for _ in range(READERS)]
    with tl.init("trainer", pool_bytes=64 * MIB) as trainer:
        for i, reader in enumerate(readers):
            reader.call(begin, f"reader-{i}")
            reader.start(read_all, ROUNDS)
        flat = np.zeros((TENSORS, LENGTH), np.int64)
        pattern = np.arange(TENSORS * LENGTH, dtype=np.int64).reshape(TENSORS, LENGTH)
        publisher = tl.WeightPublisher("policy", views(flat))
        for reader in readers:
            assert reader.hear() == "ready"
        base: dict[str, Any] = {}
        for version in range(1, ROUNDS + 1):
            np.add(pattern, version * 1_000_000, out=flat)
            assert publisher.publish() == version
            if version == ROUNDS // 10:
                base = {"fds": open_fds()}
        results = [reader.finish(DEADLINE_S) for reader in readers]
        streams = len(results) - 1  # between hosts the others may read from it
        assert all(result["pulls"] > 1 and result["fds"] <= streams for result in results), results
        eventually(lambda: trainer.stats()["pool"]["blocks"] == 2, "only two versions are left")
        pool = trainer.stats()["pool"]
        assert pool["handles"] == 2 and pool["parked_bytes"] == 0 and not pool["holders"]
        assert open_fds() <= base["fds"] + streams, "none for each version"


def test_a_late_subscriber_and_one_that_was_killed_get_the_newest(spawn: Spawn) -> None:
    trainer, worker = spawn(), spawn()
    trainer.call(begin, "trainer")
    for step in (1, 2, 3):
        trainer.call(publish_once, step)
    worker.call(begin, "worker")
    assert worker.call(pull_once) == (3, {3})
    worker.kill()
    trainer.call(publish_once, 4)
    again = spawn()
    again.call(begin, "worker")
    assert again.call(pull_once) == (4, {4})
    assert trainer.call(publish_once, 5) == 5
    assert again.call(pull_once) == (5, {5})


def test_a_publisher_that_restarts_goes_on_at_its_step(spawn: Spawn) -> None:
    trainer, worker = spawn(), spawn()
    trainer.call(begin, "trainer")
    worker.call(begin, "worker")
    trainer.call(publish_once, 7, version=70)
    assert worker.call(pull_once) == (70, {7})
    trainer.kill()
    with pytest.raises(tl.PeerLostError):
        while True:  # over a network the end of the stream is seen a moment later
            worker.call(pull_once)
    with pytest.raises(tl.PeerLostError, match="has gone"):  # this one waited for a successor
        worker.call(pull_once, seconds=0.1)
    worker.start(pull_once)
    again = spawn()
    again.call(begin, "trainer")
    again.call(publish_once, 6, version=60)  # from its last checkpoint
    assert worker.finish() == (60, {6})
    again.call(publish_once, 7)
    assert worker.call(pull_once, min_version=61) == (61, {7})


def test_a_pull_follows_a_publisher_that_is_back_already(spawn: Spawn) -> None:
    trainer, worker, again = spawn(), spawn(), spawn()
    trainer.call(begin, "trainer")
    worker.call(begin, "worker")
    trainer.call(publish_once, 1)
    assert worker.call(pull_once) == (1, {1})
    trainer.kill()
    again.call(begin, "trainer")
    again.call(publish_once, 2)
    assert worker.call(pull_once) == (1, {2})  # a version of another incarnation is another one


def test_a_restart_ends_a_wait_for_a_version(spawn: Spawn) -> None:
    trainer, worker, again = spawn(), spawn(), spawn()
    trainer.call(begin, "trainer")
    worker.call(begin, "worker")
    trainer.call(publish_once, 1)
    assert worker.call(pull_once) == (1, {1})
    worker.start(pull_and_tell, 50)
    assert worker.hear() == "waiting"
    worker.signal(signal.SIGSTOP)
    trainer.kill()
    again.call(begin, "trainer")
    again.call(publish_once, 5, version=60)
    worker.signal(signal.SIGCONT)
    with pytest.raises(tl.PeerRestartedError):
        worker.finish()
    assert worker.call(pull_once, min_version=50) == (60, {5})


def test_the_death_of_the_publisher_ends_a_wait(spawn: Spawn) -> None:
    trainer, worker = spawn(), spawn()
    trainer.call(begin, "trainer")
    worker.call(begin, "worker")
    trainer.call(publish_once, 1)
    worker.call(pull_once)
    worker.start(pull_and_tell, 50)
    assert worker.hear() == "waiting"
    trainer.kill()
    with pytest.raises(tl.PeerLostError):
        worker.finish()


@pytest.mark.shm
def test_a_slow_reader_makes_publish_wait_and_fail_with_its_name(spawn: Spawn) -> None:
    worker = spawn()
    nbytes = 3 * MIB
    worker.call(begin, "slow-worker")
    with tl.init("trainer", pool_bytes=2 * nbytes + MIB) as trainer:
        publish_once(1, nbytes=nbytes)
        try:
            assert worker.call(pull_once, nbytes=nbytes) == (1, {1})
            assert worker.call(hold_newest) == 1
            publish_once(2)
            worker.signal(signal.SIGSTOP)
            with pytest.raises(tl.PoolExhaustedError, match=rf"slow-worker \(pid {worker.pid}\) holds 1 view"):
                publish_once(3, seconds=0.2)
            worker.signal(signal.SIGCONT)
            assert kept["publisher"].version == 2
            assert worker.call(pull_once) == (2, {2})  # the last one is still there to be read
            worker.start(let_go)
            assert publish_once(3) == 3  # waits for the reader
            worker.finish()
            assert worker.call(pull_once) == (3, {3})
            eventually(lambda: trainer.stats()["pool"]["parked_bytes"] == 0, "nothing is held")
        finally:
            kept.clear()
