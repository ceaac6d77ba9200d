"""A peer in a process of its own, driven by lines of JSON: commands come in on stdin, answers and events go out."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import threading
from typing import Any

from tensorlink.control import ControlClient, Membership, PeerServer
from tensorlink.errors import TensorLinkError
from tensorlink.lifecycle import Action, Fire
from tensorlink.settings import Settings

_out = threading.Lock()


def say(**line: Any) -> None:
    with _out:
        print(json.dumps(line, default=list), flush=True)


class BeatSender:
    """Beats as the native engine does: at once, then every fifth of a lease; reports what calls for another join."""

    def __init__(self, membership: Membership, rejoin: Any) -> None:
        self._membership = membership
        self._rejoin = rejoin
        self._changed = threading.Event()
        self.first = threading.Event()
        """The first beat was answered: from now on the coordinator watches this process."""
        threading.Thread(target=self._run, daemon=True).start()

    def use(self, membership: Membership) -> None:
        self._membership = membership
        self._changed.set()

    def _run(self) -> None:
        stream: socket.socket | None = None
        while True:
            membership = self._membership
            self._changed.clear()
            try:
                if stream is None:
                    stream = connect(membership.heartbeat_address)
                stream.sendall(membership.lease_key)
                fine = stream.recv(1) == b"\x00"
            except OSError:
                fine = False
            self.first.set()
            if not fine:
                if stream is not None:
                    stream.close()
                stream = None
                self._rejoin()
            self._changed.wait(membership.lease_s / 5)


def connect(address: str, timeout: float = 30.0) -> socket.socket:
    if address.startswith("unix:"):
        stream = socket.socket(socket.AF_UNIX)
        stream.settimeout(timeout)
        stream.connect(address.removeprefix("unix:"))
        return stream
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout)


class Handlers:
    def hello(self, hello: Any) -> dict[str, bytes]:
        return {}

    def deliver(self, source: Any, sequence: int, tag: str, frame: bytes) -> bytes:
        return b""

    def release(self, source: Any, ids: list[int]) -> None:
        return None

    def mailbox(self, source: Any, box: Any) -> None:
        box.close()

    def scratch(self, source: Any, nbytes: int) -> bytes:
        return b""


def main(name: str) -> None:
    settings = Settings.load()
    server = PeerServer(Handlers(), name=name, token=settings.token)
    client = ControlClient(
        settings,
        name=name,
        address=server.address,
        act=said,
        on_failed=lambda error: say(failed=type(error).__name__),
    )
    try:
        membership = client.join(30)
    except TensorLinkError as error:
        say(error=type(error).__name__, message=str(error))
        server.close()
        client.close()
        return
    beats = BeatSender(membership, client.rejoin_needed)

    def joined(new: Membership) -> None:
        beats.use(new)
        say(rejoined=new.incarnation)

    client.on_joined = joined
    server.incarnation = membership.incarnation
    beats.first.wait(30)
    say(joined=membership.incarnation, lease_s=membership.lease_s, heartbeat=membership.heartbeat_address)
    for line in sys.stdin:
        call(client, json.loads(line))
    client.leave()
    client.close()
    server.close()
    say(closed=True)


def said(actions: list[Action]) -> None:
    for action in actions:
        if isinstance(action, Fire):
            kind = action.hook.removeprefix("peer_")
            say(event=kind, name=action.info.name, incarnation=action.info.incarnation, reason=action.reason)


def call(client: ControlClient, order: list[Any]) -> None:
    method, *arguments = order
    try:
        result = getattr(client, method)(*arguments)
    except Exception as error:
        say(error=type(error).__name__, message=str(error))
        return
    if isinstance(result, list):
        result = [peer.name for peer in result]
    elif dataclasses.is_dataclass(result):
        result = {"name": result.name, "incarnation": result.incarnation, "services": list(result.services)}  # type: ignore[attr-defined]
    say(result=result)


if __name__ == "__main__":
    main(sys.argv[1])
