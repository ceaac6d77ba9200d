"""What a choice costs between two machines of 8 GPUs and 16 NICs, four transports. Cold: of ends never asked before."""

from __future__ import annotations

from typing import Any

import pytest

from tensorlink.paths import End, choose
from tensorlink.topology import Device, Topology
from tensorlink.topology import Link as Wire
from tensorlink.types import Link

LINKS = (
    Link("cuda", 400e9, 5e-6, "host", devices=("gpu",), over="gpu"),
    Link("rdma", 40e9, 4e-6, "network", devices=("cpu", "gpu"), stripes=True),
    Link("shm", 20e9, 2e-6, "host"),
    Link("tcp", 3e9, 30e-6, "network"),
)
NBYTES = 256 << 20


def machine() -> Topology:
    devices = [Device(name=f"CPU{node}", kind="cpu", numa_node=node) for node in range(2)]
    devices += [Device(name=f"GPU{index}", kind="gpu") for index in range(8)]
    devices += [Device(name=f"mlx5_{index}", kind="nic", bytes_per_s=50 * 10**9) for index in range(16)]
    wires = [
        Wire(a=a.name, b=b.name, link_class=_class(a, b)) for at, a in enumerate(devices) for b in devices[at + 1 :]
    ]
    return Topology(devices=tuple(devices), links=tuple(wires))


def _class(a: Device, b: Device) -> str:
    if a.kind == b.kind == "gpu":
        return "NV18"
    near = (a.kind, b.kind) == ("gpu", "nic") and int(b.name.removeprefix("mlx5_")) // 2 == int(a.name[3:])
    return "PIX" if near else "SYS"


def ends(there: str) -> tuple[End, End]:
    return End("one", LINKS, machine(), "GPU1"), End(there, LINKS, machine(), "GPU5")


@pytest.mark.parametrize("there", ["one", "other"])
def test_warm(benchmark: Any, there: str) -> None:
    a, b = ends(there)
    report = benchmark.pedantic(choose, (a, b, NBYTES), rounds=300, iterations=100, warmup_rounds=3)
    assert report.chosen.transport == ("cuda" if there == "one" else "rdma")
    assert benchmark.stats.stats.min < 20e-6


@pytest.mark.parametrize("there", ["one", "other"])
def test_cold(benchmark: Any, there: str) -> None:
    benchmark.pedantic(choose, setup=lambda: ((*ends(there), NBYTES), {}), rounds=100)
