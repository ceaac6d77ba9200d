"""1 KiB there and back: half the round trip, median."""

from __future__ import annotations

from functools import partial

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench import ucx
from bench.conftest import Bench
from bench.measure import ROUNDS, Race, each

COUNTS = {"tensorlink": 5000, "gloo": 500, "mp queue": 150}
INTO = "tensorlink, out="


def half_round_trip_us(bench: Bench, name: str, count: int, into: bool) -> float:
    end = bench.ends[name]
    tensor = torch.arange(256, dtype=torch.float32)
    out = torch.zeros_like(tensor)
    bench.far.start("echo", name, tensor, count + 1, into)

    def trip() -> None:
        end.send(tensor)
        if into:
            end.recv_into(out)
        else:
            end.recv(tensor)

    half = each(trip, count) / 2 * 1e6
    bench.far.result()
    return half


def test_1_kib(bench: Bench, benchmark: BenchmarkFixture) -> None:
    race = Race(benchmark, "1 KiB, half round trip", "µs")
    for name, count in COUNTS.items():
        race.enter(name, partial(half_round_trip_us, bench, name, count, name == "gloo"))
    race.enter(INTO, lambda: half_round_trip_us(bench, "tensorlink", COUNTS["tensorlink"], True))
    if ucx.available():
        race.enter("ucx posix", ucx.half_round_trip_us)
    race.run(rounds=ROUNDS)
    race.versus("gloo", what="new tensor", target=30)
    race.versus("gloo", what="out=", target=30, ours=INTO)
    race.limit("tensorlink", 2.0, what="new tensor")
    race.limit(INTO, 2.0, what="out=")
    race.versus("mp queue", what="new tensor")
    if ucx.available():
        race.versus("ucx posix", what="out=", ours=INTO)
