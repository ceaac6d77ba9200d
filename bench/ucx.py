"""UCX's own measuring program, from the wheel `libucx-cu13` if it is installed; two processes of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import time
from functools import cache
from pathlib import Path

WAIT_S = 120.0


@cache
def _home() -> Path | None:
    spec = importlib.util.find_spec("libucx")
    home = Path(spec.origin).parent if spec is not None and spec.origin else None
    return home if home is not None and (home / "bin" / "ucx_perftest").exists() else None


def available() -> bool:
    """Whether the program is here."""
    return _home() is not None


def half_round_trip_us() -> float:
    """1 KiB with tags, posix shared memory."""
    return float(_final("tag_lat", 1024, 20_000)[1])


def delivery_ms(nbytes: int) -> float:
    """One tagged message of that size, posix shared memory: its bandwidth, as time."""
    megabytes_per_s = float(_final("tag_bw", nbytes, 4)[4])
    return nbytes / (megabytes_per_s * (1 << 20)) * 1e3


def _final(test: str, nbytes: int, count: int) -> list[str]:
    """The last line of figures: count, then median, mean and overall time, mean and overall bandwidth, ..."""
    home = _home()
    assert home is not None
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": str(home / "lib"),
        "UCX_MODULE_DIR": str(home / "lib" / "ucx"),
        "UCX_TLS": "posix,self",
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [str(home / "bin" / "ucx_perftest"), "-p", port]
    server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _listening(int(port), server)
        client = [*command, "127.0.0.1", "-t", test, "-s", str(nbytes), "-n", str(count), "-w", "2"]
        text = subprocess.run(client, env=env, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
        server.wait(WAIT_S)
    finally:
        server.kill()
        server.wait()
    finals = re.findall(r"^Final:(.*)$", text, re.MULTILINE)
    if not finals:
        raise RuntimeError(f"ucx_perftest gave no figures:\n{text}")
    return str(finals[-1]).split()[1:]


def _listening(port: int, server: subprocess.Popen[bytes]) -> None:
    """Waits until the server listens, without connecting: it serves one client only."""
    wanted = re.compile(rf":{port:04X} [0-9A-F:]+ 0A")
    tables = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
    deadline = time.monotonic() + WAIT_S
    while not any(table.exists() and wanted.search(table.read_text()) for table in tables):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("ucx_perftest doesn't start")
        time.sleep(0.01)
