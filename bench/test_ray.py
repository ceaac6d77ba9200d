"""Actor to actor in Ray: its object store, its direct transport with Gloo, NIXL and us, and handles returned from methods."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.measure import ROUNDS, Race

pytest.importorskip("ray")
from bench.ray_actors import VALUES, Pair

REPEATS = {"1 KiB": 50, "1 MiB": 30, "256 MiB": 3}
HANDLES = "tl.put, tl.get"
WAYS = {
    "tensorlink": "by_tensorlink",
    HANDLES: "handle",
    "object store": "plain",
    "rdt gloo": "by_gloo",
    "rdt that moves nothing": "by_nothing",
    "rdt nixl": "by_nixl",
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="tl-ray-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # nobody else can reach it, and a token would stay in the user's home
        patch.setenv("XDG_RUNTIME_DIR", folder)
        made = Pair(Path(folder) / "ray")
        yield made
        made.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VALUES)
def test_actor_to_actor(pair: Pair, benchmark: BenchmarkFixture, name: str) -> None:
    race = Race(benchmark, f"Ray, actor to actor, {name}", "ms")
    for entry, way in WAYS.items():
        if entry == "rdt nixl" and pair.without_nixl:
            race.note(pair.without_nixl)
            continue
        race.enter(entry, partial(pair.milliseconds, way, name, REPEATS.get(name, 5)))
    race.run(rounds=ROUNDS)
    race.versus("rdt gloo", what="RDT", target=5 if name == "256 MiB" else 1)
    race.versus("object store", what="RDT")
    race.versus("object store", what=HANDLES, ours=HANDLES, target=1)
    race.versus("rdt that moves nothing", what="RDT")
    if not pair.without_nixl:
        race.versus("rdt nixl", what="RDT", target=5 if name == "256 MiB" else None)
