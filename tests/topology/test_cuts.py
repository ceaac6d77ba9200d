"""A text that ends too early is an error with its place, never the half of a machine that was still there."""

from __future__ import annotations

import re

import pytest

from tensorlink.errors import TopologyError
from tensorlink.topology import read
from tests.topology.cases import CASES, names
from tests.topology.machines import NCCL, SHOWTOPO

FEW = 60
ROCM = "rocm_mi210_archer2_old_format"
UNTITLED = (
    SHOWTOPO.partition("\n")[2].partition("====== Numa")[0].rstrip("= ")
)  # its tables, pasted without what frames them


def places(text: str) -> list[int]:
    """Where to cut: at the ends of lines, where halves look most whole, all along the text, and close to its end."""
    whole = len(text.rstrip())
    lines = [match.end() for match in re.finditer("\n", text)]
    chosen = {*lines[:: len(lines) // FEW + 1], *range(1, whole, whole // FEW + 1), *range(whole - 12, whole)}
    return sorted(at for at in chosen if text[:at].strip() and at < whole)


def refused(text: str) -> TopologyError:
    with pytest.raises(TopologyError) as caught:
        read(text)
    return caught.value


def nccl(name: str) -> str:
    return (CASES / "nccl" / f"{name}.xml").read_text() if name else NCCL


@pytest.mark.parametrize("name", ["", *names("nccl", "*.xml")])
def test_nccl_that_is_cut_off(name: str) -> None:
    text = nccl(name)
    for at in places(text):
        error = refused(text[:at])
        last = text.rfind("<!--", 0, at) if text.rfind("<!--", 0, at) > text.rfind("-->", 0, at) else at
        assert error.line == text.count("\n", 0, last) + 1 and error.column, text[:at][-40:]


@pytest.mark.parametrize("name", ["", *names("nccl", "*.xml")])
def test_nccl_that_lost_its_beginning(name: str) -> None:
    text = nccl(name)
    first = text.index(">", text.index("<system")) + 1
    for at in (at for at in places(text) if at >= first):
        error = refused(text[at:])
        assert error.line and error.column, text[at:][:40]


@pytest.mark.parametrize("name", ["", *names("nccl", "*.xml")])
def test_nccl_that_lost_a_line_in_the_middle(name: str) -> None:
    lines = nccl(name).splitlines(keepends=True)
    halves = [i for i, line in enumerate(lines) if len(re.findall(r"<\w[^>]*[^/]>", line)) != line.count("</")]
    assert halves
    for i in halves:
        error = refused("".join(lines[:i] + lines[i + 1 :]))
        assert error.line and error.column, lines[i]


@pytest.mark.parametrize("count", ["", 'count="many"', 'count="-1"', 'count="18.5"'])
def test_nccl_with_links_of_no_number(count: str) -> None:
    error = refused(NCCL.replace('count="18"', count))
    assert (error.line, error.column) == (5, 47) and "count of <nvlink>" in error.message


def test_nccl_says_what_it_leaves_out() -> None:
    said = read('<system><cpu numaid="0"><gpu dev="0"/><pci busid="0000:10:00.0"/></cpu><pci><nic/></pci></system>')
    assert [one for one in said.warnings if "left out" in one] == [
        "line 1: column 39: a <pci> without a class and with nothing in it is left out",
        "line 1: column 72: a <pci> inside <system> has no place: left out",
        "line 1: column 25: a <gpu> inside <cpu> has no place: left out",
    ]


@pytest.mark.parametrize("name", ["", *(name for name in names("topo", "*.txt") if name == ROCM)])
def test_showtopo_that_is_cut_off(name: str) -> None:
    text = (CASES / "topo" / f"{name}.txt").read_text() if name else SHOWTOPO
    assert read(text).warnings == ()
    for at in range(1, text.index("Log", text.index("End of")), 3):
        error = refused(text[:at])
        assert error.line and error.column, text[:at][-40:]


def test_tables_that_are_cut_off_without_their_frame() -> None:
    assert read(UNTITLED).warnings == ()
    for lost in ("GPU1   XGMI         0\n\n", "   0\n\n", "GPU0   0            XGMI\nGPU1   XGMI         0\n\n"):
        assert UNTITLED.endswith(lost)
        error = refused(UNTITLED.removesuffix(lost))
        assert error.line and error.column and "cut off" in error.message


def test_a_table_that_lost_a_row_says_so() -> None:
    found = read(SHOWTOPO.replace("GPU1   1            0\n", ""))
    assert found.warnings == ("line 11: the table of hops above has no row GPU1",) and found.links[0].hops == 1
