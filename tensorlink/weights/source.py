"""Whom a subscriber pulls from: the publisher that has the name, whoever that is after a restart or a hand-over."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from tensorlink import _core, flight
from tensorlink.endpoint import Endpoint
from tensorlink.errors import (
    NoPathError,
    PeerLostError,
    PeerRestartedError,
    PeerUnknownError,
    TensorLinkError,
    TransferTimeoutError,
)
from tensorlink.transports.base import Connection
from tensorlink.types import PeerId
from tensorlink.weights.common import service
from tensorlink.weights.limit import Limit

_FIND_SLICE_S = 0.2
_GONE_WAIT_S = 0.05
"""How long a pull looks for the successor of a publisher that has gone."""


@dataclass(frozen=True)
class Source:
    """Where versions come from: the connection to one incarnation of a publisher."""

    peer: PeerId
    address: str
    connection: Connection
    lane: _core.Connection
    max_bytes_per_s: int
    """What its own setting lets other hosts have; 0: as fast as it goes."""


class Sources:
    """Finds the publisher of a name, and the next one when it has gone. For one thread at a time."""

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self.name = name
        self._endpoint = endpoint
        self.current: Source | None = None
        self._gone: PeerId | None = None  # the publisher that was lost, until another one is found

    @property
    def transport(self) -> str:
        """Of the current source; empty: there is none."""
        return self.current.connection.transport if self.current else ""

    def doing(self, peer: str, phase: str) -> contextlib.AbstractContextManager[None]:
        """A pull that waits is in flight meanwhile."""
        return flight.doing(self._endpoint._engine.flight, "pull", peer, phase, self.name)

    def serves(self, peer: PeerId) -> bool:
        """Whether this incarnation has the name now."""
        with contextlib.suppress(PeerUnknownError):
            return bool(self._endpoint._control.find(service(self.name), 0.001).id == peer)
        return False

    def find(self, limit: Limit, *, restart_ends: bool) -> Source:
        """The publisher that was read last, or the one that has the name now.

        Raises: PeerUnknownError: nobody has had it in time; PeerLostError; PeerRestartedError: with `restart_ends`.
        """
        source = self.current
        if source is not None and source.connection.up:
            return source if restart_ends else self._successor(source, limit) or source
        if source is not None:
            self.lose(source, None, broken=True, restart_ends=restart_ends)
        with self.doing("", "publisher"):
            return self._look_for(limit)

    def _look_for(self, limit: Limit) -> Source:
        while True:
            try:
                found = self._connect(limit)
            except PeerUnknownError as error:
                if limit.over():
                    raise self._never(error) from None
            except PeerLostError:  # the coordinator has not noticed yet
                time.sleep(min(0.01, limit.slice()))
            else:
                self.current, self._gone = found, None
                return found
            limit.check(self._nobody)

    def _successor(self, source: Source, limit: Limit) -> Source | None:
        """Who publishes now, if the one that was read last will leave and somebody has taken its place already."""
        member = self._endpoint._control.known(source.peer.name)
        if member is None or not member.leaving:
            return None
        with contextlib.suppress(PeerUnknownError, PeerLostError, TransferTimeoutError):
            found = self._connect(limit, 0.0)
            if found.peer != source.peer:
                self.current = found
                return found
        return None

    def _connect(self, limit: Limit, most: float = _FIND_SLICE_S) -> Source:
        info = self._endpoint._control.find(service(self.name), max(limit.slice(most), 0.001))
        left = limit.left()
        # A look at 0 s connects too.
        timeout = self._endpoint.settings.timeout if left < 0 else max(left, _FIND_SLICE_S)
        return self._connect_to(info.id, info.address, timeout, limit.stop)

    def _connect_to(self, peer: PeerId, address: str, timeout: float, stop: _core.Stop | None = None) -> Source:
        link = self._endpoint._links.to_owner(peer, address, timeout, stop)
        connection, lane = link.connection, link.connection.lane()
        if lane is None:
            raise NoPathError(f"{connection.transport} cannot carry weights", peer=str(peer), phase="pull")
        return Source(peer, address, connection, lane, link.client.max_bytes_per_s)

    def lose(self, source: Source, why: TensorLinkError | None, *, broken: bool, restart_ends: bool) -> None:
        """Returns when there is somebody to pull from; if it is only the path that is `broken`, the same publisher over a new
        connection. Raises: PeerLostError: there is none, or it must be told of."""
        self.current, self._gone = None, source.peer
        if broken:
            self._endpoint._links.drop(source.peer)
            with contextlib.suppress(TensorLinkError):
                self.current, self._gone = self._connect_to(source.peer, source.address, _GONE_WAIT_S), None
                return
        deadline = time.monotonic() + _GONE_WAIT_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                info = self._endpoint._control.find(service(self.name), left)
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
            hint = error.hint and error.hint.replace(service(""), "")
            return PeerUnknownError(self._nobody(), phase="pull", hint=hint)
        return PeerLostError(self._nobody(), peer=str(self._gone), phase="pull", hint="Start the publisher again")
