"""Two hosts with a process in each: what their processes do, and what measures them from outside.

Functions at the end run in the processes. The near one measures: it reads from the far one, or sends to it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import tensorlink as tl
from bench import ucx
from bench.contenders import Contender, Gloo, Meeting, TensorLink
from bench.measure import each
from bench.nixl_pair import NixlPair
from bench.nixl_pair import missing as nixl_missing
from tensorlink.control import serve
from tensorlink.settings import Settings
from tests.hosts import Host, Network
from tests.peer import kept, say

CONGESTION = os.environ.get("BENCH_CONGESTION", "cubic")
"""The same for all that is compared: what the system chooses may pace one stream."""
CALL_S = 300.0
GIB = 1 << 30
TOKEN = "for the benchmarks only"


class Across:
    """Both hosts. `near` and `far` are processes that have joined all contenders."""

    def __init__(self, network: Network, kinds: Sequence[type[Contender]] = (TensorLink, Gloo)) -> None:
        self.near_host, self.far_host = network.hosts
        for host in network.hosts:
            host.congestion_control(CONGESTION)
        joined = coordinated(self.near_host)
        meeting = Meeting(f"tcp://{self.near_host.ip}:29400", None, None, pool_bytes=3 * GIB)
        environment = {**joined, "GLOO_SOCKET_IFNAME": "eth0"}
        self.near, self.far = (host.spawn(**environment) for host in network.hosts)
        self.near.start(join, kinds, meeting, True)
        self.far.call(join, kinds, meeting, False, timeout=CALL_S)
        self.near.finish(CALL_S)
        self._nixl: dict[bool, NixlPair] = {}
        for kind in kinds:  # whatever is set up at the first use
            self.delivery_ms(kind.name, 64, 1)

    def both(self, far: Callable[..., Any], near: Callable[..., Any], *arguments: Any) -> Any:
        """Runs one function in each, and returns what the near one gave."""
        self.far.start(far, *arguments)
        result = self.near.call(near, *arguments, timeout=CALL_S)
        self.far.finish(CALL_S)
        return result

    def delivery_ms(self, name: str, nbytes: int, count: int) -> float:
        """A private tensor there, into memory of the receiver's, until the sender has heard that it came."""
        return float(self.both(sink, deliver, name, nbytes, count)) * 1e3

    def get_ms(self, nbytes: int, count: int) -> float:
        ref = self.far.call(put, nbytes)
        try:
            return float(self.near.call(get_into, ref, count, timeout=CALL_S)) * 1e3
        finally:
            self.far.call(drop)

    def iperf_bytes_per_s(self) -> float:
        """One stream of `iperf3 -l 1M`, far to near."""
        server = subprocess.Popen(
            self.near_host.command("iperf3", "-s", "-1", "-p", "5201"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            ucx.await_listener(5201, server)
            client = self.far_host.command("iperf3", "-c", self.near_host.ip, "-l", "1M", "-t", "1", "-J")
            text = subprocess.run(client, capture_output=True, text=True, timeout=CALL_S, check=True).stdout
            server.wait(CALL_S)
        finally:
            server.kill()
            server.wait()
        return float(json.loads(text)["end"]["sum_received"]["bits_per_second"]) / 8

    def ucx_ms(self, test: str, nbytes: int, segments: bool) -> float:
        fabric = ucx.Fabric(self.near_host.command, self.far_host.command, self.near_host.ip, "tcp", segments)
        return ucx.delivery_ms(nbytes, fabric, test)

    def nixl_ms(self, operation: str, nbytes: int, segments: bool, count: int) -> float:
        if segments not in self._nixl:
            self._nixl[segments] = NixlPair(self.near_host, self.far_host, segments=segments)
        return self._nixl[segments].seconds(operation, nbytes, count) * 1e3

    def missing(self) -> list[str]:
        """Who can't take part here, and why."""
        found = [] if shutil.which("iperf3") else ["no iperf3: the program isn't installed"]
        found += [] if ucx.available() else ["no UCX: the wheel libucx-cu13 isn't installed"]
        return found + ([why] if (why := nixl_missing()) else [])

    def close(self) -> None:
        for pair in self._nixl.values():
            pair.close()


def coordinated(host: Host) -> dict[str, str]:
    """Starts a coordinator in a host; the settings, as environment variables, of the peers that join there."""
    coordinator = host.spawn(TENSORLINK_TOKEN=TOKEN)
    coordinator.start(coordinate, host.ip)
    return {"TENSORLINK_TOKEN": TOKEN, "TENSORLINK_COORDINATOR": str(coordinator.hear())}


# What the processes do


def coordinate(ip: str) -> None:
    serve(Settings.load(), f"{ip}:0", say)


def join(kinds: Sequence[type[Contender]], meeting: Meeting, near: bool) -> None:
    torch.set_num_threads(1)
    kept["ends"] = {kind.name: kind(meeting, near) for kind in kinds}
    kept["refs"] = []


def _end(name: str) -> Contender:
    end: Contender = kept["ends"][name]
    return end


def _tensor(nbytes: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((nbytes,), int(value), dtype=torch.uint8)


def sink(name: str, nbytes: int, count: int) -> None:
    end, out = _end(name), _tensor(nbytes)
    for _ in range(count + 1):
        end.recv_into(out)
        end.send(out[:1])


def deliver(name: str, nbytes: int, count: int) -> float:
    end, tensor = _end(name), _tensor(nbytes, 1)
    token = tensor[:1].clone()

    def once() -> None:
        end.send(tensor)
        end.recv_into(token)

    return each(once, count)


def put(nbytes: int) -> tl.TensorRef:
    tensor = tl.empty((nbytes,), torch.uint8)
    tensor.fill_(1)
    kept["refs"].append(tl.put(tensor, copy=False))
    ref: tl.TensorRef = kept["refs"][-1]
    return ref


def drop() -> None:
    while kept["refs"]:
        kept["refs"].pop().release()


def get_into(ref: tl.TensorRef, count: int) -> float:
    out = _tensor(ref.nbytes)
    taken = each(lambda: tl.get(ref, out=out), count)
    assert bool(out.all())
    return taken


def echo(nbytes: int, count: int, pause_s: float) -> None:
    """Sends back what comes, after a pause in which the other one falls asleep."""
    end, out = _end("tensorlink"), _tensor(nbytes)
    for _ in range(count + 1):
        end.recv_into(out)
        _pass(pause_s)
        end.send(out)


def half_trip(nbytes: int, count: int, pause_s: float) -> float:
    """Seconds of one way, with a pause before each message."""
    end, out = _end("tensorlink"), _tensor(nbytes)

    def trip() -> None:
        end.send(out)
        end.recv_into(out)

    return (each(trip, count, lambda: _pass(pause_s)) - pause_s) / 2


def _pass(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while seconds and time.perf_counter() < end:
        pass


def sink_tree(kind: str, size: int, count: int) -> None:
    del kind, size
    end = _end("tensorlink")
    for _ in range(count + 1):
        got = end.recv(None)
        end.send(_tensor(1))
        del got


def deliver_tree(kind: str, size: int, count: int) -> float:
    """Seconds a tensor of 4 KiB."""
    make: Callable[[int], Any] = {
        "numpy": lambda i: np.full(1024, i, np.float32),
        "torch": lambda i: torch.full((1024,), float(i)),
    }[kind]
    tree = {f"layers.{i}.weight": make(i) for i in range(size)}
    end, token = _end("tensorlink"), _tensor(1)

    def once() -> None:
        end.send(tree)
        end.recv_into(token)

    return each(once, count) / size


def cancel(ref: tl.TensorRef, count: int) -> float:
    """Seconds from cancel() to its return, while bytes arrive: a quarter is here."""
    out = _tensor(ref.nbytes)

    def begin() -> tl.Transfer:
        out.zero_()
        transfer = tl.iget(ref, out=out)
        while not out[ref.nbytes // 4]:
            assert not transfer.done()
        return transfer

    times = []
    for _ in range(count):
        transfer = begin()
        start = time.perf_counter()
        stopped = transfer.cancel()
        times.append(time.perf_counter() - start)
        assert stopped
    return float(np.median(times))


def publish(state_dict_maker: Callable[[], dict[str, torch.Tensor]], name: str) -> int:
    """Publishes, at first with a new publisher; the bytes."""
    if "publisher" not in kept:
        kept["weights"] = state_dict_maker()
        kept["publisher"] = tl.WeightPublisher(name, kept["weights"])
    kept["publisher"].publish()
    return sum(tensor.nbytes for tensor in kept["weights"].values())


def subscribe(state_dict_maker: Callable[[], dict[str, torch.Tensor]], name: str) -> None:
    kept["subscriber"] = tl.WeightSubscriber(name, state_dict_maker())


def pull(min_version: int | None = None) -> tuple[float, float]:
    """When it began and ended, on the clock that all processes share."""
    start = time.perf_counter()
    kept["subscriber"].pull(min_version)
    return start, time.perf_counter()


def close_weights() -> None:
    for name in ("publisher", "subscriber", "weights"):
        if name in kept and hasattr(kept[name], "close"):
            kept[name].close()
        kept.pop(name, None)
