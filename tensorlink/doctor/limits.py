"""Limits of this process, as setrlimit(2) has them. Each check takes soft and hard limit; -1 is none."""

from __future__ import annotations

import resource

from tensorlink.doctor.finding import Finding

_OWN_FILES = 64
"""What an endpoint and its interpreter have open by themselves, generously."""
_FILES_OF_A_PEER = 11
"""The most that one peer was seen to take: lane, doorbell, segments and gRPC, both ways."""
_LEAST_FILES = 128
_USUAL_FILES = 1024


def of_process(what: int) -> tuple[int, int]:
    """Soft and hard limit."""
    return resource.getrlimit(what)


def open_files(soft: int, hard: int) -> Finding:
    """Descriptors: each peer that is connected takes some."""
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "without limit")
    peers = max(soft - _OWN_FILES, 0) // _FILES_OF_A_PEER
    reason = f"{soft} at most, room for about {peers} connected peers"
    if soft >= _USUAL_FILES:
        return Finding("open files", "ok", reason)
    may = _USUAL_FILES if hard == resource.RLIM_INFINITY else min(_USUAL_FILES, hard)
    mend = f"ulimit -n {may}" if may > soft else "ulimit -n 1024, as root or by limits.conf: the hard limit is as low"
    return Finding("open files", "fail" if soft < _LEAST_FILES else "warn", reason, mend)


def file_size(soft: int, pool_bytes: int) -> Finding:
    """The kernel takes shared memory for files, and their size may be limited."""
    if soft == resource.RLIM_INFINITY or soft >= pool_bytes:
        return Finding("file size", "ok", "no limit that the pool would meet")
    reason = f"a file may have {soft} bytes, and so may a piece of shared memory; the pool may grow to {pool_bytes}"
    return Finding("file size", "warn" if soft else "fail", reason, "ulimit -f unlimited")


def locked_memory(soft: int) -> Finding:
    """What RDMA registers must be locked; this version registers none."""
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "without limit")
    reason = f"{soft >> 10} KiB at most; no transport of this version locks memory, RDMA would"
    return Finding("locked memory", "note", reason, "ulimit -l unlimited, where RDMA is to be used beside TensorLink")
