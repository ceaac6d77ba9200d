"""Tables as terminals, logs and people leave them: what is beyond doubt is read, the rest left out with a warning."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from tensorlink.errors import TopologyError
from tensorlink.topology import Topology, read
from tests.topology.machines import PLAIN, TABLE


def facts(found: Topology) -> dict[object, object]:
    """All that a table says, so that two of them can be compared."""
    said: dict[object, object] = {(link.a, link.b): link.link_class for link in found.links}
    for one in found.devices:
        said[one.name] = (one.kind, one.device, one.numa_affinity, one.cpu_affinity, one.gpu_numa_id)
    return said


def test_table() -> None:
    found = read(TABLE)
    assert found.warnings == () and found.source == "topo -m"
    assert [device.name for device in found.devices] == ["GPU0", "GPU1", "NIC0", "NIC1"]
    assert found.device("GPU1").cpu_affinity == "8-15,24-31" and found.device("GPU1").numa_node == 1
    assert found.device("NIC1").device == "mlx5_bond_1" and found.device("mlx5_0").name == "NIC0"
    assert [nic.name for nic in found.nearest("GPU0")] == ["NIC0"]
    link = found.between("GPU1", "GPU0")
    assert link is not None and (link.link_class, link.count, link.bytes_per_s) == ("NV18", 18, None)
    assert found.islands() == (("GPU0", "GPU1"),)


def wrapped(width: int) -> Callable[[str], str]:
    """What a terminal of so many columns leaves of a text, its line ends stripped."""

    def wrap(text: str) -> str:
        lines = (line.expandtabs(8) for line in text.splitlines())
        return "\n".join(line[at : at + width].rstrip() for line in lines for at in range(0, max(len(line), 1), width))

    return wrap


UNHARMED: dict[str, Callable[[str], object]] = {
    "tabs": lambda text: re.sub(r" {2,8}", "\t", text),
    "one blank": lambda text: re.sub(r"[ \t]+", " ", text),
    "stripped": lambda text: "\n".join(line.strip() for line in text.splitlines()),
    "escape codes": lambda text: "\x1b[4m" + text.replace("\n", "\x1b[0m\n", 1),
    "escapes whose ESC was lost": lambda text: "\ufffd[4m" + text.replace("\n", "[0m\n", 1),
    "a log": lambda text: "\n".join(f"(worker-3 pid=7) 2031-01-02 03:04:05 | {line}" for line in text.splitlines()),
    "a quote": lambda text: "\n".join(f"> {line}" for line in text.splitlines()),
    "Windows": lambda text: text.replace("\n", "\r\n"),
    "UTF-16": lambda text: text.encode("utf-16"),
    "a literal": json.dumps,
    "blank lines": lambda text: text.replace("\n", "\n\n"),
    "one line": lambda text: re.sub(r"\s+", " ", text),
    "wrapped at 40": wrapped(40),
    "wrapped at 61": wrapped(61),
    "wrapped at 33": wrapped(33),
    "a glued header": lambda text: text.replace("CPU Affinity    NUMA", "CPU AffinityNUMA").replace(
        "NIC0    NIC1", "NIC0NIC1"
    ),
    "glued cells": lambda text: text.replace("PIX     SYS", "PIXSYS"),
}


@pytest.mark.parametrize("change", UNHARMED.values(), ids=list(UNHARMED))
def test_forms_that_lose_nothing(change: Callable[[str], str | bytes]) -> None:
    assert facts(read(change(TABLE))) == facts(read(TABLE))


def test_grown_affinities_come_apart_where_only_one_way_fits() -> None:
    found = read(TABLE.replace("0-7,16-23       0               N/A", "0-7,16-230N/A"))
    assert facts(found) == facts(read(TABLE))
    assert any("is read as '0-7,16-23 0 N/A'" in warning for warning in found.warnings)
    doubtful = read(TABLE.replace("0-7,16-23       0               N/A", "0-990N/A"))
    assert doubtful.device("GPU0").numa_node is None and any("unclear" in warning for warning in doubtful.warnings)


def test_rows_with_lost_cells_are_filled_in_from_the_others() -> None:
    for damaged in (
        TABLE.replace("GPU1    NV18     X      SYS     PXB", "GPU1    NV18     X      PXB    "),
        TABLE.replace("NIC1    SYS     PXB     SYS      X\n", ""),
        TABLE.replace("NIC1    SYS     PXB     SYS      X", "NIC1    SYS     PX"),
    ):
        found = read(damaged)
        links = {pair: said for pair, said in facts(found).items() if isinstance(pair, tuple)}
        whole = facts(read(TABLE))
        assert links == {pair: whole[pair] for pair in links} and ("GPU1", "NIC1") in links and found.warnings


def test_two_rows_that_differ_are_both_kept() -> None:
    found = read(PLAIN.replace("GPU2\tSYS", "GPU2\tNODE"))
    there, back = found.between("GPU0", "GPU2"), found.between("GPU2", "GPU0")
    assert there is not None and back is not None and (there.link_class, back.link_class) == ("SYS", "NODE")
    assert any("both are kept" in warning for warning in found.warnings)


def test_a_legend_that_is_garbage_names_nothing() -> None:
    found = read(TABLE.replace("NIC0: mlx5_0", "NIC0: PIX     SYS    X"))
    assert found.device("NIC0").device is None and any("NIC0" in warning for warning in found.warnings)


def test_a_class_counts_if_a_legend_or_both_rows_say_so() -> None:
    explained = read(PLAIN.replace("PIX", "ZLINK") + "\nLegend:\n  ZLINK = A cable\n")
    agreed = read(PLAIN.replace("PIX", "ZLINK"))
    for found in (explained, agreed):
        link = found.between("GPU0", "GPU1")
        assert link is not None and (link.link_class, link.bytes_per_s) == ("ZLINK", None)
    assert not explained.warnings and agreed.warnings
    once = read(PLAIN.replace("PIX", "ZLINK", 1))
    link = once.between("GPU0", "GPU1")
    assert link is not None and link.link_class == "PIX" and once.warnings


def test_other_tools() -> None:
    slashes = "         GPU 0/0 GPU 0/1 CPU Affinity\nGPU 0/0  S       MDF     0-3\nGPU 0/1  MDF     S       0-3\n"
    found = read(slashes)
    assert [gpu.name for gpu in found.of_kind("gpu")] == ["GPU0/0", "GPU0/1"] and len(found.links) == 1
    swapped = PLAIN.replace("CPU Affinity\tNUMA Affinity", "Node Affinity\tCPU_Affinity")
    swapped = re.sub(r"(\d-\d)\t(\d)", r"\2\t\1", swapped).replace("GPU", "MLU")
    assert read(swapped).device("MLU2").numa_node == 1 and read(swapped).device("MLU2").cpu_affinity == "4-7"


def test_models_tell_what_an_nvlink_carries() -> None:
    models = "".join(f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-0000000{n}-1)\n" for n in (0, 1))
    link = read(models + TABLE).between("GPU0", "GPU1")
    assert link is not None and link.bytes_per_s == 450 * 10**9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "nothing to read"),
        ("hello\nworld", r"line 2, column 1: there is no topology table"),
        ("GPU0 GPU1\nGPU0 NV2 X\nGPU7 X NV2\n", r"line 2, column 1: the rows don't fit the header"),
        ("x" * 70_000, "at most 65536 characters"),
        ("a\n" * 30_000, "at most 20000 lines"),
        (b"x" * (3 << 20), "bytes"),
    ],
)
def test_what_is_no_table(text: str | bytes, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        read(text)


def test_a_row_that_lost_a_cell_is_left_out_where_others_contradict_it() -> None:
    table = "     GPU0 GPU1 GPU2 GPU3\nGPU0 X NV2 PIX SYS\nGPU1 NV2 X SYS PIX\nGPU2 PIX SYS X NV2\nGPU3 SYS PIX NV2 X\n"
    found = read(table.replace("X NV2 PIX SYS", "X PIX SYS"))
    assert facts(found) == facts(read(table))
    assert any("line 2" in warning for warning in found.warnings) and any(
        "left out" in warning for warning in found.warnings
    )
