"""Recorded machines: which form a text has, and who reads that."""

from __future__ import annotations

from tensorlink.errors import TopologyError
from tensorlink.topology import nccl, showtopo, table
from tensorlink.topology.graph import Topology
from tensorlink.topology.text import decode


def read(data: bytes | str) -> Topology:
    """The machine that a text shows, whichever of the forms it has: `nvidia-smi topo -m` and tables like it,
    `rocm-smi --showtopo`, topology files of NCCL and RCCL.

    The text may be from anyone. What is damaged in it is left out with a warning in `warnings`, or is an error.

    Raises:
        TopologyError: it has none of the forms, or is too large, or too damaged; it names line and column.
    """
    text = data if isinstance(data, str) else decode(data)
    if isinstance(data, str):
        decode(data[: 4 << 20].encode("utf-8", errors="replace"))  # the same limit
    if not text.strip():
        raise TopologyError("there is nothing to read", line=1, column=1)
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith("<"):
        return nccl.read("\n" * text[: len(text) - len(start)].count("\n") + start if _has_no_prolog(start) else start)
    return showtopo.read(text) if showtopo.recognises(text) else table.read(text)


def _has_no_prolog(text: str) -> bool:
    """Whether blank lines may stand above: then they stay, so that errors name the right line."""
    return not text.startswith("<?xml")
