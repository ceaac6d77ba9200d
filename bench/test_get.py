"""Zero-copy reads of tensors that lie in the other process's pool and are mapped already."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import tensorlink as tl
from bench.conftest import Bench
from bench.measure import ROUNDS, Race, each

SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "256 MiB": 256 << 20, "2 GiB": 2 << 30}
COUNT = 200


def get_us(ref: tl.TensorRef) -> tuple[float, float]:
    """Medians of `get` alone, and of `get` with the drop of what it gave."""
    alone, both = [], []
    for _ in range(COUNT):
        begin = time.perf_counter_ns()
        view = tl.get(ref)
        got = time.perf_counter_ns()
        del view
        dropped = time.perf_counter_ns()
        alone.append(got - begin)
        both.append(dropped - begin)
    return statistics.median(alone) / 1e3, statistics.median(both) / 1e3


@pytest.fixture
def refs(bench: Bench) -> Iterator[dict[str, tl.TensorRef]]:
    made = {name: tl.TensorRef.from_bytes(bench.far.call("put", nbytes)) for name, nbytes in SIZES.items()}
    yield made
    bench.far.call("drop")


def test_get(refs: dict[str, tl.TensorRef], benchmark: BenchmarkFixture) -> None:
    race = Race(benchmark, "get of a mapped pool tensor", "µs")
    for ref in refs.values():
        assert float(tl.get(ref).sum(dtype=torch.float64)) == ref.nbytes // 4  # maps it, and all its pages
    drops: dict[str, list[float]] = {name: [] for name in SIZES}

    def measure(name: str) -> float:
        alone, both = get_us(refs[name])
        drops[name].append(both)
        return alone

    for name in SIZES:
        race.enter("tensorlink" if name == "2 GiB" else name, partial(measure, name))
    race.run(rounds=ROUNDS)
    for name in SIZES:
        race.limit("tensorlink" if name == "2 GiB" else name, 5.0, what=f"{name}, get")
    race.versus("1 MiB", what="2 GiB, get, as a multiple", target=1.25, at_most=True)
    for name, figures in drops.items():
        race.figures[f"{name}, get and drop"] = figures
        race.limit(f"{name}, get and drop", 5.0, what=f"{name}, get and drop")


@pytest.mark.parametrize("name", ["256 MiB", "2 GiB"])
def test_reading_all(name: str, refs: dict[str, tl.TensorRef], benchmark: BenchmarkFixture) -> None:
    race = Race(benchmark, f"reading all of {name}", "ms")
    private = torch.ones(SIZES[name] // 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    view = tl.get(refs[name])
    race.enter("private warm memory", lambda: each(private.sum, 3) * 1e3)
    race.enter("tensorlink", lambda: each(view.sum, 3) * 1e3)
    try:
        race.run(rounds=ROUNDS)
    finally:
        torch.set_num_threads(threads)
    race.versus("private warm memory", what=name, target=0.9)
