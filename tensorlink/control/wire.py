"""What both sides of the control channel share: version, gRPC options, the token, and errors as statuses and back."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio

from tensorlink import errors
from tensorlink.control import control_pb2 as pb
from tensorlink.control.certificates import NAME, Certificates, explain
from tensorlink.errors import TensorLinkError
from tensorlink.types import PeerId, PeerInfo

VERSION = 1
"""Of the control protocol. A peer with another one is told so and refused."""
MAX_MESSAGE_BYTES = 64 << 20
MAX_NAME_BYTES = 255
MAX_STREAMS = 1024
"""Calls at a time over one connection; more wait at the caller."""
MAX_KNOWN = 8192
"""Names whose incarnations one join tells: at most 2.2 MiB."""
TOKEN_KEY = "tensorlink-token-bin"
_ERROR_KEY = "tensorlink-error"
_FIELD_KEYS = {field: f"tensorlink-{field}-bin" for field in ("peer", "hint")}

Metadata = tuple[tuple[str, bytes], ...]

OPTIONS: list[tuple[str, Any]] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5000),  # how long one attempt to connect may take: a lost packet costs a second
    ("grpc.max_reconnect_backoff_ms", 1000),
    # While a call or a watch is open, a host that vanished is noticed this soon, whatever the deadline is.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # of the pings that gRPC sends for its own purposes, in place of ours
    ("grpc.http2.max_pings_without_data", 0),  # no limit: a watch sends nothing else
    ("grpc.use_local_subchannel_pool", 1),  # a channel of its own: another one's backoff is not ours
]
TLS_OPTIONS: list[tuple[str, Any]] = [*OPTIONS, ("grpc.ssl_target_name_override", NAME)]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server_handshake_timeout_ms", 10_000),  # who connects and says nothing
    ("grpc.max_connection_idle_ms", 60_000),  # who calls nothing any more; a caller connects again unnoticed
    ("grpc.max_metadata_size", 16 << 10),
]

_STATUS: dict[type[TensorLinkError], grpc.StatusCode] = {
    errors.AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    errors.NameInUseError: grpc.StatusCode.ALREADY_EXISTS,
    errors.PeerUnknownError: grpc.StatusCode.NOT_FOUND,
    errors.PeerLostError: grpc.StatusCode.ABORTED,
    errors.PoolExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def channel(target: str, certificates: Certificates | None = None, authority: str | None = None) -> grpc.Channel:
    """A channel to a coordinator or peer; no connection is made before the first call. Unix sockets need no TLS.

    Without TLS the other side is called `authority`, if that is given; with it, by the name that all certificates carry.
    """
    if certificates is None or target.startswith("unix:"):
        named = [] if authority is None else [("grpc.default_authority", authority)]
        return grpc.insecure_channel(target, options=[*OPTIONS, *named])
    return grpc.secure_channel(target, certificates.channel(), options=TLS_OPTIONS)


def aio_channel(target: str, certificates: Certificates | None) -> grpc.aio.Channel:
    """The same for an event loop."""
    if certificates is None or target.startswith("unix:"):
        return grpc.aio.insecure_channel(target, options=OPTIONS)
    return grpc.aio.secure_channel(target, certificates.channel(), options=TLS_OPTIONS)


def unix_target(path: Path) -> str:
    """The gRPC target of a unix socket; gRPC reads it as a URI, so odd characters are escaped."""
    return "unix:" + quote(str(path), safe="/")


def token_metadata(token: str | None) -> Metadata:
    """The metadata that carries the token on every call."""
    return ((TOKEN_KEY, (token or "").encode()),)


def check_token(token: str | None, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
    """Compares in constant time. Raises: AuthenticationError: the token is missing or differs."""
    given = dict(metadata or ()).get(TOKEN_KEY, b"")
    given = given.encode() if isinstance(given, str) else given
    if not hmac.compare_digest((token or "").encode(), given):
        raise errors.AuthenticationError(
            "the token is missing or differs",
            hint="Give every process of the job the same TENSORLINK_TOKEN",
        )


def check_version(version: int) -> None:
    """Raises: TensorLinkError: the other side speaks another version."""
    if version != VERSION:
        raise TensorLinkError(
            f"control protocol version {version} is not supported here, only {VERSION}",
            hint="Run the same major release of TensorLink everywhere",
        )


def status_of(error: Exception) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """Status code, details and trailing metadata that carry an error to the other side."""
    if isinstance(error, TensorLinkError):
        code = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), None)
        fields = {key: getattr(error, field) for field, key in _FIELD_KEYS.items()}
        named = ((key, value.encode()) for key, value in fields.items() if value)
        status = code or grpc.StatusCode.FAILED_PRECONDITION
        return status, error.message, ((_ERROR_KEY, type(error).__name__), *named)
    if isinstance(error, (ValueError, TypeError)):
        return grpc.StatusCode.INVALID_ARGUMENT, str(error), ()
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}", ()


def error_of(
    error: grpc.RpcError, *, phase: str, peer: str | None = None, where: str | None = None, hint: str | None = None
) -> TensorLinkError:
    """The typed error that a failed call means to its caller. `where` was called; `hint` is for no answer from there."""
    code = error.code() if isinstance(error, grpc.Call) else None
    details = (error.details() if isinstance(error, grpc.Call) else str(error)) or "no details"
    trailing: dict[str, str | bytes] = {}
    if isinstance(error, grpc.Call):
        trailing.update((str(key), value) for key, value in error.trailing_metadata() or ())
    named = getattr(errors, str(trailing.get(_ERROR_KEY, "")), None)
    if isinstance(named, type) and issubclass(named, TensorLinkError):
        fields = {field: _text(trailing[key]) for field, key in _FIELD_KEYS.items() if key in trailing}
        return named(details, **{"peer": peer, "phase": phase, **fields})
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        missing = f"no answer from {where or 'there'} before the deadline"
        return errors.TransferTimeoutError(missing, peer=peer, phase=phase, hint=hint)
    if code is grpc.StatusCode.UNAVAILABLE:
        unreachable = f"{where or peer or 'the coordinator'} cannot be reached: {details}"
        return errors.PeerLostError(unreachable, peer=peer, phase=phase, hint=hint)
    if code is grpc.StatusCode.CANCELLED:  # by the other side: who closes its own channel knows without asking
        return errors.PeerLostError(f"{where or peer or 'the coordinator'} shut down meanwhile", peer=peer, phase=phase)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        there = where or peer or "the coordinator"
        refused = f"a call of {there} was refused, as too large or one too many: {details}"
        return errors.TransportError(refused, peer=peer, phase=phase)
    return errors.TransportError(f"{code.name if code else 'failure'}: {details}", peer=peer, phase=phase)


def refusal(error: grpc.RpcError, target: str, certificates: Certificates | None) -> errors.AuthenticationError | None:
    """What it means that no call got through to `target`, if it is about certificates. Blocks, as `explain`."""
    unavailable = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE
    return explain(target, certificates) if unavailable else None


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")


def check_name(name: str, most: int = MAX_NAME_BYTES) -> str:
    """A name or address as it came. Raises: ValueError: empty, longer than `most` bytes, or not printable."""
    if not name or len(name.encode()) > most or not name.isprintable():
        raise ValueError(f"a name has 1 to {most} bytes, all printable, not {name[:40]!r}")
    return name


def peer_to_pb(peer: PeerInfo, links: bytes = b"") -> pb.Peer:
    """The message form of a peer."""
    return pb.Peer(
        name=peer.name,
        incarnation=peer.incarnation,
        address=peer.address,
        host=peer.host,
        pid=peer.pid,
        services=peer.services,
        labels=dict(peer.labels),
        links=links,
        leaving=peer.leaving,
    )


def peer_from_pb(message: pb.Peer) -> PeerInfo:
    """The peer a message describes."""
    return PeerInfo(
        id=PeerId(message.name, message.incarnation),
        address=message.address,
        host=message.host,
        pid=message.pid,
        services=tuple(message.services),
        labels=dict(message.labels),
        leaving=message.leaving,
    )
