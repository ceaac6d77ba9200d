"""A tree of many small tensors, process to process."""

from __future__ import annotations

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.conftest import Bench
from bench.far import TOKEN
from bench.measure import ROUNDS, Race, each

COUNT, NBYTES = 10_000, 4096


def per_tensor_us(bench: Bench, name: str, tree: dict[str, torch.Tensor], repeats: int) -> float:
    end = bench.ends[name]
    token = torch.zeros_like(TOKEN)
    like = tree if name == "gloo" else None
    bench.far.start("sink", name, like, repeats + 1, False)

    def deliver() -> None:
        end.send(tree)
        end.recv_into(token)

    elapsed = each(deliver, repeats) * 1e6
    bench.far.result()
    return elapsed / len(tree)


def test_10000_tensors(bench: Bench, benchmark: BenchmarkFixture) -> None:
    race = Race(benchmark, "10,000 tensors of 4 KiB, send and recv", "µs a tensor")
    tree = {f"layers.{i}.weight": torch.full((NBYTES // 4,), float(i)) for i in range(COUNT)}
    small = {name: tree[name] for name in list(tree)[:500]}  # Gloo sends one by one: its share for 500 is the same
    race.enter("gloo, one by one", lambda: per_tensor_us(bench, "gloo", small, 1))
    race.enter("tensorlink", lambda: per_tensor_us(bench, "tensorlink", tree, 5))
    race.run(rounds=ROUNDS)
    race.limit("tensorlink", 1.5, what="view")
    race.versus("gloo, one by one", what="view")
