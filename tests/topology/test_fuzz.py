"""Whatever a text has become: a machine or a `TopologyError`, and soon."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorlink.errors import TopologyError
from tensorlink.topology import read
from tests.topology.machines import NCCL, PLAIN, SHOWTOPO, TABLE

PIECES = [
    "X",
    "NV1",
    "NV18",
    "SYS",
    "N/A",
    "0-3",
    "GPU0",
    "NIC0",
    "\t",
    " ",
    "\n",
    "\x1b[0m",
    "[4m",
    "\ufffd",
    "CPU Affinity",
    "=",
]
PIECES += ["Legend:", "NIC0: ", "<", ">", "&a;", '"', "-1", "99999999999999999999", "\x00", "\u202e", "٣", "²"]


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A recorded machine in which places were cut out, doubled, swapped or written over."""
    text = draw(st.sampled_from([TABLE, PLAIN, SHOWTOPO, NCCL]))
    for _ in range(draw(st.integers(1, 6))):
        a, b = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        near = min(b, a + draw(st.integers(0, 12)))
        kind = draw(st.sampled_from(["cut", "end", "put", "twice", "swap", "glue"]))
        if kind == "cut":
            text = text[:a] + text[near:]
        elif kind == "end":
            text = text[: max(b, 20)]
        elif kind == "put":
            text = text[:a] + draw(st.sampled_from(PIECES)) + text[a:]
        elif kind == "twice":
            text = text[:b] + text[a:]
        elif kind == "swap":
            text = text[:a] + text[near:b] + text[a:near] + text[b:]
        else:
            text = text[:a] + "".join(text[a:b].split(" ")) + text[b:]
    return text


def survives(data: str | bytes) -> None:
    try:
        found = read(data)
    except TopologyError as error:
        assert str(error)
        return
    json.dumps(found.to_json(), allow_nan=False)
    names = [device.name for device in found.devices]
    assert len(set(names)) == len(names)
    for device in found.devices:
        assert device.name.isascii() and device.name.isprintable()
        found.nearest(device.name)
    assert all(link.a != link.b and {link.a, link.b} <= set(names) for link in found.links)


@settings(max_examples=300, deadline=2000)
@given(damaged())
def test_damaged_texts(text: str) -> None:
    survives(text)


@settings(max_examples=100, deadline=2000)
@given(
    st.one_of(
        st.binary(max_size=400), st.text(max_size=400), st.lists(st.sampled_from(PIECES), max_size=80).map(" ".join)
    )
)
def test_any_bytes(data: str | bytes) -> None:
    survives(data)


HEADER = "     GPU0 GPU1 CPU Affinity NUMA Affinity\n"
HUGE = {
    "glued cells": HEADER + "GPU0 " + "NV1" * 20_000,
    "one list": HEADER + "GPU0 X NV4 " + "1," * 30_000,
    "cells": HEADER + "GPU0 " + "SYS " * 15_000,
    "grown": HEADER + "GPU0 X NV4 " + "N/A" * 20_000,
    "continued": HEADER + "GPU0 X\n" + "SYS\n" * 3000,
    "headers": (" ".join(f"GPU{n}" for n in range(2000)) + "\n") * 20 + "GPU0 X SYS",
    "captions": "CPU Affinity" * 5000 + "\nGPU0 X SYS",
    "halves": "CPU " * 15_000,
    "lines of =": "HOPS TABLE:\n" + "=" * 60_000,
    "deep": "<system>" + "<pci>" * 30_000,
    "wide": "<system><cpu numaid='0'>" + "<pci class='0x03'/>" * 19_000 + "</cpu></system>",
    "attribute": f"<system a='{'x' * 1_000_000}'/>",
}


@pytest.mark.parametrize("text", HUGE.values(), ids=list(HUGE))
def test_large_texts_take_no_time(text: str) -> None:
    began = time.process_time()
    survives(text)
    assert time.process_time() - began < 10
