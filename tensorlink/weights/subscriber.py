"""The subscriber: fills tensors with the newest version, all of one version or nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from tensorlink import _core
from tensorlink.endpoint import Endpoint, Timeout
from tensorlink.errors import (
    ClosedError,
    NoPathError,
    PeerLostError,
    StaleRefError,
    TensorLinkError,
    TransferTimeoutError,
    TransportError,
)
from tensorlink.transfer import Background, Transfer, Used
from tensorlink.types import PeerId
from tensorlink.weights.common import CLOSED, count, open_endpoint
from tensorlink.weights.limit import Limit
from tensorlink.weights.source import Source, Sources


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
        self._endpoint = open_endpoint(endpoint)
        self._target = _core.Refill(into)
        self._lock = threading.Lock()
        self._closed = False
        self._sources = Sources(self._endpoint, name)
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
        used = Used(self._sources.transport)

        def pull(stop: _core.Stop) -> int:
            try:
                return self._pull(min_version, wait_s, stream, stop)
            finally:
                used.transport = self._sources.transport or used.transport

        return Background(pull, used, self._endpoint._engine.flight)

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
        limit = Limit(timeout, stop, self._check)
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
        self, min_version: int | None, limit: Limit, stream: bool, began: float, waiting: contextlib.ExitStack
    ) -> int:
        """The version that `into` then holds. From the first time that it has to wait it is in flight, until `waiting` ends."""
        waited = False
        while True:
            source = self._sources.find(limit, restart_ends=waited and min_version is not None)
            try:
                version = self._attempt(source, min_version, limit, stream, began)
            except (PeerLostError, TransportError) as error:
                broken = isinstance(error, TransportError) or not source.connection.up
                self._sources.lose(source, error, broken=broken, restart_ends=min_version is not None)
                continue
            if version is not None:
                return version
            if not waited:
                waiting.enter_context(self._sources.doing(source.peer.name, "version"))
            waited = True
            limit.check(lambda: self._late(source, min_version))  # noqa: B023

    def _attempt(self, source: Source, min_version: int | None, limit: Limit, stream: bool, began: float) -> int | None:
        """The version that `into` then holds; None: not yet, a little time has passed. Raises: PeerLostError."""
        notice = source.lane.read_board(self.name)
        version, descriptor = notice or (-1, b"")
        if descriptor == CLOSED:
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

    def _fill(self, source: Source, version: int, descriptor: bytes, limit: Limit, stream: bool) -> int | None:
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

    def _observed(self, source: Source, nbytes: int) -> contextlib.AbstractContextManager[None]:
        observing, far = self._endpoint._observing, source.lane.pid == 0
        if not (far and observing.due(nbytes)):
            return contextlib.nullcontext()
        return observing.read(source.peer, source.connection.transport, nbytes, source.max_bytes_per_s)

    def _wait(self, source: Source, version: int, limit: Limit) -> None:
        """Until the board shows at least `version`, or for a slice of time. Raises: PeerLostError."""
        self._endpoint._engine.wait_board(source.lane, self.name, version, limit.slice())
        if not source.connection.up:
            raise PeerLostError(f"{source.peer.name} has gone", peer=str(source.peer))

    def _await_reopening(self, source: Source, last: int, limit: Limit) -> None:
        """The publisher was closed; its process may open another one. Raises: PeerLostError: it did not."""
        if self._sources.serves(source.peer):
            return self._wait(source, last + 1, limit)
        raise PeerLostError(
            f"{source.peer.name} has closed its publisher of {self.name!r}",
            peer=str(source.peer),
            phase="pull",
            hint="Pull again once somebody publishes under that name",
        )

    def _late(self, source: Source, min_version: int | None) -> str:
        notice = source.lane.read_board(self.name)
        wanted = "a first version" if min_version is None else f"version {min_version} or a newer one"
        newest = f"its newest is {notice[0]}" if notice else "there is none yet"
        return f"{source.peer.name} did not publish {wanted} of {self.name!r} in time: {newest}"

    def _count(self, nbytes: int, seconds: float, waited: float) -> None:
        self._stats["pulls"] += 1
        self._stats["waited_seconds"] = waited
        count(self._stats, nbytes, seconds)
