"""Upkeep: what an endpoint looks after a few times a second, on a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading

from tensorlink import _core
from tensorlink.control import ControlClient
from tensorlink.errors import TensorLinkError
from tensorlink.links import Links
from tensorlink.types import PeerId

log = logging.getLogger("tensorlink")

_REJECTED, _UNREACHABLE = 3, 4  # states of the native heartbeat
_EVERY_S = 0.1
_PROBE_S = 2.0
_AGAIN_S = 1.0


class Upkeep:
    """Joins again when the lease is gone, tells of strangers at the port, and finds out what broken streams mean."""

    def __init__(self, engine: _core.Engine, control: ControlClient, links: Links) -> None:
        self._engine = engine
        self._control = control
        self._links = links
        self._stop = threading.Event()
        self._asked = False
        self._retries: dict[int, int] = {}  # by connection, as last seen
        self._thread = threading.Thread(target=self._run, name="tensorlink-upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def came_up(self, peer: PeerId) -> None:
        """A peer is there, perhaps again. Doesn't block."""
        if self._engine.undelivered(peer.name, peer.incarnation):
            threading.Thread(target=self.mend, args=(peer,), name="tensorlink-mend", daemon=True).start()

    def stop(self) -> None:
        """Ends it soon; doesn't wait."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self._heartbeat()
            for text in self._engine.refusals():
                log.warning("refused a connection from %s", text)
            self._resumed()
            for name, incarnation, host, port in self._engine.suspects():
                log.info("the stream of %s#%d ended without a word", name, incarnation)
                arguments = (PeerId(name, incarnation), host, port)
                threading.Thread(target=self._probe, args=arguments, name="tensorlink-probe", daemon=True).start()

    def _heartbeat(self) -> None:
        """Tells the control client when the native heartbeat finds that the lease or the coordinator is gone."""
        bad = self._engine.heartbeat_state() in (_REJECTED, _UNREACHABLE)
        if bad and not self._asked:
            self._control.rejoin_needed()
        self._asked = bad

    def _resumed(self) -> None:
        """Tells of reads that had to go on over another stream."""
        seen = {}
        for native in self._engine.connections():
            seen[native.serial] = native.counters()["retries"]
            if seen[native.serial] > self._retries.get(native.serial, 0):
                log.warning("a read from %s broke off and was taken up again", native.peer_name)
        self._retries = seen

    def _probe(self, peer: PeerId, host: str, port: int) -> None:
        """Where nobody listens any more the peer has gone; where somebody does, only its stream broke. Else time will tell: the
        peer's lease runs, and the deadline of whoever waits."""
        if not host:
            return  # it listens for nobody
        try:
            socket.create_connection((host, port), _PROBE_S).close()
        except ConnectionRefusedError:
            self._engine.set_peer(peer.name, peer.incarnation, False)
            return
        except OSError:
            return
        self.mend(peer)

    def mend(self, peer: PeerId) -> None:
        """Brings messages that are on their way over a broken lane to a live peer, as soon as that is possible. Blocks."""
        while not self._stop.is_set() and not self._links.gone(peer):
            try:
                self._links.mend(peer)
                return
            except TensorLinkError as error:
                log.info("the lane to %s could not be mended: %s", peer, error)
                self._stop.wait(_AGAIN_S)
