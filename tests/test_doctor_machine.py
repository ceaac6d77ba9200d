"""The doctor's checks of devices, of what the kernel keeps apart, and of libraries, under facts of both kinds."""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path
from subprocess import run
from types import SimpleNamespace
from typing import cast

import pytest

from tensorlink.doctor import hardware, isolation, memory, ucx
from tensorlink.doctor.finding import Finding
from tests.facts import write

CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build"
PORT = "sys/class/infiniband/{}/ports/1"


def said(found: Finding | None) -> Finding:
    assert found is not None
    return found


# Devices


def test_a_machine_without_devices_is_fine(tmp_path: Path) -> None:
    assert hardware.gpus(tmp_path) == Finding("GPUs", "ok", "none: no driver of NVIDIA is loaded")
    assert hardware.rdma(tmp_path) == Finding("RDMA", "ok", "no RDMA devices")
    assert hardware.toolkit(tmp_path) is None and hardware.gpudirect(tmp_path) is None


@pytest.mark.parametrize("nvidia, driver", [(CLOSED, "535.104.05"), (OPEN, "570.86"), ("else", "of unknown version")])
def test_gpus(tmp_path: Path, nvidia: str, driver: str) -> None:
    write(tmp_path, proc__driver__nvidia__version=nvidia)
    (tmp_path / "proc/driver/nvidia/gpus/0000:19:00.0").mkdir(parents=True)
    found = hardware.gpus(tmp_path)
    assert found.verdict == "note" and f"driver {driver}, 1 GPU;" in found.reason


@pytest.mark.parametrize(
    "toolkit, verdict, mend",
    [
        ('{"cuda": {"name": "CUDA SDK", "version": "12.4.1"}}', "ok", None),
        (
            '{"cuda": {"version": "13.0.0"}}',
            "note",
            "apt install nvidia-driver-580-server, or a toolkit that driver 535",
        ),
        ('{"cuda": {"version": "99.0"}}', "ok", None),  # newer than what we know of
        ('{"cuda": []}', "ok", None),
        ("{", "ok", None),
        ("", "ok", None),
    ],
)
def test_cuda_toolkit(tmp_path: Path, toolkit: str, verdict: str, mend: str | None) -> None:
    write(tmp_path, proc__driver__nvidia__version=CLOSED)
    write(tmp_path / "usr/local/cuda", **{"version.json": toolkit})
    found = said(hardware.toolkit(tmp_path))
    assert found.verdict == verdict and (found.mend or "").startswith(mend or "") and (mend is None) == (not found.mend)


@pytest.mark.parametrize(
    "states, verdict, mend",
    [
        (("4: ACTIVE", "4: ACTIVE"), "ok", None),
        (("4: ACTIVE", "1: DOWN"), "note", "ibstat"),
        (("4: ACTIVE", "2: INIT"), "note", "systemctl start opensm"),
    ],
)
def test_rdma(tmp_path: Path, states: tuple[str, str], verdict: str, mend: str | None) -> None:
    write(tmp_path / PORT.format("mlx5_0"), state=states[0], rate="400 Gb/sec (4X NDR)")
    write(tmp_path / PORT.format("mlx5_1"), state=states[1])
    found = hardware.rdma(tmp_path)
    assert found.verdict == verdict and (found.mend or "").startswith(mend or "") and (mend is None) == (not found.mend)
    assert "mlx5_0/1 active 400 Gb/sec (4X NDR), mlx5_1/1 " in found.reason and found.reason.count("?") == 1


