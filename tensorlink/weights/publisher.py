"""The publisher: each version is an object in its pool, and what there is to pull stands on its board."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from tensorlink import _core
from tensorlink.endpoint import Endpoint, Timeout
from tensorlink.errors import ClosedError, PoolExhaustedError, TensorLinkError
from tensorlink.weights.common import CLOSED, count, open_endpoint, service

LARGEST = (1 << 63) - 1


class WeightPublisher:
    """Publishes versions of the tensors of `state_dict` under a name. May be used from any thread.

    `state_dict` is a dict of tensors, nested or not, such as `model.state_dict()`; it is read anew by each `publish`,
    so tensors that share memory with a live model give its values of that moment. Values that are no tensors are
    ignored by subscribers. Tensors that share their memory are sent once.

    The versions are held in the pool of this process: the newest, the one before it, and older ones only as
    long as a reader is at them. Room for two versions is enough where readers are quick.

    Raises: NameInUseError: a live peer publishes under that name, or another publisher of this process; ValueError: the
    name is empty or longer than 120 bytes; TypeError: something in `state_dict` cannot travel.
    """

    def __init__(self, name: str, state_dict: Mapping[str, Any], *, endpoint: Endpoint | None = None) -> None:
        if not 0 < len(name.encode()) <= 120 or not name.isprintable():
            raise ValueError(f"the name of weights has 1 to 120 printable bytes, not {name!r}")
        self.name = name
        self._endpoint = open_endpoint(endpoint)
        self._state_dict = state_dict
        self._lock = threading.Lock()
        self._closed = False
        self._kept: list[tuple[int, int]] = []  # (claim, bytes): the version before the newest, and the newest
        self._stats: dict[str, Any] = {
            "publishes": 0,
            "bytes": 0,
            "seconds": 0.0,
            "total_bytes": 0,
            "total_seconds": 0.0,
        }
        _core.pack(state_dict)  # what cannot travel is told now
        self._endpoint._serve(service(name))
        before = self._endpoint._engine.published(name)
        self._version: int | None = before[0] if before else None

    @property
    def version(self) -> int | None:
        """The newest version; None: nothing was published."""
        return self._version

    def publish(self, version: int | None = None, *, timeout: Timeout = ...) -> int:
        """Publishes the tensors as they are now, and returns the number of the version: `version`, or one more than the
        last.

        Copies them into the pool once; nothing else in this process may write them meanwhile. When it returns, the
        next pull of every subscriber on this host gets this version or a newer one; other hosts are being told. Where
        the budget of the pool leaves no room because a slow reader still holds an old version, it waits for the reader
        for `timeout` seconds. Where the whole budget is too small for two versions, the last one is given up first, and
        pulls wait until this one is there.

        Raises: ValueError: `version` doesn't grow; PoolExhaustedError: no room in time, and the message names who holds
        what; TypeError: something cannot travel; ClosedError. After a failure the last version stays the newest (with
        a budget for one version there may be none to pull until a `publish` succeeds).
        """
        endpoint = self._endpoint
        endpoint._check()
        wait_s = endpoint._moving(timeout)
        with endpoint._work, self._lock:
            if self._closed:
                raise ClosedError(f"the publisher of {self.name!r} was closed", hint="Make a new one")
            number = self._next(version)
            start = time.perf_counter()
            packed = _core.pack(self._state_dict)
            claim, descriptor = self._store(packed, wait_s)
            if not endpoint._engine.publish(self.name, number, descriptor):
                endpoint._engine.release(claim)
                raise PoolExhaustedError("this process has published under 64 names, the most it can", phase="publish")
            self._kept.append((claim, packed.nbytes))
            self._version = number
            self._count(packed.nbytes, time.perf_counter() - start)
            return number

    def stats(self) -> dict[str, Any]:
        """Counters: `version`; `publishes`; `bytes` and `seconds` of the last one; `total_bytes`, `total_seconds`;
        `kept_versions`."""
        return {"version": self._version, **self._stats, "kept_versions": len(self._kept)}

    def close(self) -> None:
        """Ends it: the name is free, and the versions go once nobody is reading them. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            endpoint = self._endpoint
            if endpoint.closed:
                return  # all that it had went with it
            with contextlib.suppress(TensorLinkError):
                if self._version is not None:
                    endpoint._engine.publish(self.name, self._version, CLOSED)
                self._release(0)
                endpoint._withdraw(service(self.name))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self, version: int | None) -> int:
        last = self._version
        if version is None:
            return 1 if last is None else last + 1
        number = int(version)
        if not 0 <= number <= LARGEST or (last is not None and number <= last):
            raise ValueError(f"a version must grow: {version} after {last}")
        return number

    def _store(self, packed: _core.Packed, wait_s: float) -> tuple[int, bytes]:
        """The tensors in the pool. Older versions are released first, so that no more than two are ever there."""
        self._release(1)
        engine = self._endpoint._engine
        stored = engine.store(packed, 0, 0.0, 0, 0, 0.0)
        if stored is None:
            budget = engine.usage()["budget_bytes"]
            nbytes = packed.nbytes + len(packed.meta)
            if self._kept and nbytes <= budget < nbytes + self._kept[-1][1]:
                self._release(0)  # two never fit: nothing to wait for while this one stands
            stored = engine.store(packed, 0, 0.0, 0, 0, wait_s)
        if stored is None:
            raise self._endpoint._exhausted(packed.nbytes, "publish")
        return stored.claim, stored.descriptor

    def _release(self, keep: int) -> None:
        while len(self._kept) > keep:
            self._endpoint._engine.release(self._kept.pop(0)[0])

    def _count(self, nbytes: int, seconds: float) -> None:
        self._stats["publishes"] += 1
        count(self._stats, nbytes, seconds)
