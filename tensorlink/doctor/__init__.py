"""Checks of this machine and of what was set, each with a verdict, the reason, and what mends it.

A check is a function of what it looks at: a root folder for `/proc` and `/sys`, limits, or settings. None of them changes
anything but the run-time directory, which is made as every peer makes it.
"""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorlink.doctor import hardware, isolation, limits, memory, reach, security, ucx
from tensorlink.doctor.finding import Finding, Verdict, failed, guarded, unknown, worst
from tensorlink.doctor.peer import reached
from tensorlink.settings import Settings

__all__ = ["Finding", "Verdict", "examine", "worst"]

Check = Callable[[], Finding | None]


def examine(
    peer: str | None = None, *, timeout: float = 5.0, root: Path = Path("/"), **arguments: Any
) -> Iterator[Finding]:
    """All that is found, in order, as it is found: of this machine, of the settings, and if one is named, of the way to a peer.

    `arguments` are fields of `Settings`, as for `init`. Blocks up to `timeout` seconds at each step that asks somebody. Raises
    nothing: a check that fails is a finding, a wrong setting too, and then what depends on settings is left out. With a
    `peer` this process joins for a moment, under a made-up name.
    """
    yield from _all(_machine(root))
    try:
        settings = Settings.load(**arguments)
    except ValueError as error:
        yield failed("settings", error)
        return
    yield from _all(_set(root, settings, timeout))
    if peer is not None:
        try:
            yield from reached(peer, settings, timeout)
        except Exception as error:
            yield unknown(f"peer {peer}", error)


def _all(checks: Mapping[str, Check]) -> Iterator[Finding]:
    for name, look in checks.items():
        yield from guarded(name, look)


def _machine(root: Path) -> dict[str, Check]:
    of = limits.of_process
    return {
        "open files": lambda: limits.open_files(*of(resource.RLIMIT_NOFILE)),
        "locked memory": lambda: limits.locked_memory(of(resource.RLIMIT_MEMLOCK)[0]),
        "shared memory": functools.partial(memory.shared_memory, root),
        "/dev/shm": functools.partial(memory.dev_shm, root),
        "huge pages": functools.partial(memory.huge_pages, root),
        "ptrace": functools.partial(isolation.ptrace, root),
        "namespaces": functools.partial(isolation.namespaces, root),
        "GPUs": functools.partial(hardware.gpus, root),
        "CUDA toolkit": functools.partial(hardware.toolkit, root),
        "RDMA": functools.partial(hardware.rdma, root),
        "GPUDirect": functools.partial(hardware.gpudirect, root),
        "UCX": lambda: ucx.library(ucx.candidates(os.environ)),
        "run-time directory": security.directory,
        "sockets": security.sockets,
    }


def _set(root: Path, settings: Settings, timeout: float) -> dict[str, Check]:
    size = settings.pool_bytes
    return {
        "pool": functools.partial(memory.pool, root, size),
        "file size": lambda: limits.file_size(limits.of_process(resource.RLIMIT_FSIZE)[0], size),
        "container": functools.partial(security.container, root, settings),
        "token": functools.partial(security.token, settings),
        "certificates": functools.partial(security.certificates, settings),
        "address": functools.partial(reach.address, root, settings, timeout),
        "ports": functools.partial(reach.ports, settings, timeout),
        "coordinator": functools.partial(reach.coordinator, settings, timeout),
    }
