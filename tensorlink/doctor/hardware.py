"""GPUs and RDMA devices. Nothing of this version uses them, so what is found are notes at most, and none of them is fine."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tensorlink.doctor.finding import Finding
from tensorlink.topology.sysfs import names, text

_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d{1,4}(?:\.\d{1,4}){1,2})")
_DRIVER = "proc/driver/nvidia/version"
_TOOLKIT = "usr/local/cuda"
_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Of a toolkit's major version, by NVIDIA's table of minor version compatibility (CUDA Toolkit Release Notes)."""
_DMABUF = (5, 12)  # the kernel from which RDMA devices register memory by a dma-buf


def gpus(root: Path) -> Finding:
    """The driver of NVIDIA."""
    said = text(root / _DRIVER)
    if said is None:
        return Finding("GPUs", "ok", "none: no driver of NVIDIA is loaded")
    count = len(names(root / "proc/driver/nvidia/gpus"))
    driver = _driver(said) or "of unknown version"
    reason = f"NVIDIA driver {driver}, {count} GPU{'s' * (count != 1)}; this version moves tensors on the CPU only"
    return Finding("GPUs", "note", reason)


def toolkit(root: Path) -> Finding | None:
    """Whether the driver is new enough for the CUDA toolkit. None: there is no driver."""
    said = text(root / _DRIVER)
    if said is None:
        return None
    version = _toolkit(root / _TOOLKIT)
    if version is None:
        return Finding("CUDA toolkit", "ok", f"none in /{_TOOLKIT}; torch brings its own")
    driver, least = _driver(said), _LEAST_DRIVER.get(int(version.partition(".")[0]))
    reason = f"{version} in /{_TOOLKIT}"
    if driver is None or least is None or int(driver.partition(".")[0]) >= least:
        return Finding("CUDA toolkit", "ok", reason)
    mend = f"apt install nvidia-driver-{least}-server, or a toolkit that driver {driver} knows"
    return Finding("CUDA toolkit", "note", f"{reason} takes driver {least} or later, and this is {driver}", mend)


def gpudirect(root: Path) -> Finding | None:
    """Whether NICs can reach the memory of GPUs. None: there is no driver, or no RDMA device."""
    said = text(root / _DRIVER)
    if said is None or not _ports(root):
        return None
    if (root / "sys/module/nvidia_peermem").is_dir():
        return Finding("GPUDirect", "ok", "by nvidia-peermem, which is loaded")
    release = re.match(r"(\d{1,4})\.(\d{1,4})", text(root / "proc/sys/kernel/osrelease") or "")
    if "Open Kernel Module" in said and release and (int(release[1]), int(release[2])) >= _DMABUF:
        return Finding("GPUDirect", "ok", f"by dma-buf: the driver's open modules, and Linux {release[0]}")
    reason = "nvidia-peermem isn't loaded, and dma-buf takes the driver's open modules and Linux 5.12"
    return Finding("GPUDirect", "note", reason, "modprobe nvidia-peermem")


def rdma(root: Path) -> Finding:
    """Ports of RDMA devices, with state and rate."""
    ports = _ports(root)
    if not ports:
        return Finding("RDMA", "ok", "no RDMA devices")
    rows, states = [], set()
    for name, port in ports:
        at = root / "sys/class/infiniband" / name / "ports" / port
        state, rate = ((text(at / what) or "?") for what in ("state", "rate"))
        states.add(state.rpartition(": ")[2].lower())
        rows.append(f"{name}/{port} {state.rpartition(': ')[2].lower()} {rate}")
    reason = f"{', '.join(rows)}; this version goes over TCP between hosts"
    if states == {"active"}:
        return Finding("RDMA", "ok", reason)
    # A port whose cable is good stays in `init` until a subnet manager has configured it.
    mend = "systemctl start opensm, on one host of the fabric" if "init" in states else "ibstat, and look at the cables"
    return Finding("RDMA", "note", reason, mend)


def _ports(root: Path) -> list[tuple[str, str]]:
    folder = root / "sys/class/infiniband"
    return [(name, port) for name in names(folder) for port in names(folder / name / "ports")]


def _driver(said: str) -> str | None:
    version = _MODULE.search(said)
    return version[1] if version else None


def _toolkit(home: Path) -> str | None:
    """`12.4.1`, by the file that every toolkit since 11.1 has."""
    try:
        version = json.loads(text(home / "version.json") or "null")["cuda"]["version"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return version if isinstance(version, str) and re.fullmatch(r"\d{1,3}(\.\d{1,6}){1,3}", version) else None
