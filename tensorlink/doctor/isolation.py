"""What the kernel keeps apart: namespaces, and who may look into whose memory. It hinders TensorLink little, others more."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tensorlink.doctor.finding import Finding
from tensorlink.topology.sysfs import text

_HOST = {"ipc": 0xEFFFFFFF, "pid": 0xEFFFFFFC, "net": 0xEFFFFFF9}
"""Inodes of the namespaces that a host begins with, the last of them since Linux 6.18 (include/uapi/linux/nsfs.h)."""
_MEND = {"ipc": "--ipc=host", "pid": "--pid=host", "net": "--network=host"}
_PTRACE = {
    "1": "a process looks into its children only",
    "2": "only root looks into other processes",
    "3": "nobody looks into another process, until the next boot",
}


def namespaces(root: Path) -> Finding:
    """Which of its own this process has, as in a container. Ours meet by a socket and hand each other descriptors, for which
    the run-time directory is all that must be shared."""
    check = "namespaces"
    found = {kind: _inode(root / "proc/self/ns" / kind) for kind in _HOST}
    if found["ipc"] is None:
        return Finding(check, "note", "this kernel doesn't tell")
    own = [kind for kind, inode in found.items() if inode is not None and inode != _HOST[kind]]
    if "net" in own and not _own_network(root, found):
        own.remove("net")
    if not own:
        return Finding(check, "ok", "IPC, processes and network are the host's, as far as can be told")
    reason = f"its own: {', '.join(own)}. Processes of one host share memory where they share the run-time directory"
    reason += "; CUDA IPC and NCCL between containers need one ipc and one pid" if {"ipc", "pid"} & {*own} else ""
    reason += "; other hosts reach only ports that are published (TENSORLINK_PORTS)" if "net" in own else ""
    return Finding(check, "note", reason, f"docker run {' '.join(_MEND[kind] for kind in own)}")


def _inode(link: Path) -> int | None:
    try:
        found = re.search(r"\[(\d{1,12})\]", os.readlink(link))
    except OSError:
        return None
    return int(found[1]) if found else None


def _own_network(root: Path, found: dict[str, int | None]) -> bool:
    """By process 1, if that is the host's and may be looked at; else by the number, which kernels before 6.18 choose."""
    first = _inode(root / "proc/1/ns/net") if found["pid"] == _HOST["pid"] else None
    if first is not None:
        return found["net"] != first
    release = re.match(r"(\d{1,4})\.(\d{1,4})", text(root / "proc/sys/kernel/osrelease") or "")
    return release is not None and (int(release[1]), int(release[2])) >= (6, 18)


def ptrace(root: Path) -> Finding:
    """Yama's scope. Nothing of ours reads another process's memory by ptrace rights; CMA of UCX and MPI does, and debuggers."""
    scope = text(root / "proc/sys/kernel/yama/ptrace_scope")
    if scope not in _PTRACE:
        return Finding("ptrace", "ok", "no process of this user is kept from another")
    reason = f"ptrace_scope is {scope}: {_PTRACE[scope]}. TensorLink doesn't mind; UCX and MPI lose cross-memory attach"
    mend = None if scope == "3" else "sysctl kernel.yama.ptrace_scope=0"
    return Finding("ptrace", "note", reason + ", and py-spy and gdb can't attach", mend)
