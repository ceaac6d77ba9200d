"""UCX's own measuring program, from the wheel `libucx-cu13` if it is installed; two processes of its own."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

WAIT_S = 120.0


def _here(*command: str) -> list[str]:
    return list(command)


@dataclass(frozen=True)
class Fabric:
    """Where its two processes run, and by what they talk."""

    server: Callable[..., list[str]] = _here
    client: Callable[..., list[str]] = _here
    """What makes a command run in the place that is meant."""
    address: str = "127.0.0.1"
    transport: str = "posix"
    segments: bool = False
    """TCP in segments of 256 KiB, not of 8 KiB."""

    def environment(self) -> list[str]:
        settings = {"UCX_TLS": f"{self.transport},self", "UCX_LOG_LEVEL": "fatal"}
        if self.segments:
            settings |= {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
        return [f"{name}={value}" for name, value in settings.items()]


HERE = Fabric()


@cache
def _home() -> Path | None:
    spec = importlib.util.find_spec("libucx")
    home = Path(spec.origin).parent if spec is not None and spec.origin else None
    return home if home is not None and (home / "bin" / "ucx_perftest").exists() else None


def available() -> bool:
    """Whether the program is here."""
    return _home() is not None


def half_round_trip_us(fabric: Fabric = HERE, nbytes: int = 1024, count: int = 20_000) -> float:
    """With tags; both ends spin."""
    return float(_final("tag_lat", nbytes, count, fabric)[1])


def delivery_ms(nbytes: int, fabric: Fabric = HERE, test: str = "tag_bw") -> float:
    """One message of that size, or one read with "ucp_get": its bandwidth, as time."""
    count = max(4, min(10_000, (256 << 20) // nbytes))
    megabytes_per_s = float(_final(test, nbytes, count, fabric)[4])
    return nbytes / (megabytes_per_s * (1 << 20)) * 1e3


def _final(test: str, nbytes: int, count: int, fabric: Fabric) -> list[str]:
    """The last line of figures: count, then median, mean and overall time, mean and overall bandwidth, ..."""
    home = _home()
    assert home is not None
    libraries = [f"LD_LIBRARY_PATH={home / 'lib'}", f"UCX_MODULE_DIR={home / 'lib' / 'ucx'}"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = ["env", *libraries, *fabric.environment(), str(home / "bin" / "ucx_perftest"), "-p", port]
    server = subprocess.Popen(fabric.server(*command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await_listener(int(port), server)
        client = fabric.client(*command, fabric.address, "-t", test, "-s", str(nbytes), "-n", str(count), "-w", "2")
        text = subprocess.run(client, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
        server.wait(WAIT_S)
    finally:
        server.kill()
        server.wait()
    finals = re.findall(r"^Final:(.*)$", text, re.MULTILINE)
    if not finals:
        raise RuntimeError(f"ucx_perftest gave no figures:\n{text}")
    return str(finals[-1]).split()[1:]


def await_listener(port: int, server: subprocess.Popen[bytes]) -> None:
    """Waits until a server listens in its own host, without connecting: these serve one client only."""
    wanted = re.compile(rf":{port:04X} [0-9A-F:]+ 0A")
    tables = [Path(f"/proc/{server.pid}/net/{table}") for table in ("tcp", "tcp6")]
    deadline = time.monotonic() + WAIT_S
    while not any(table.exists() and wanted.search(table.read_text()) for table in tables):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{server.args!r} doesn't start")
        time.sleep(0.01)
