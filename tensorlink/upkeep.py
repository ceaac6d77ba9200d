"""Upkeep: carries out what the life of peers calls for, and looks after the rest a few times a second, on one thread."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

from tensorlink import _core
from tensorlink.control import ControlClient
from tensorlink.errors import TensorLinkError
from tensorlink.hooks import Hooks
from tensorlink.lifecycle import Act, Action, Answered, Fire, Refused, StreamLost
from tensorlink.links import Links
from tensorlink.types import PeerId

log = logging.getLogger("tensorlink")

_REJECTED, _UNREACHABLE = 3, 4  # states of the native heartbeat
_EVERY_S = 0.1
_PROBE_S = 2.0
_AGAIN_S = 1.0


class Upkeep:
    """Does what the roster wants done, joins again when the lease is gone, and tells of strangers at the port."""

    def __init__(self, engine: _core.Engine, control: ControlClient, links: Links, hooks: Hooks) -> None:
        self._engine = engine
        self._control = control
        self._links = links
        self._hooks = hooks
        self._stop = threading.Event()
        self._actions: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self._ask_at = 0.0  # not before: a join takes a moment
        self._retries: dict[int, int] = {}  # by connection, as last seen
        self._thread = threading.Thread(target=self._run, name="tensorlink-upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def act(self, actions: list[Action]) -> None:
        """Queues what is to be done. Any thread; doesn't block."""
        for action in actions:
            self._actions.put(action)

    def stop(self) -> None:
        """Ends it soon; doesn't wait."""
        self._stop.set()
        self._actions.put(None)

    def _run(self) -> None:
        due = time.monotonic() + _EVERY_S
        while not self._stop.is_set():
            try:
                action = self._actions.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                action = None
            if action is not None:
                self._do(action)
            if time.monotonic() >= due:
                self._look()
                due = time.monotonic() + _EVERY_S

    # What the life of peers calls for

    def _do(self, action: Action) -> None:
        if isinstance(action, Fire):
            self._hooks.fire(action.hook, action.info, *([action.reason] if action.hook == "peer_down" else []))
            return
        peer = action.peer
        log.debug("%s: %s", peer, action.do)
        if action.do == "set_up":
            self._engine.set_peer(peer.name, peer.incarnation, True)
        elif action.do == "set_down":
            self._engine.set_peer(peer.name, peer.incarnation, False)
            self._links.drop(peer)
        elif action.do == "abort":
            self._links.abort(peer)
        elif action.do == "avoid":
            self._engine.avoid(peer.name, peer.incarnation)
        elif action.do == "probe":
            _aside("tensorlink-probe", self._probe, action)
        elif self._engine.undelivered(peer.name, peer.incarnation):
            _aside("tensorlink-mend", self._mend, peer)

    def _probe(self, action: Act) -> None:
        """Where nobody listens any more the peer has gone; where somebody does, only its stream broke. Else time will tell: the
        peer's lease runs, and the deadline of whoever waits."""
        if not action.at[0]:
            return  # it listens for nobody
        try:
            socket.create_connection(action.at, _PROBE_S).close()
        except ConnectionRefusedError:
            self._control.roster.hear(Refused(action.peer))
        except OSError:
            return
        else:
            self._control.roster.hear(Answered(action.peer))

    def _mend(self, peer: PeerId) -> None:
        """Brings messages that are on their way over a broken lane to a live peer, as soon as that is possible. Blocks."""
        while not self._stop.is_set() and self._control.roster.here(peer):
            try:
                self._links.mend(peer)
                return
            except TensorLinkError as error:
                log.info("the lane to %s could not be mended: %s", peer, error)
                self._stop.wait(_AGAIN_S)

    # What is looked after now and then

    def _look(self) -> None:
        self._heartbeat()
        for text in self._engine.refusals():
            log.warning("refused a connection from %s", text)
        self._resumed()
        for name, incarnation, host, port in self._engine.suspects():
            log.info("the stream of %s#%d ended without a word", name, incarnation)
            self._control.roster.hear(StreamLost(PeerId(name, incarnation), (host, port)))

    def _heartbeat(self) -> None:
        """Tells the control client when the native heartbeat finds that the lease or the coordinator is gone."""
        if self._engine.heartbeat_state() not in (_REJECTED, _UNREACHABLE):
            self._ask_at = 0.0
        elif time.monotonic() >= self._ask_at:
            # Again and again: the new lease may have run out, or be unknown there by now.
            self._ask_at = time.monotonic() + _AGAIN_S
            self._control.rejoin_needed()

    def _resumed(self) -> None:
        """Tells of reads that had to go on over another stream."""
        seen = {}
        for native in self._engine.connections():
            seen[native.serial] = native.counters()["retries"]
            if seen[native.serial] > self._retries.get(native.serial, 0):
                log.warning("a read from %s broke off and was taken up again", native.peer_name)
        self._retries = seen


def _aside(name: str, work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name=name, daemon=True).start()
