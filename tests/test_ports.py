"""Ports and the streams that end at them: what is advertised is what is bound, and thousands of transfers share a few streams."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest

import tensorlink as tl
from tensorlink.transports.tcp import TcpAddress
from tests.cluster import TOKEN
from tests.peer import Nursery, kept, nursery

__all__ = ["nursery"]

ENVIRONMENT = {"TENSORLINK_TRANSPORTS": "tcp", "TENSORLINK_TOKEN": TOKEN}
WAYS = 8
"""Streams that two peers may have: a lane each way, some for reads, one of gRPC each way."""


def port_of(endpoint: tl.Endpoint) -> int:
    return TcpAddress.decode(endpoint._links.transports["tcp"].address()).port


def port_of_this() -> int:
    return port_of(tl.current())


def put(array: np.ndarray) -> tl.TensorRef:
    ref = tl.put(array)
    kept.setdefault("refs", []).append(ref)
    return ref


def streams_to(port: int) -> int:
    """Sockets of this network with that port at one end, also those that only wait for their time to be over."""
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    ends = [(int(row[1].rpartition(":")[2], 16), int(row[2].rpartition(":")[2], 16)) for row in rows]
    return sum(theirs == port for _, theirs in ends) + sum(ours == port and theirs != 0 for ours, theirs in ends)


def test_a_taken_port_is_not_the_one_that_is_advertised(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        for name, value in {**ENVIRONMENT, "TENSORLINK_PORTS": f"{first}-{min(first + 50, 65535)}"}.items():
            monkeypatch.setenv(name, value)
        with tl.init("a") as a:
            child = nursery.start()
            child.call(tl.init, "b")
            assert len({first, port_of(a), child.call(port_of_this)}) == 3
            assert a.get(child.call(put, np.arange(9))).sum() == 36
            child.call(tl.shutdown)
            child.close()


@pytest.mark.parametrize("count", [2_000, pytest.param(30_000, marks=pytest.mark.soak)])
def test_thousands_of_transfers_take_a_few_streams(
    count: int, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    child = nursery.start()
    with tl.init("a") as a:
        child.call(tl.init, "b")
        refs = [child.call(put, np.full(100_000 * (i % 2) + 9, i, np.uint8)) for i in range(4)]
        for i in range(count):
            assert a.get(refs[i % 4])[-1] == i % 4
        assert streams_to(child.call(port_of_this)) <= WAYS
        child.call(tl.shutdown)
    child.close()
