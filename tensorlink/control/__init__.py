"""The control channel: who is there, under which incarnation, and small messages between them.

Only this package uses gRPC.

The names below load on first use, so that the coordinator's process, which needs few of them, stays small.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorlink.control.addresses import listen_address
    from tensorlink.control.certificates import Certificates
    from tensorlink.control.client import ControlClient
    from tensorlink.control.hosted import Hosted
    from tensorlink.control.link import Membership, find_peer, list_peers
    from tensorlink.control.mailbox import Mailbox
    from tensorlink.control.peer_client import PeerClient
    from tensorlink.control.peer_service import Hello, PeerHandlers, PeerServer, Pong
    from tensorlink.control.runtime_dir import engine_socket, host_identity
    from tensorlink.control.standalone import serve

_HOMES = {
    "Certificates": "certificates",
    "ControlClient": "client",
    "Hello": "peer_service",
    "Hosted": "hosted",
    "Mailbox": "mailbox",
    "Membership": "link",
    "PeerClient": "peer_client",
    "PeerHandlers": "peer_service",
    "PeerServer": "peer_service",
    "Pong": "peer_service",
    "engine_socket": "runtime_dir",
    "host_identity": "runtime_dir",
    "find_peer": "link",
    "list_peers": "link",
    "listen_address": "addresses",
    "serve": "standalone",
}

__all__ = [
    "Certificates",
    "ControlClient",
    "Hello",
    "Hosted",
    "Mailbox",
    "Membership",
    "PeerClient",
    "PeerHandlers",
    "PeerServer",
    "Pong",
    "engine_socket",
    "find_peer",
    "host_identity",
    "list_peers",
    "listen_address",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # gRPC reads this once, when it loads. Without it each `os.fork` of a user prints a line about its fork handlers.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
