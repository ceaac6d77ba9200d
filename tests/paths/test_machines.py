"""Paths over machines that others recorded. What is expected was read off the recorded text and reasoned from the hardware."""

from __future__ import annotations

import pytest

from tensorlink.paths import End, PathReport, choose
from tensorlink.topology import Topology, read
from tensorlink.types import Link
from tests.topology.cases import CASES

pytestmark = pytest.mark.skipif(not CASES.exists(), reason=f"no recorded machines in {CASES}")

WIRES = Link("wires", 1e12, 5e-6, "host", devices=("gpu",), over="gpu")
MEMORY = Link("memory", 20e9, 2e-6, "host")
RDMA = Link("rdma", 1e12, 5e-6, "network", devices=("cpu", "gpu"))
STRIPED = Link("striped", 1e12, 6e-6, "network", devices=("cpu", "gpu"), stripes=True)
LINKS = (WIRES, MEMORY, RDMA, STRIPED)

DGX_A100 = "topo/a100_dgx_nv12_10nic_tabs.txt"
DGX1 = "topo/v100_dgx1_ucxx_docs.txt"
L40S = "topo/l40s_8gpu_node_sys.txt"
GB200 = "topo/gb200_gpu_numa_ids.txt"
ADA = "topo/rtx6000ada_4gpu_4nic.txt"
POWER9 = "topo/power9_traverse_nv3_numa0_8_tabs.txt"
MI300A = "nccl/rccl_topo_4p_940.xml"
H800 = "nccl/h800_8gpu_8nic.xml"
A6000 = "nccl/a6000_4gpu_sockets.xml"

INSIDE = [
    # machine, from, to, class, bytes per second, why
    (DGX_A100, "GPU0", "GPU7", "NV12", None, "NVSwitches join all eight, by all 12 links of each, across the sockets too"),
    (DGX1, "GPU0", "GPU3", "NV2", None, "a hybrid cube mesh: two links along this edge"),
    (DGX1, "GPU0", "GPU4", "NV2", None, "and two to the partner on the other socket"),
    (DGX1, "GPU0", "GPU1", "NV1", None, "but one to this neighbour"),
    (DGX1, "GPU0", "GPU5", "SYS", None, "six links don't reach all: this pair has no wire, and PCIe goes between the sockets"),
    (L40S, "GPU0", "GPU3", "NODE", None, "no NVLink on this card: PCIe between host bridges of a socket"),
    (L40S, "GPU0", "GPU4", "SYS", None, "and between the sockets"),
    (GB200, "GPU1", "GPU2", "NV18", None, "one NVLink domain over both Grace CPUs"),
    (POWER9, "GPU2", "GPU3", "NV3", None, "half of the six links join the two of a socket, half go to their CPU"),
    (POWER9, "GPU0", "GPU2", "SYS", None, "so between the sockets there is none"),
    (MI300A, "GPU0", "GPU3", "XGMI", 64e9, "one XGMI link of 64 GB/s each way between each two of the four"),
    (MI300A, "CPU0", "CPU1", "SYS", None, "each of the four packages is a NUMA node of its own"),
    (H800, "GPU0", "GPU7", "NV8", 200e9, "two links to each of four NVSwitches, 25 GB/s each: what is left of 18 for export"),
    (A6000, "GPU0", "GPU2", "SYS", None, "no bridge between the cards, and they are on two sockets"),
]  # fmt: skip

