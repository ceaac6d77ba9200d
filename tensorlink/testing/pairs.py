"""Connected pairs for `TransportContract`: two sides in one process, or in two.

What a side reads is compared by digests that travel over a pipe, never over the transport under test.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import secrets
import shutil
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorlink import _core
from tensorlink.errors import PoolExhaustedError
from tensorlink.settings import Settings
from tensorlink.testing.far import FarProcess, Zygote
from tensorlink.testing.wrapper import FaultyTransport, Plan
from tensorlink.transports import registry
from tensorlink.transports.base import Connection, Site, View
from tensorlink.types import Buffer, PeerId

Bytes = npt.NDArray[np.uint8]

POOL_BYTES = 256 << 20


def eventually(condition: Callable[[], object], what: str, timeout: float = 20.0) -> None:
    """Waits until `condition()` holds. Raises: AssertionError: it doesn't within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"in {timeout} s it never came that {what}"
        time.sleep(0.002)


def pattern(seed: int, nbytes: int) -> Bytes:
    """Bytes that only this seed gives: random blocks of 1 MiB, each with its number in it."""
    block = np.random.default_rng(seed).integers(0, 256, min(nbytes, 1 << 20), dtype=np.uint8)
    made = np.resize(block, nbytes) if nbytes else block
    made[::4096] = np.arange(len(made[::4096])).astype(np.uint8)
    return made


def digest(data: Bytes | memoryview) -> str:
    return hashlib.blake2b(
        data,  # type: ignore[arg-type]  # numpy arrays export their bytes
        digest_size=16,
    ).hexdigest()


def buffer_of(array: Bytes) -> Buffer:
    """The memory of a contiguous array."""
    return Buffer(array.ctypes.data, array.nbytes)


def view_digest(view: View) -> str:
    """Digest of what a view shows, read where it lies."""
    summary = hashlib.blake2b(digest_size=16)
    for address, nbytes in view.addresses():
        if nbytes:
            summary.update((ctypes.c_char * nbytes).from_address(address))
    return summary.hexdigest()


class Side:
    """One end: a transport over an engine of its own, and what a test does there. Its methods take and return plain values."""

    def __init__(
        self,
        transport: str,
        name: str,
        incarnation: int,
        pool_bytes: int = POOL_BYTES,
        listen: str | None = "127.0.0.1",
        plan: Plan | None = None,
    ) -> None:
        self.peer = PeerId(name, incarnation)
        self._folder = tempfile.mkdtemp(prefix="tl", dir="/tmp")
        key = secrets.token_bytes(16)
        path = f"{self._folder}/engine"
        self.engine = _core.Engine(name, path, key, pool_bytes)
        settings = Settings.load()
        if settings.tls_cert and settings.tls_key and settings.tls_ca:
            self.engine.secure(settings.tls_cert, settings.tls_key, settings.tls_ca, "tensorlink")
        self.engine.start(incarnation)
        made = registry.load(transport)(Site(self.engine, path, key, socket.gethostname(), os.getpid(), listen))
        self.transport = made if plan is None else FaultyTransport(made, plan)
        self.connection: Connection
        self._views: dict[int, View] = {}
        self._memory: dict[bytes, Bytes] = {}

    def facts(self) -> tuple[PeerId, bytes, int]:
        """Who it is, its address, and its process."""
        return self.peer, self.transport.address(), os.getpid()

    def connect(self, peer: PeerId, address: bytes, timeout: float = 10.0) -> None:
        self.connection = self.transport.connect(peer, address, None, timeout)

    def expose(self, seed: int, sizes: Sequence[int], pooled: bool = False) -> list[bytes]:
        """Exposes a pattern for each size; `pooled`: from memory of the pool, which is not copied."""
        arrays = []
        for i, nbytes in enumerate(sizes):
            data = pattern(seed + i, nbytes)
            if pooled:
                block = self.engine.empty(nbytes, 10.0)
                block[:] = data
                data = block
            arrays.append(data)
        descriptors = self.connection.expose([buffer_of(a) for a in arrays])
        self._memory.update(zip(descriptors, arrays, strict=True))
        return descriptors

    def retract(self, descriptors: Sequence[bytes]) -> None:
        self.connection.retract(descriptors)
        for descriptor in descriptors:
            self._memory.pop(descriptor, None)

    def churn(self, seed: int, nbytes: int, rounds: int) -> None:
        """Exposes and retracts other patterns, so that memory that is free is used again."""
        for i in range(rounds):
            self.retract(self.expose(seed + i, [nbytes]))

    def room(self, nbytes: int) -> bool:
        """Whether that much can be exposed now."""
        memory = np.empty(nbytes, np.uint8)
        try:
            self.retract(self.connection.expose([buffer_of(memory)]))
        except PoolExhaustedError:
            return False
        return True

    def fetch(self, descriptors: Sequence[bytes], sizes: Sequence[int], timeout: float = 30.0) -> list[str]:
        """Fetches all at once; digests of what arrived."""
        targets = [np.zeros(nbytes, np.uint8) for nbytes in sizes]
        self.connection.fetch(list(zip(descriptors, map(buffer_of, targets), strict=True))).wait(timeout)
        return [digest(target) for target in targets]

    def map(self, descriptor: bytes) -> int | None:
        """Opens a view and keeps it; its number, or None where the transport has no views."""
        view = self.connection.map(descriptor, 10.0)
        if view is None:
            return None
        number = len(self._views) + 1
        self._views[number] = view
        return number

    def show(self, number: int) -> str:
        return view_digest(self._views[number])

    def drop_views(self) -> None:
        self._views.clear()

    def up(self) -> bool:
        return self.connection.up

    def close(self) -> None:
        self.connection.close()

    def abort(self) -> None:
        self.connection.abort()

    def resources(self) -> tuple[int, int, int]:
        """Open descriptors, mappings and threads of this process."""
        with open("/proc/self/maps") as maps:
            named = sum("memfd:" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), named, len(os.listdir("/proc/self/task"))

    def shutdown(self) -> None:
        """Ends the transport and the engine, and forgets them, so that their memory goes too. Idempotent."""
        self.drop_views()
        self._memory.clear()
        if os.path.exists(self._folder):
            self.transport.close()
            self.engine.close()
            shutil.rmtree(self._folder)
            vars(self).pop("connection", None)
            del self.transport, self.engine


