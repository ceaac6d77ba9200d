"""UCX: which library a transport over it would take, and of which version."""

from __future__ import annotations

import ctypes.util
import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tensorlink.doctor.finding import Finding

VARIABLE = "TENSORLINK_UCX_LIBRARY"
_MEND = "pip install libucx-cu13"
# In a process of its own: UCX takes over signals while it is loaded, and what else a variable names may end the process.
_ASK = """
import ctypes, sys
numbers = [ctypes.c_uint() for _ in range(3)]
try:
    ctypes.CDLL(sys.argv[1]).ucp_get_version(*map(ctypes.byref, numbers))
except (OSError, AttributeError) as error:
    raise SystemExit(str(error))
print(*(number.value for number in numbers), sep=".")
"""


def candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Where UCX is looked for, in order, each with who says so: what the user names, the wheel, the system."""
    if named := environment.get(VARIABLE):
        yield VARIABLE, named
        return  # who names one wants no other
    wheel = importlib.util.find_spec("libucx")
    if wheel is not None and wheel.origin is not None:
        yield "the wheel libucx", str(Path(wheel.origin).parent / "lib" / "libucp.so.0")
    system = ctypes.util.find_library("ucp")
    if system is not None:
        yield "the system", system


def library(found: Iterable[tuple[str, str]], timeout: float = 10.0) -> Finding:
    """The first of the candidates that loads. Blocks up to `timeout` seconds for each."""
    failures: list[str] = []
    for source, path in found:
        version, why = _version(path, timeout)
        if version is not None:
            reason = f"{version} of {source}, {path}; no transport of this version uses it"
            return Finding("UCX", "ok", "; ".join([reason, *failures]))
        if source == VARIABLE:
            return Finding("UCX", "fail", f"{VARIABLE}={path} can't be used: {why}", f"unset {VARIABLE}, or {_MEND}")
        failures.append(f"that of {source}, {path}, can't be used: {why}")
    if failures:
        return Finding("UCX", "note", "; ".join(failures), _MEND)
    return Finding("UCX", "ok", "not installed; no transport of this version uses it")


def _version(path: str, timeout: float) -> tuple[str | None, str]:
    """Its version, or why there is none."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _ASK, path], capture_output=True, text=True, timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if done.returncode == 0:
        return done.stdout.strip(), ""
    said = done.stderr.strip().splitlines()
    return None, said[-1] if said else f"loading it ends the process ({done.returncode})"
