"""Writes the inputs that the fuzzers begin with, as the encoders make them. Usage: python tools/corpus.py

They lie in tests/fuzz/corpus/HARNESS. What a fuzzer found lies there too, as `found-...`, and stays as it is.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from grpc import StatusCode

from tensorlink import _core
from tensorlink.control import control_pb2 as pb
from tensorlink.control.wire import status_of
from tensorlink.errors import PeerLostError
from tensorlink.flight import new_file
from tensorlink.transports.pool import Address
from tensorlink.transports.tcp import TcpAddress
from tensorlink.types import Layout, PeerId, TensorRef

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
FOUND = "found-"
BASE = np.arange(24.0).reshape(4, 6)
KEY = bytes(range(16))


def meta() -> Iterator[tuple[str, bytes]]:
    shared = np.arange(4, dtype="f4")
    tree = {"a": shared, "b": [np.ones((2, 3), "f2"), None, 2**90, -5, 1.5, "text"], ("k", 1): (shared, b"x", True)}
    yield "meta/tree", _core.pack(tree).meta
    yield "meta/nested", _core.pack({1: {2: {3: [np.uint8(1).reshape(()), np.empty((0, 5))]}}}).meta
    placed = _core.pack(BASE[::-1, ::2]).meta_in_place([(BASE.ctypes.data, BASE.nbytes)])
    assert placed is not None
    yield "meta/strided", placed


def scripts() -> Iterator[tuple[str, bytes]]:
    """Of those who share memory with us; `csrc/fuzz/shared_fuzz.cpp` says how it reads them."""
    yield "shared/consume", bytes([0, 0, 16, 3, 3, 8, 2, 5, 40, 6])
    yield "shared/wrap", bytes([0, 0, 56, 8, 8, 56, 8, 16, 56, 8, 24, 0xFF, 8, 0, 8, 2])
    yield "shared/produce", bytes([1, 16, 0, 64, 0, 40, 64, 8, 8, 60, 255]) + bytes(8)
    yield (
        "shared/hold",
        bytes([2, 0x84, *(1 << 20).to_bytes(8, "little"), 0x85, *(1 << 20).to_bytes(8, "little"), 6, 9, 0, 7, 0, 0]),
    )
    slot = (2).to_bytes(8, "little") + (1).to_bytes(8, "little") + (32).to_bytes(4, "little") + b"x".ljust(132, b"\0")
    yield "shared/look", bytes([3, 0]) + slot.ljust(416, b"\1")


def values() -> Iterator[tuple[str, bytes]]:
    """What travels in other ways; parsed by Python."""
    layout = Layout((3, 4), "float32", 4)
    one = TensorRef(7, PeerId("trainer", 1), "10.0.0.1:4000", 48, layout, b"", {"tcp": b"descriptor", "shm": b"other"})
    yield "handle/one", one.to_bytes()
    yield "handle/tree", TensorRef(8, one.owner, one.address, 96, None, _core.pack([1]).meta, {"tcp": b"d"}).to_bytes()
    yield "address/tcp", TcpAddress("10.0.0.1", 4000, KEY.hex()).encode()
    yield "address/ipv6", TcpAddress("fe80::1%eth0", 4000, KEY.hex()).encode()
    yield "address/pool", Address("boot", 17, "/run/user/0/tensorlink/engine", KEY.hex()).encode()
    peer = pb.Peer(name="trainer", incarnation=1, address="10.0.0.1:4000", host="boot", pid=17, services=["weights/w"])
    code, details, (kind, *named) = status_of(PeerLostError("it died", peer="trainer", hint="Start it again"))
    words = [details.encode(), str(kind[1]).encode(), *(bytes(value) for _, value in named)]  # type: ignore[arg-type]
    yield "status/lost", bytes([[*StatusCode].index(code)]) + b"\0".join(words)
    yield "peer/one", peer.SerializeToString(deterministic=True)


def flight() -> Iterator[tuple[str, bytes]]:
    """A file of the flight recorder with two operations and two events, and nothing in it of the machine that made it."""
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        path = new_file(folder, Path(folder))
        engine = _core.Engine("trainer", str(Path(folder) / "socket"), KEY, 1 << 20, path)
        engine.start(1)
        engine.flight.note("path", "failed over", "rollout", 2, "tcp", "broke", failed=True)
        span = engine.flight.begin("get", "rollout", "bytes", "policy")
        whole = Path(path).read_bytes()
        span.end("done", False)
        engine.close()
    header, record, operations = 4096, 256, 192
    head = bytearray(whole[:952])
    struct.pack_into("<IIIIIQqq", head, 12, len(head), record, 2, 2, 17, 5, 10**18, 10**9)
    struct.pack_into("<q", head, 72, 3 * 10**9)
    head[104:144] = b"00000000-0000-0000-0000-000000000000".ljust(40, b"\0")
    slots = [whole[at : at + record] for at in range(header, len(whole), record)]
    held = [slot for slot in slots[:operations] if any(slot)]
    for slot in map(bytearray, [*held, bytes(record), *slots[operations : operations + 2]]):
        if any(slot):
            struct.pack_into("<qq", slot, 8, 10**9, 2 * 10**9)
            struct.pack_into("<I", slot, 48, 17)
        head += slot
    yield "flight/one", bytes(head)


def main() -> None:
    for path in CORPUS.glob("*/*"):
        if not path.name.startswith(FOUND):
            path.unlink()
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        program = Path(folder) / "corpus"
        compiler = os.environ.get("CXX", "g++")
        source = ROOT / "csrc" / "fuzz" / "corpus.cpp"
        flags = ["-std=c++17", "-O0", "-fno-strict-aliasing", "-pthread"]
        subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
        subprocess.run([str(program), str(CORPUS)], check=True)
    for part in (meta(), scripts(), values(), flight()):
        for name, data in part:
            path = CORPUS / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    written = sorted(CORPUS.glob("*/*"))
    sys.stdout.write(f"{len(written)} files, {sum(path.stat().st_size for path in written)} bytes\n")


if __name__ == "__main__":
    main()
