"""A private tensor of 256 MiB, warm: until the other process has it all."""

from __future__ import annotations

import ctypes
import threading

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench import ucx
from bench.conftest import Bench
from bench.far import TOKEN
from bench.measure import ROUNDS, Race, each

NBYTES = 256 << 20
REPEATS = 3
INTO = "tensorlink, out="


def delivery_ms(bench: Bench, name: str, tensor: torch.Tensor, into: bool) -> float:
    end = bench.ends[name]
    token = torch.zeros_like(TOKEN)
    bench.far.start("sink", name, tensor[:0] if name == "tensorlink" and not into else tensor, REPEATS + 1, into)

    def deliver() -> None:
        end.send(tensor)
        end.recv_into(token)

    elapsed = each(deliver, REPEATS) * 1e3
    bench.far.result()
    return elapsed


class Memcpy:
    """The C library's copy, which ctypes runs without the GIL."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._from = tensor
        self._to = torch.zeros_like(tensor)

    def copy(self, begin: int, nbytes: int) -> None:
        ctypes.memmove(self._to.data_ptr() + begin, self._from.data_ptr() + begin, nbytes)

    def one_thread_ms(self) -> float:
        return each(lambda: self.copy(0, NBYTES), REPEATS) * 1e3

    def two_threads_ms(self) -> float:
        def both() -> None:
            other = threading.Thread(target=self.copy, args=(0, NBYTES // 2))
            other.start()
            self.copy(NBYTES // 2, NBYTES // 2)
            other.join()

        return each(both, REPEATS) * 1e3


def test_256_mib(bench: Bench, benchmark: BenchmarkFixture) -> None:
    race = Race(benchmark, "256 MiB private tensor, send and recv", "ms")
    tensor = torch.arange(NBYTES // 4, dtype=torch.float32)
    memcpy = Memcpy(tensor)
    race.enter("memcpy", memcpy.one_thread_ms)
    race.enter("tensorlink", lambda: delivery_ms(bench, "tensorlink", tensor, False))
    race.enter(INTO, lambda: delivery_ms(bench, "tensorlink", tensor, True))
    race.enter("memcpy, 2 threads", memcpy.two_threads_ms)
    race.enter("gloo", lambda: delivery_ms(bench, "gloo", tensor, True))
    race.enter("mp queue", lambda: delivery_ms(bench, "mp queue", tensor, False))
    if ucx.available():
        race.enter("ucx posix", lambda: ucx.delivery_ms(NBYTES))
    race.run(rounds=ROUNDS)
    race.versus("memcpy", what="view", target=1.4)
    race.versus("memcpy, 2 threads", what="view")
    race.versus("gloo", what="view", target=5)
    race.versus("mp queue", what="view")
    if ucx.available():
        race.versus("ucx posix", what="view", target=1.7)
    race.versus("memcpy", what="out=", ours=INTO)
    race.versus("gloo", what="out=", ours=INTO)