OUTSIDE = [
    # machine, device, class of the way to the NIC, NIC, all that are equally near, bytes per second over one, why
    (DGX_A100, "GPU0", "PXB", "NIC0", "NIC0 NIC1", None, "two NICs share its tree of switches"),
    (DGX_A100, "GPU5", "PXB", "NIC4", "NIC4 NIC5", None, "in the graph's order the first; NIC8 and NIC9 are for storage"),
    (DGX1, "GPU2", "PIX", "mlx5_1", "mlx5_1", None, "one HCA below the switch of each pair; mlx5_0 is below the other"),
    (DGX1, "GPU7", "PIX", "mlx5_3", "mlx5_3", None, "and the same on the other socket"),
    (GB200, "GPU3", "NODE", "NIC2", "NIC2 NIC3", None, "GPUs hang on NVLink-C2C, NICs on PCIe: nearer than one Grace is none"),
    (ADA, "GPU0", "NODE", "NIC0", "NIC0 NIC1", None, "the two ports of the card on its own socket"),
    (ADA, "GPU2", "NODE", "NIC2", "NIC2 NIC3", None, "and of the other card on the other"),
    (POWER9, "GPU3", "NODE", "mlx5_2", "mlx5_2 mlx5_3", None, "two ports on its own socket"),
    (MI300A, "GPU1", "PHB", "cxi1", "cxi1", 16e9 * 2 * 128 / 130, "a NIC on each package, by PCIe 4 x16; 200 Tbit/s are absurd"),
    (MI300A, "CPU1", "PHB", "cxi3", "cxi3", 16e9 * 2 * 128 / 130, "node 1 has the bus 41"),
    (H800, "GPU1", "PIX", "mlx5_3", "mlx5_3", 50e9, "400 Gbit/s below the same switch, less than PCIe 5 x16 gives"),
    (A6000, "GPU0", "PHB", "eno1np0", "eno1np0 eno2np1", 125e6, "1 Gbit/s; bridges and veths claim 10 and are no hardware"),
    (A6000, "GPU3", "SYS", "eno1np0", "eno1np0 eno2np1", 125e6, "its socket has no NIC"),
]  # fmt: skip


def machine(name: str) -> Topology:
    return read((CASES / name).read_bytes())


def chosen(report: PathReport) -> tuple[str, str | None]:
    assert report.chosen is not None
    return report.chosen.transport, report.chosen.hops[0].link_class


@pytest.mark.parametrize("name, a, b, link_class, bytes_per_s, why", INSIDE)
def test_within_a_machine(name: str, a: str, b: str, link_class: str, bytes_per_s: float | None, why: str) -> None:
    graph = machine(name)
    report = choose(End("one", LINKS[:2], graph, a), End("one", LINKS[:2], graph, b), 1 << 30)
    assert chosen(report) == ("wires" if a.startswith("GPU") else "memory", link_class), why
    assert report.chosen is not None and [hop.what for hop in report.chosen.hops] == [f"{a} - {b}"]
    assert report.chosen.hops[0].bytes_per_s == bytes_per_s or bytes_per_s is None


@pytest.mark.parametrize("name, device, link_class, nic, near, bytes_per_s, why", OUTSIDE)
def test_to_another_machine(
    name: str, device: str, link_class: str, nic: str, near: str, bytes_per_s: float | None, why: str
) -> None:
    """To a machine like it, to the same device there."""
    graph = machine(name)
    report = choose(End("one", LINKS, graph, device), End("other", LINKS, graph, device), 1 << 30)
    found = {one.transport: one for one in report.candidates if one.usable}
    assert found.keys() == {"rdma", "striped"}, "wires and memory end with the host"
    assert found["rdma"].nics == (nic,), why
    assert found["striped"].nics == tuple(near.split()), why
    first, *_, last = found["rdma"].hops
    assert (first.what, first.link_class) == (f"{device} - {nic}", link_class), why
    assert (last.what, last.link_class) == (f"{nic} - {device}", link_class), why
    if bytes_per_s is not None:
        assert found["rdma"].bytes_per_s == pytest.approx(bytes_per_s), why
        assert found["striped"].bytes_per_s >= found["rdma"].bytes_per_s  # type: ignore[operator]


def test_a_gpu_without_a_nic_of_its_machine() -> None:
    graph = machine(L40S)
    report = choose(End("one", (RDMA,), graph, "GPU0"), End("other", (RDMA,), graph, "GPU7"), 1)
    assert report.chosen is not None and report.chosen.nics == ()
    assert [hop.what for hop in report.chosen.hops] == ["GPU0 - network", "network - GPU7"]
