"""Files of ROCm and NCCL."""

from __future__ import annotations

import pytest

from tensorlink.errors import TopologyError
from tensorlink.topology import read
from tensorlink.topology.nccl import cpu_list
from tests.topology.machines import NCCL, SHOWTOPO


def test_showtopo() -> None:
    found = read(SHOWTOPO)
    (link,) = found.links
    assert (link.link_class, link.hops, link.weight, link.bytes_per_s) == ("XGMI", 1, 15, None)
    assert (found.device("GPU1").numa_node, found.device("GPU1").numa_affinity) == (3, None)
    assert found.warnings == ()


def test_showtopo_with_a_cut_row_is_filled_in_from_the_other() -> None:
    found = read(SHOWTOPO.replace("GPU1   XGMI         0", "GPU1   XGMI"))
    assert found.links[0].link_class == "XGMI" and any("1 of 2 cells" in warning for warning in found.warnings)


def test_nccl() -> None:
    found = read(NCCL)
    assert [device.name for device in found.devices] == [
        "CPU0",
        "SWITCH0",
        "GPU0",
        "mlx5_0",
        "docker0",
        "CPU1",
        "GPU1",
        "NVSWITCH0",
    ]
    assert (found.device("CPU1").cpu_affinity, found.device("GPU0").pcie) == ("32-35", "PCIe5x16")
    gpus, near = found.between("GPU0", "GPU1"), found.between("GPU0", "mlx5_0")
    assert gpus is not None and (gpus.link_class, gpus.bytes_per_s) == ("NV18", 450 * 10**9)
    assert near is not None and (near.link_class, near.bytes_per_s) == ("PIX", 31_507_692_307)
    assert [nic.name for nic in found.nearest("GPU1")] == ["mlx5_0"]  # never docker0, whatever its speed
    assert found.device("mlx5_0").bytes_per_s == 25 * 10**9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<system><cpu", r"line 1, column \d+: no well-formed XML"),
        ('<!DOCTYPE a [<!ENTITY b "c">]>\n<system>&b;</system>', "document type or an entity"),
        ("<system>" + "<pci>" * 100, "too large"),
        ("<graphs/>", "graphs"),
        ("<system/>", "no <cpu>"),
        ("<html></html>", "<html>"),
    ],
)
def test_xml_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        read(text)


def test_a_rate_that_no_port_has_is_unknown() -> None:
    found = read(NCCL.replace("200000", "200000000"))
    assert (found.device("mlx5_0").speed_mbps, found.device("mlx5_0").bytes_per_s) == (200_000_000, None)
    assert found.warnings


@pytest.mark.parametrize(
    ("mask", "cpus"), [("c0c0", "6-7,14-15"), ("00000001,80000000", "31-32"), ("0", ""), ("xyz", None), (None, None)]
)
def test_masks(mask: str | None, cpus: str | None) -> None:
    assert cpu_list(mask) == cpus
