"""Shared memory: whether it can be had, how fast it is made, and how much of it the pool may take."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable
from pathlib import Path

from tensorlink.doctor.finding import Finding
from tensorlink.settings import memory_limit_bytes
from tensorlink.topology.sysfs import text

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_THP = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
_SMALL_SHM = 1 << 30  # containers get 64 MiB unless they ask
_COLLAPSE = (6, 1)  # the kernel from which huge pages can be asked for one by one, madvise(2)


def shared_memory(root: Path, create: Callable[[str, int], int] = os.memfd_create) -> Finding:
    """Makes, seals and opens again a page of it, as the pool does."""
    check = "shared memory"
    try:
        fd = create("tensorlink-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, os.sysconf("SC_PAGE_SIZE"))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
        finally:
            os.close(fd)
    except OSError as error:
        if text(root / "proc/sys/vm/memfd_noexec") == "2":
            reason = f"memfd_create: {error.strerror}; vm.memfd_noexec is 2, which refuses it to all older programs"
            return Finding(check, "fail", reason, "sysctl vm.memfd_noexec=1")
        return Finding(check, "fail", f"no sealed memory file can be made: {error.strerror}; no peer can start")
    return Finding(check, "ok", "memory files can be made, sealed and shared; nothing is kept in /dev/shm")


def dev_shm(root: Path, stat: Callable[[Path], os.statvfs_result] = os.statvfs) -> Finding:
    """Nothing of ours lies there; NCCL, UCX and the data loaders of torch keep theirs there, beside us."""
    check = "/dev/shm"
    mend = "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
    try:
        found = stat(root / "dev/shm")
    except OSError as error:
        return Finding(
            check, "note", f"{error.strerror}; TensorLink needs none, NCCL and data loaders of torch do", mend
        )
    size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    reason = f"{_gib(free)} of {_gib(size)} free"
    if free < _SMALL_SHM:
        return Finding(check, "note", f"{reason}; enough for TensorLink, not for NCCL or data loaders of torch", mend)
    return Finding(check, "ok", reason)


def huge_pages(root: Path) -> Finding:
    """The pool asks for each huge page (MADV_COLLAPSE), so of all settings `deny` alone keeps it from them."""
    check = "huge pages"
    chosen = re.search(r"\[(\w+)\]", text(root / _THP) or "")
    release = re.match(r"(\d{1,4})\.(\d{1,4})", text(root / "proc/sys/kernel/osrelease") or "")
    if chosen is None or release is None:
        return Finding(check, "note", "this kernel doesn't tell of huge pages for shared memory; small ones work too")
    slower = "large tensors lie on small pages, and their first copies are slower"
    if (int(release[1]), int(release[2])) < _COLLAPSE:
        return Finding(check, "note", f"Linux {release[0]} has no MADV_COLLAPSE, 6.1 has: {slower}")
    if chosen[1] == "deny":
        return Finding(check, "warn", f"shared memory may not have them: {slower}", f"echo advise > /{_THP}")
    return Finding(check, "ok", f"the pool may ask for them (shmem_enabled is {chosen[1]})")


def pool(root: Path, pool_bytes: int) -> Finding:
    """The budget against what this process may use, by its cgroup or the host, and against what is free."""
    limit = memory_limit_bytes(root / "sys/fs/cgroup", root / "proc/self/cgroup")
    reason = f"up to {_gib(pool_bytes)} for each process, of {_gib(limit)} that it may use"
    mend = f"TENSORLINK_POOL_BYTES={limit // 4}"
    if pool_bytes > limit:
        return Finding("pool", "fail", f"{reason}: it would be killed before the pool is full", mend)
    free = re.search(r"^MemAvailable:\s*(\d{1,15}) kB$", text(root / "proc/meminfo") or "", re.MULTILINE)
    if free is not None and int(free[1]) << 10 < pool_bytes:
        more = f"; {_gib(int(free[1]) << 10)} of the host are available just now"
        return Finding("pool", "note", reason + more, "end what uses the memory, or set TENSORLINK_POOL_BYTES lower")
    return Finding("pool", "ok", reason)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