class Pair:
    """Two sides that have connected to each other: `near` in this process, `far` here or in another."""

    def __init__(self, near: Side, far: Any, process: FarProcess | None) -> None:
        self.near = near
        self.far: Side = far
        """A `Side`, or a `RemoteSide` that behaves like one but for its attributes."""
        self._process = process

    def connect(self) -> None:
        self.near.connect(*self.far.facts()[:2])
        self.far.connect(*self.near.facts()[:2])

    def kill_far(self) -> None:
        """SIGKILL to the far process; returns once it has ended."""
        assert self._process is not None
        self._process.kill()

    @contextlib.contextmanager
    def far_stopped(self) -> Iterator[None]:
        """The far process does nothing meanwhile."""
        assert self._process is not None
        self._process.stop()
        try:
            yield
        finally:
            self._process.go_on()

    def close(self) -> None:
        self.near.shutdown()
        if self._process is None or self._process.alive:
            self.far.shutdown()


class PairMaker(ABC):
    """Makes pairs for the tests of one class, one at a time. With a `plan` the near side's transport has its faults."""

    separate: bool
    """Whether the far side is another process, which tests may stop and kill."""
    listen = "127.0.0.1"
    """Where the near side may listen for other hosts."""

    def __init__(self, transport: str, plan: Plan | None = None) -> None:
        self.transport = transport
        self.plan = plan
        self._count = 0

    def pair(self, pool_bytes: int = POOL_BYTES, connected: bool = True) -> Pair:
        self._count += 1
        near = Side(self.transport, "near", self._count, pool_bytes, self.listen, self.plan)
        made = self.make(near, ("far", self._count, pool_bytes))
        if connected:
            made.connect()
        return made

    @abstractmethod
    def make(self, near: Side, far: tuple[str, int, int]) -> Pair:
        """A pair of `near` and a side of that name, incarnation and pool size."""

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """Ends what all pairs share."""


class OneProcess(PairMaker):
    """Both sides in this process."""

    separate = False

    def make(self, near: Side, far: tuple[str, int, int]) -> Pair:
        return Pair(near, Side(self.transport, *far), None)


class TwoProcesses(PairMaker):
    """The far side in a process of its own, which goes on from pair to pair until a test kills it."""

    separate = True
    far_listen = "127.0.0.1"
    """Where the far side may listen for other hosts."""
    prefix: Sequence[str] = ()
    """Of the far process, as `Zygote` takes it."""
    _zygote: Zygote | None = None
    _process: FarProcess | None = None

    def make(self, near: Side, far: tuple[str, int, int]) -> Pair:
        if self._process is None or not self._process.alive:
            self._zygote = self._zygote or Zygote(self.prefix)
            self._process = FarProcess(self._zygote)
        return Pair(near, self._process.side(self.transport, *far, self.far_listen), self._process)

    def close(self) -> None:
        if self._process is not None and self._process.alive:
            self._process.end()
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None
