"""GPUs and RDMA devices. Nothing of this version uses them, so what is found are notes."""

from __future__ import annotations

import re
from pathlib import Path

from tensorlink.doctor.finding import Finding
from tensorlink.topology.sysfs import names, text

_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d{1,4}(?:\.\d{1,4}){1,2})")


def gpus(root: Path) -> Finding | None:
    """The driver of NVIDIA, and whether NICs could reach the GPUs' memory by it. None: there is no driver."""
    said = text(root / "proc/driver/nvidia/version")
    if said is None:
        return None
    version = _MODULE.search(said)
    driver = f"driver {version[1]}" if version else "driver of unknown version"
    count = len(names(root / "proc/driver/nvidia/gpus"))
    peermem = "is" if (root / "sys/module/nvidia_peermem").is_dir() else "isn't"
    reason = f"NVIDIA {driver}, {count} GPU{'s' * (count != 1)}, nvidia-peermem {peermem} loaded"
    return Finding("GPUs", "note", f"{reason}; this version moves tensors on the CPU only")


def rdma(root: Path) -> Finding | None:
    """Ports of RDMA devices, with state and rate. None: there are no devices."""
    folder = root / "sys/class/infiniband"
    ports = [(name, port) for name in names(folder) for port in names(folder / name / "ports")]
    if not ports:
        return None
    rows = []
    for name, port in ports:
        at = folder / name / "ports" / port
        state, rate = ((text(at / what) or "?") for what in ("state", "rate"))
        rows.append(f"{name}/{port} {state.rpartition(': ')[2].lower()} {rate}")
    reason = f"{', '.join(rows)}; this version goes over TCP between hosts"
    return Finding("RDMA", "note", reason)