@pytest.mark.parametrize(
    "nvidia, release, peermem, verdict",
    [
        (CLOSED, "6.8.0", True, "ok"),
        (OPEN, "6.8.0", False, "ok"),
        (OPEN, "5.10.0", False, "note"),
        (CLOSED, "6.8.0", False, "note"),
    ],
)
def test_gpudirect(tmp_path: Path, nvidia: str, release: str, peermem: bool, verdict: str) -> None:
    write(tmp_path, proc__driver__nvidia__version=nvidia, proc__sys__kernel__osrelease=release)
    assert hardware.gpudirect(tmp_path) is None
    write(tmp_path / PORT.format("mlx5_0"), state="4: ACTIVE")
    if peermem:
        (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    found = said(hardware.gpudirect(tmp_path))
    assert (found.verdict, found.mend) == (verdict, "modprobe nvidia-peermem" if verdict == "note" else None)


# What the kernel keeps apart


@pytest.mark.parametrize("scope, verdict", [(None, "ok"), ("0", "ok"), ("1", "note"), ("2", "note"), ("3", "note")])
def test_ptrace(tmp_path: Path, scope: str | None, verdict: str) -> None:
    if scope is not None:
        write(tmp_path, proc__sys__kernel__yama__ptrace_scope=scope)
    found = isolation.ptrace(tmp_path)
    assert found.verdict == verdict and bool(found.mend) == (scope in ("1", "2"))  # 3 stays until the next boot


def namespaces(root: Path, process: str, **inodes: int) -> None:
    folder = root / "proc" / process / "ns"
    folder.mkdir(parents=True)
    for kind, inode in inodes.items():
        (folder / kind).symlink_to(f"{kind}:[{inode}]")


@pytest.mark.parametrize(
    "ipc, pid, net, first, release, mend",
    [
        (4026531839, 4026531836, 4026531833, None, "6.18.0", None),
        (4026531839, 4026531836, 4026531992, 4026531992, "5.15.0", None),
        (4026531839, 4026531836, 4026532310, 4026531992, "5.15.0", "docker run --network=host"),
        (4026531839, 4026531836, 4026532310, None, "5.15.0", None),  # not to be told
        (4026532308, 4026532309, 4026531833, None, "6.18.0", "docker run --ipc=host --pid=host"),
        (4026532308, 4026532309, 4026532310, 4026532310, "6.18.0", "docker run --ipc=host --pid=host --network=host"),
    ],
)
def test_namespaces(
    tmp_path: Path, ipc: int, pid: int, net: int, first: int | None, release: str, mend: str | None
) -> None:
    write(tmp_path, proc__sys__kernel__osrelease=release)
    namespaces(tmp_path, "self", ipc=ipc, pid=pid, net=net)
    if first is not None:
        namespaces(tmp_path, "1", net=first)
    found = isolation.namespaces(tmp_path)
    assert (found.verdict, found.mend) == ("note" if mend else "ok", mend)


def test_namespaces_that_are_not_told(tmp_path: Path) -> None:
    assert isolation.namespaces(tmp_path).verdict == "note"


@pytest.mark.parametrize("free, verdict", [(8 << 30, "ok"), (64 << 20, "note")])
def test_dev_shm(tmp_path: Path, free: int, verdict: str) -> None:
    sizes = SimpleNamespace(f_frsize=4096, f_blocks=16 << 30 >> 12, f_bavail=free >> 12)
    found = memory.dev_shm(tmp_path, lambda folder: cast(os.statvfs_result, sizes))
    assert found.verdict == verdict and bool(found.mend) == (verdict == "note")
    missing = memory.dev_shm(tmp_path)
    assert missing.verdict == "note" and os.strerror(errno.ENOENT) in missing.reason


# UCX

SYMBOL = """
void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release) { *major = 1; *minor = 22; *release = 3; }
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that answers as UCX does."""
    made = tmp_path_factory.mktemp("ucx") / "libucp.so"
    run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(made)], input=SYMBOL, text=True, check=True)
    return made


def test_ucx(built: Path, tmp_path: Path) -> None:
    broken = write(tmp_path, libucp="no library") / "libucp"
    assert ucx.library([("the system", str(built))]).reason.startswith(f"1.22.3 of the system, {built};")
    assert ucx.library([]) == Finding("UCX", "ok", "not installed; no transport of this version uses it")
    second = ucx.library([("the wheel libucx", str(broken)), ("the system", str(built))])
    assert second.verdict == "ok" and "1.22.3" in second.reason and f"{broken}, can't be used: " in second.reason
    unusable = ucx.library([("the system", str(broken))])
    assert (unusable.verdict, unusable.mend) == ("note", "pip install libucx-cu13")
    named = ucx.library([(ucx.VARIABLE, "libc.so.6")])
    assert named.verdict == "fail" and "undefined symbol" in named.reason and ucx.VARIABLE in str(named.mend)
    assert "ends the process" in ucx.library([(ucx.VARIABLE, str(crashing(tmp_path)))]).reason


def crashing(folder: Path) -> Path:
    """A library that ends whoever loads it."""
    made, code = (
        folder / "libcrash.so",
        "#include <stdlib.h>\n__attribute__((constructor)) void end(void) { _Exit(3); }",
    )
    run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(made)], input=code, text=True, check=True)
    return made


def test_where_ucx_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert list(ucx.candidates({ucx.VARIABLE: "/opt/libucp.so"})) == [(ucx.VARIABLE, "/opt/libucp.so")]
    (tmp_path / "libucx").mkdir()
    (tmp_path / "libucx/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.0")
    assert list(ucx.candidates({})) == [
        ("the wheel libucx", f"{tmp_path}/libucx/lib/libucp.so.0"),
        ("the system", "libucp.so.0"),
    ]
