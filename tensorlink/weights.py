"""Weights: one process publishes versions of a state dict, any number of others pull the newest one.

A version is an object in the publisher's pool. Its number and descriptor lie on the publisher's board, in shared
memory, so subscribers learn of it and read it with no message, also while the publisher's interpreter is busy. A pull
holds the version that it reads, and a held version never changes: so a pull gives all of one version, whatever the
publisher does meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tensorlink import _core, flight
from tensorlink.api import current
from tensorlink.endpoint import Endpoint, Timeout
from tensorlink.errors import (
    ClosedError,
    NoPathError,
    PeerLostError,
    PeerRestartedError,
    PeerUnknownError,
    PoolExhaustedError,
    StaleRefError,
    TensorLinkError,
    TransferCancelledError,
    TransferTimeoutError,
    TransportError,
)
from tensorlink.transfer import Background, Transfer
from tensorlink.transports.base import Connection
from tensorlink.types import PeerId

_CLOSED = b""
"""On the board in place of a descriptor: the publisher was closed."""
_FOREVER = -1.0
_SLICE_S = 0.05
"""A wait looks this often whether it was cancelled, or the publisher closed."""
_FIND_SLICE_S = 0.2
_GONE_WAIT_S = 0.05
"""How long a pull looks for the successor of a publisher that has gone."""
_LARGEST = (1 << 63) - 1


def _service(name: str) -> str:
    return f"weights/{name}"


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
        self._endpoint = _open(endpoint)
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
        self._endpoint._serve(_service(name))
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
                    endpoint._engine.publish(self.name, self._version, _CLOSED)
                self._release(0)
                endpoint._withdraw(_service(self.name))

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
        if not 0 <= number <= _LARGEST or (last is not None and number <= last):
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
        _add(self._stats, nbytes, seconds)


@dataclass(frozen=True)
class _Source:
    """Where versions come from: the connection to one incarnation of a publisher."""

    peer: PeerId
    address: str
    connection: Connection
    lane: _core.Connection
    max_bytes_per_s: int
    """What its own setting lets other hosts have; 0: as fast as it goes."""


class WeightSubscriber:
    """Fills the tensors of `into` with versions that somebody publishes under a name. May be used from any thread.

    `into` is a dict of writable tensors with the names, shapes and dtypes of the published one, such as
    `model.state_dict()`, which shares memory with the model; parameters are filled in place, and autograd isn't told.
    The framework and memory layout may differ from the publisher's. Values that are no tensors are ignored. Tensors
    that share their memory stay tied: a publisher that has two different tensors there doesn't fit.

    Nothing is looked up before the first pull. Raises: TypeError, LayoutMismatchError: `into` cannot be filled.
    """

    def __init__(self, name: str, into: Mapping[str, Any], *, endpoint: Endpoint | None = None) -> None:
        self.name = name
        self._endpoint = _open(endpoint)
        self._target = _core.Refill(into)
        self._lock = threading.Lock()
        self._closed = False
        self._source: _Source | None = None
        self._gone: PeerId | None = None  # the publisher that was lost, until another one is found
        self._have: tuple[PeerId, int] | None = None
        self._passed_on: _core.View | None = None  # the version that `into` holds, for subscribers on other hosts
        self._stats: dict[str, Any] = {
            "pulls": 0,
            "bytes": 0,
            "seconds": 0.0,
            "waited_seconds": 0.0,
            "total_bytes": 0,
            "total_seconds": 0.0,
        }

    @property
    def version(self) -> int | None:
        """The version that `into` holds; None: nothing was pulled, or a `stream=True` pull failed halfway."""
        have = self._have
        return None if have is None else have[1]

    @property
    def publisher(self) -> PeerId | None:
        """Whose version `into` holds."""
        have = self._have
        return None if have is None else have[0]

    def pull(self, min_version: int | None = None, *, timeout: Timeout = ..., stream: bool = False) -> int:
        """Fills `into` with the newest version and returns its number; with the number alone where `into` holds it
        already.

        Without `min_version` it waits only for a first version to exist, and follows a publisher that has restarted.
        With it, it waits for at least that version; whoever was told of one, by a message say, asks for it so, as news of
        versions takes its own way to other hosts. `timeout=None` waits without end. All of one version arrives, or an error
        is raised and `into` is as it was: once the local copy has begun it runs to its end, whatever the deadline. With
        `stream=True` deadline and cancel count during the copy too, and then `into` may be a mixture.

        "Holds it already" goes by number: what this process itself wrote into `into` is overwritten only by a newer
        version.

        Raises: LayoutMismatchError: `into` doesn't fit, and the message lists what is missing, extra or different;
        PeerLostError: the publisher has gone or was closed, and nobody has taken its place (the next pull waits for
        one); PeerRestartedError: it restarted while `min_version` was waited for; PeerUnknownError: nobody published
        under that name in time; TransferTimeoutError; NoPathError; ClosedError. After a failure `version` is as it was,
        but None where a `stream=True` copy had begun.
        """
        self._check()
        return self._pull(min_version, self._endpoint._waiting(timeout), stream, None)

    def ipull(self, min_version: int | None = None, *, timeout: Timeout = ..., stream: bool = False) -> Transfer:
        """As `pull`, on a thread of its own; the result is the version. Until it has ended `into` must not be used.

        `cancel()` leaves `into` as it was, or returns False: the version had arrived, or its copy had begun and is now
        done.
        """
        self._check()
        wait_s = self._endpoint._waiting(timeout)
        path = self._source.connection.transport if self._source else ""
        recorder = self._endpoint._engine.flight
        return Background(lambda stop: self._pull(min_version, wait_s, stream, stop), path, recorder)

    def stats(self) -> dict[str, Any]:
        """Counters: `version`; `pulls` that copied; `bytes` and `seconds` of the last one, `waited_seconds` before it
        for the version to appear; `total_bytes`, and `total_seconds` without the waits."""
        return {"version": self.version, **self._stats}

    def close(self) -> None:
        """Ends it; `into` stays as it is. Idempotent."""
        self._closed = True
        self._passed_on = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _check(self) -> None:
        self._endpoint._check()
        if self._closed:
            raise ClosedError(f"the subscriber of {self.name!r} was closed", hint="Make a new one")

    def _pull(self, min_version: int | None, timeout: float | None, stream: bool, stop: _core.Stop | None) -> int:
        limit = _Limit(timeout, stop, self._check)
        began = time.perf_counter()
        while not self._lock.acquire(timeout=limit.slice()):
            limit.check(lambda: "another pull of this subscriber has not ended")
        try:
            with contextlib.ExitStack() as waiting:
                return self._follow(min_version, limit, stream, began, waiting)
        except TensorLinkError as error:
            error.phase = error.phase or "pull"
            self._endpoint._report(error)
            raise
        finally:
            self._lock.release()

    def _follow(
        self, min_version: int | None, limit: _Limit, stream: bool, began: float, waiting: contextlib.ExitStack
    ) -> int:
        """The version that `into` then holds. From the first time that it has to wait it is in flight, until `waiting` ends."""
        waited = False
        while True:
            source = self._find(limit, restart_ends=waited and min_version is not None)
            try:
                version = self._attempt(source, min_version, limit, stream, began)
            except (PeerLostError, TransportError) as error:
                broken = isinstance(error, TransportError) or not source.connection.up
                self._lose(source, error, broken=broken, restart_ends=min_version is not None)
                continue
            if version is not None:
                return version
            if not waited:
                waiting.enter_context(self._doing(source.peer.name, "version"))
            waited = True
            limit.check(lambda: self._late(source, min_version))  # noqa: B023

    def _doing(self, peer: str, phase: str) -> contextlib.AbstractContextManager[None]:
        return flight.doing(self._endpoint._engine.flight, "pull", peer, phase, self.name)

    def _attempt(
        self, source: _Source, min_version: int | None, limit: _Limit, stream: bool, began: float
    ) -> int | None:
        """The version that `into` then holds; None: not yet, a little time has passed. Raises: PeerLostError."""
        notice = source.lane.read_board(self.name)
        version, descriptor = notice or (-1, b"")
        if descriptor == _CLOSED:
            self._await_reopening(source, version, limit)
            return None
        if version < (min_version or 0):
            self._wait(source, min_version or 0, limit)
            return None
        if self._have == (source.peer, version):
            return int(version)
        start = time.perf_counter()
        try:
            with self._endpoint._work:
                nbytes = self._fill(source, version, descriptor, limit, stream)
        except StaleRefError:  # replaced since we looked
            self._wait(source, version + 1, limit)
            return None
        if nbytes is None:
            return None
        self._count(nbytes, time.perf_counter() - start, start - began)
        return int(version)

    def _fill(self, source: _Source, version: int, descriptor: bytes, limit: _Limit, stream: bool) -> int | None:
        """Holds a version and copies it; its bytes, or None: not mapped yet. Raises: StaleRefError, PeerLostError."""
        view: Any = None
        try:
            try:
                view = source.connection.open(descriptor, limit.slice())
            except TransferTimeoutError:
                return None
            if not isinstance(view, _core.View):
                raise NoPathError(f"{source.connection.transport} cannot carry weights", peer=str(source.peer))
            self._passed_on = None  # nobody wants the old version any more, and its memory can take the new one
            passes_on = not stream and view.pass_on()
            # What is passed on may have come from another subscriber, and tells nothing of the way to the publisher.
            with contextlib.nullcontext() if passes_on else self._observed(source, view.nbytes):
                self._target.prepare(view, limit.stop, limit.left())  # writes nothing; what doesn't fit raises
                limit.check_stop()
                if stream:
                    self._have = None
                self._target.run(view, stream, limit.stop, limit.left())
            self._have = (source.peer, version)
            if passes_on:
                self._passed_on = view
            return int(view.nbytes)
        finally:
            del view  # an error that somebody keeps must not keep the version held

    def _observed(self, source: _Source, nbytes: int) -> contextlib.AbstractContextManager[None]:
        observing, far = self._endpoint._observing, source.lane.pid == 0
        if not (far and observing.due(nbytes)):
            return contextlib.nullcontext()
        return observing.read(source.peer, source.connection.transport, nbytes, source.max_bytes_per_s)

    def _wait(self, source: _Source, version: int, limit: _Limit) -> None:
        """Until the board shows at least `version`, or for a slice of time. Raises: PeerLostError."""
        self._endpoint._engine.wait_board(source.lane, self.name, version, limit.slice())
        if not source.connection.up:
            raise PeerLostError(f"{source.peer.name} has gone", peer=str(source.peer))

    def _await_reopening(self, source: _Source, last: int, limit: _Limit) -> None:
        """The publisher was closed; its process may open another one. Raises: PeerLostError: it did not."""
        with contextlib.suppress(PeerUnknownError):
            if self._endpoint._control.find(_service(self.name), 0.001).id == source.peer:
                return self._wait(source, last + 1, limit)
        raise PeerLostError(
            f"{source.peer.name} has closed its publisher of {self.name!r}",
            peer=str(source.peer),
            phase="pull",
            hint="Pull again once somebody publishes under that name",
        )

    def _find(self, limit: _Limit, *, restart_ends: bool) -> _Source:
        """The publisher that was read last, or the one that has the name now."""
        source = self._source
        if source is not None and source.connection.up:
            return source if restart_ends else self._successor(source, limit) or source
        if source is not None:
            self._lose(source, None, broken=True, restart_ends=restart_ends)
        with self._doing("", "publisher"):
            return self._look_for(limit)

    def _look_for(self, limit: _Limit) -> _Source:
        while True:
            try:
                found = self._connect(limit)
            except PeerUnknownError as error:
                if limit.over():
                    raise self._never(error) from None
            except PeerLostError:  # the coordinator has not noticed yet
                time.sleep(min(0.01, limit.slice()))
            else:
                self._source, self._gone = found, None
                return found
            limit.check(self._nobody)

    def _successor(self, source: _Source, limit: _Limit) -> _Source | None:
        """Who publishes now, if the one that was read last will leave and somebody has taken its place already."""
        member = self._endpoint._control.known(source.peer.name)
        if member is None or not member.leaving:
            return None
        with contextlib.suppress(PeerUnknownError, PeerLostError, TransferTimeoutError):
            found = self._connect(limit, 0.0)
            if found.peer != source.peer:
                self._source = found
                return found
        return None

    def _connect(self, limit: _Limit, most: float = _FIND_SLICE_S) -> _Source:
        info = self._endpoint._control.find(_service(self.name), max(limit.slice(most), 0.001))
        left = limit.left()
        # A look at 0 s connects too.
        timeout = self._endpoint.settings.timeout if left < 0 else max(left, _FIND_SLICE_S)
        return self._connect_to(info.id, info.address, timeout, limit.stop)

    def _connect_to(self, peer: PeerId, address: str, timeout: float, stop: _core.Stop | None = None) -> _Source:
        link = self._endpoint._links.to_owner(peer, address, timeout, stop)
        connection, lane = link.connection, link.connection.lane()
        if lane is None:
            raise NoPathError(f"{connection.transport} cannot carry weights", peer=str(peer), phase="pull")
        return _Source(peer, address, connection, lane, link.client.max_bytes_per_s)

    def _lose(self, source: _Source, why: TensorLinkError | None, *, broken: bool, restart_ends: bool) -> None:
        """Returns when there is somebody to pull from; if it is only the path that is `broken`, the same publisher over a new
        connection. Raises: PeerLostError: there is none, or it must be told of."""
        self._source, self._gone = None, source.peer
        if broken:
            self._endpoint._links.drop(source.peer)
            with contextlib.suppress(TensorLinkError):
                self._source, self._gone = self._connect_to(source.peer, source.address, _GONE_WAIT_S), None
                return
        deadline = time.monotonic() + _GONE_WAIT_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                info = self._endpoint._control.find(_service(self.name), left)
            except PeerUnknownError:
                break
            if info.id != source.peer:
                if not restart_ends:
                    return
                raise PeerRestartedError(
                    f"the publisher of {self.name!r} restarted while its version was waited for",
                    peer=str(source.peer),
                    phase="pull",
                    hint=f"Pull again: {info.id} publishes now, and its versions need not go on from the last",
                )
            time.sleep(0.005)  # the coordinator has not noticed yet
        if why is not None and source.connection.up:
            raise why
        raise self._endpoint._links.lost(source.peer, source.connection.transport, "pull")

    def _nobody(self) -> str:
        gone = f" since {self._gone} has gone or closed its publisher" if self._gone else ""
        return f"nobody publishes weights {self.name!r}{gone}"

    def _never(self, error: PeerUnknownError) -> TensorLinkError:
        if self._gone is None:
            hint = error.hint and error.hint.replace(_service(""), "")
            return PeerUnknownError(self._nobody(), phase="pull", hint=hint)
        return PeerLostError(self._nobody(), peer=str(self._gone), phase="pull", hint="Start the publisher again")

    def _late(self, source: _Source, min_version: int | None) -> str:
        notice = source.lane.read_board(self.name)
        wanted = "a first version" if min_version is None else f"version {min_version} or a newer one"
        newest = f"its newest is {notice[0]}" if notice else "there is none yet"
        return f"{source.peer.name} did not publish {wanted} of {self.name!r} in time: {newest}"

    def _count(self, nbytes: int, seconds: float, waited: float) -> None:
        self._stats["pulls"] += 1
        self._stats["waited_seconds"] = waited
        _add(self._stats, nbytes, seconds)


class _Limit:
    """When an operation has to end: its deadline, its stop flag, or because its endpoint is closed."""

    def __init__(self, timeout: float | None, stop: _core.Stop | None, alive: Callable[[], None]) -> None:
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._alive = alive
        self.stop = stop

    def left(self) -> float:
        """Seconds; negative: without end."""
        return _FOREVER if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def over(self) -> bool:
        return self.left() == 0

    def slice(self, most: float = _SLICE_S) -> float:
        """How long to wait before looking at `check` again."""
        left = self.left()
        return most if left < 0 else min(left, most)

    def check_stop(self) -> None:
        """Raises: TransferCancelledError."""
        if self.stop is not None and self.stop.is_set():
            raise TransferCancelledError("the pull was cancelled", phase="pull")

    def check(self, late: Callable[[], str]) -> None:
        """Raises: TransferTimeoutError with the text of `late()`, TransferCancelledError, ClosedError."""
        self.check_stop()
        self._alive()
        if self.over():
            raise TransferTimeoutError(late(), waited=_core.waited(), phase="pull")


def _add(stats: dict[str, Any], nbytes: int, seconds: float) -> None:
    stats["bytes"] = nbytes
    stats["seconds"] = seconds
    stats["total_bytes"] += nbytes
    stats["total_seconds"] += seconds


def _open(endpoint: Endpoint | None) -> Endpoint:
    chosen = current() if endpoint is None else endpoint
    chosen._check()
    return chosen
