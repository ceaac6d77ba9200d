"""Between two hosts, over TCP: bulk, latency, trees, weights, and how long a cancel takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench import across, ucx
from bench.across import Across
from bench.measure import OURS, ROUNDS, Race
from tests.hosts import Network, networks
from tests.peer import nursery

__all__ = ["networks", "nursery"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = {"4 KiB": 4 * KIB, "64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB, "256 MiB": 256 * MIB, "1 GiB": GIB}
SENT = "tensorlink, send and recv"
PAUSE_S = 300e-6
QWEN = {"vocabulary": 152064 // 4, "hidden": 3584 // 4, "inner": 18944 // 4, "kv": 512 // 4}


@pytest.fixture(scope="module")
def pair(networks: Callable[[int], Network]) -> Iterator[Across]:
    made = Across(networks(2))
    yield made
    made.close()


@pytest.mark.parametrize("size", SIZES)
def test_bulk(size: str, pair: Across, benchmark: BenchmarkFixture) -> None:
    nbytes = SIZES[size]
    race = Race(benchmark, f"two hosts, {size}", "ms")
    count = max(2, min(200, 512 * MIB // nbytes))
    missing = pair.missing()
    for why in missing:
        race.note(why)
    has = {name: not any(why.startswith(f"no {name}") for why in missing) for name in ("iperf3", "UCX", "NIXL")}
    if has["iperf3"]:
        race.enter("iperf3 -l 1M", lambda: nbytes / pair.iperf_bytes_per_s() * 1e3)
    race.enter(OURS, lambda: pair.get_ms(nbytes, count))
    race.enter(SENT, lambda: pair.delivery_ms("tensorlink", nbytes, count))
    race.enter("gloo", lambda: pair.delivery_ms("gloo", nbytes, min(count, 50)))
    for segments in [False, True] if has["UCX"] else []:
        for test in ("tag_bw", "ucp_get"):
            race.enter(f"ucx {test}{_cut(segments)}", partial(pair.ucx_ms, test, nbytes, segments))
    for operation, segments in NIXL_WAYS if has["NIXL"] else []:
        measure = partial(pair.nixl_ms, operation, nbytes, segments, min(count, 20))
        race.enter(f"nixl {operation}{_cut(segments)}", measure)
    race.run(rounds=ROUNDS)
    _compare(race, aim=size == "256 MiB")


NIXL_WAYS = (("READ", False), ("READ", True), ("WRITE", False))


def _cut(segments: bool) -> str:
    return ", 256 KiB segments" if segments else ""


def _compare(race: Race, aim: bool) -> None:
    """Targets count for one size; the others are for orientation."""
    for ours, what in ((OURS, "get(out=)"), (SENT, "send, recv(out=)")):
        if "iperf3 -l 1M" in race.figures:
            race.versus("iperf3 -l 1M", what=what, ours=ours, target=0.85 if aim and ours == OURS else None)
        race.versus("gloo", what=what, ours=ours, target=1.3 if aim else None)
    nixl = [name for name in race.figures if name.startswith("nixl")]
    best = min(nixl, key=race.median, default=None)
    for name in race.figures:
        if name.startswith(("ucx", "nixl")):
            sent = "tag" in name
            what, ours = ("send, recv(out=)", SENT) if sent else ("get(out=)", OURS)
            race.versus(name, what=what, ours=ours, target=1.0 if aim and name == best else None)


@pytest.mark.parametrize("nbytes", [64, 1024])
def test_half_round_trip(nbytes: int, pair: Across, benchmark: BenchmarkFixture) -> None:
    race = Race(benchmark, f"two hosts, {nbytes} B, half round trip", "µs")

    def measure(pause_s: float) -> float:
        return float(pair.both(across.echo, across.half_trip, nbytes, 1000, pause_s)) * 1e6

    race.enter(OURS, partial(measure, 0.0))
    race.enter("tensorlink, asleep", partial(measure, PAUSE_S))
    race.enter("gloo", lambda: pair.delivery_ms("gloo", nbytes, 500) / 2 * 1e3)
    if ucx.available():
        fabric = ucx.Fabric(pair.near_host.command, pair.far_host.command, pair.near_host.ip, "tcp")
        race.enter("ucx tcp", partial(ucx.half_round_trip_us, fabric, nbytes, 1000))
    race.run(rounds=ROUNDS)
    race.limit(OURS, 7.0, what="both wait actively")
    race.limit("tensorlink, asleep", 35.0, what="both asleep")
    race.versus("gloo", what="both wait actively")
    if ucx.available():
        race.versus("ucx tcp", what="both wait actively")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_tree(kind: str, pair: Across, benchmark: BenchmarkFixture) -> None:
    race = Race(benchmark, f"two hosts, tensors of 4 KiB, {kind}", "µs a tensor")
    counts = {"1,000": 1000, "10,000": 10_000, "100,000": 100_000}

    def measure(size: int) -> float:
        repeats = max(1, min(10, 50_000 // size))
        return float(pair.both(across.sink_tree, across.deliver_tree, kind, size, repeats)) * 1e6

    for name, size in counts.items():
        race.enter(OURS if name == "10,000" else name, partial(measure, size))
    if (iperf := "iperf3 -l 1M") and not any("iperf3" in why for why in pair.missing()):
        race.enter(iperf, lambda: 4 * KIB / pair.iperf_bytes_per_s() * 1e6)  # the bytes alone
    race.run(rounds=ROUNDS)
    for name in counts:
        race.limit(OURS if name == "10,000" else name, 1.5, what=f"{name}, send and recv")
    if iperf in race.figures:
        race.versus(iperf, what="10,000, against the bytes alone")


def qwen() -> dict[str, torch.Tensor]:
    """The names of Qwen2.5-7B's tensors; every dimension is a quarter of its own, so that all are 0.9 GiB."""
    vocabulary, hidden, inner, kv = QWEN.values()
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in (f"model.layers.{i}" for i in range(28)):
        for name, rows in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{layer}.self_attn.{name}.weight"] = (rows, hidden)
            shapes[f"{layer}.self_attn.{name}.bias"] = (rows,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, hidden)
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    return {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def test_weights(pair: Across, benchmark: BenchmarkFixture) -> None:
    race = Race(benchmark, "two hosts, weights of 339 tensors, 0.9 GiB", "ms")
    nbytes = pair.far.call(across.publish, qwen, "qwen")
    pair.near.call(across.subscribe, qwen, "qwen")
    pulls: list[float] = []

    def once() -> float:
        start = time.perf_counter()
        pair.far.call(across.publish, qwen, "qwen")
        begin, end = pair.near.call(across.pull, timeout=across.CALL_S)
        pulls.append((end - begin) * 1e3)
        return float(end - start) * 1e3

    race.enter(OURS, once)
    if not any("iperf3" in why for why in pair.missing()):
        race.enter("iperf3 -l 1M", lambda: nbytes / pair.iperf_bytes_per_s() * 1e3)
    race.run(rounds=ROUNDS)
    race.figures["pull"] = pulls[1:]
    for ours, what in ((OURS, "publish and pull"), ("pull", "pull")):
        race.rate(ours, nbytes, what=what)
        if "iperf3 -l 1M" in race.figures:
            race.versus("iperf3 -l 1M", what=what, ours=ours)
    for process in (pair.near, pair.far):
        process.call(across.close_weights)


def test_cancel(pair: Across, benchmark: BenchmarkFixture) -> None:
    race = Race(benchmark, "two hosts, cancel of a read of 1 GiB to its fence", "ms")
    ref = pair.far.call(across.put, GIB)
    race.enter(OURS, lambda: float(pair.near.call(across.cancel, ref, 10, timeout=across.CALL_S)) * 1e3)
    race.run(rounds=ROUNDS)
    race.limit(OURS, 1.0, what="iget(out=)")
    pair.far.call(across.drop)
