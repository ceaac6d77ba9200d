"""One gRPC connection to one coordinator: found, called and watched. No retries here."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import difflib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tensorlink import network
from tensorlink.control import control_pb2 as pb
from tensorlink.control import control_pb2_grpc as pb_grpc
from tensorlink.control import embedded, runtime_dir, wire
from tensorlink.control.certificates import Certificates
from tensorlink.errors import (
    AuthenticationError,
    ClosedError,
    CorruptTransferError,
    PeerLostError,
    PeerUnknownError,
    TensorLinkError,
)
from tensorlink.settings import Settings
from tensorlink.types import PeerInfo

_DIAL_S = 5.0


@dataclass(frozen=True)
class Membership:
    """What a join gave: the heartbeat engine sends `lease_key` to `heartbeat_address` at least every `lease_s` / 5."""

    incarnation: int
    lease_key: bytes
    """16 bytes: one heartbeat."""
    heartbeat_address: str
    """`unix:PATH`, `IP:PORT` or `[IP]:PORT` of a stream socket; it answers each beat with 0 (extended) or 1 (join again)."""
    lease_s: float
    expelled: bool = False
    """The lease before it had run out, and others took this peer for lost."""


def target_of(settings: Settings) -> str:
    """gRPC target of the coordinator that the settings name, or where the embedded one would be.

    Raises: AuthenticationError: it is reached by TCP and there is neither a token nor a certificate.
    """
    named = settings.coordinator
    if named is None:
        path = runtime_dir.coordinator_socket(runtime_dir.runtime_dir(), settings.namespace)
        return wire.unix_target(path)
    if named.startswith("unix:"):
        return wire.unix_target(Path(named.removeprefix("unix:")))
    if not settings.known_to_others:
        raise AuthenticationError(
            f"the coordinator at {named} is reached by TCP, which needs a token or certificates",
            phase="join",
            hint="Set TENSORLINK_TOKEN to the one it was started with, or TENSORLINK_TLS_CERT, _KEY and _CA",
        )
    return named


def open_link(settings: Settings, certificates: Certificates | None, timeout: float) -> Link:
    """A link to the coordinator; starts the embedded one where none is named. Blocks up to `timeout` seconds."""
    target = target_of(settings)
    if settings.coordinator is None:
        embedded.find_or_start(settings.namespace, token=settings.token, lease_s=settings.lease_s, timeout=timeout)
    # No longer, since whoever has the name may come back elsewhere meanwhile.
    return Link(target, settings.token, certificates, min(timeout, _DIAL_S))


def _place_of(target: str, timeout: float) -> str:
    """The same with an IP address in the place of a name."""
    if target.startswith("unix:") or network.is_ip(network.split_address(target)[0]):
        return target
    try:
        return network.connectable(*network.split_address(target), timeout)
    except OSError as error:
        raise PeerLostError(
            f"the coordinator at {target} cannot be reached: {error.strerror or error}", phase="join"
        ) from None


def list_peers(settings: Settings, timeout: float) -> list[PeerInfo]:
    """Everybody who has joined, by name, as the coordinator says now. Doesn't join, and starts no coordinator.

    Raises: PeerLostError: no coordinator answers; TransferTimeoutError, AuthenticationError: as they say.
    """
    try:
        with contextlib.closing(
            Link(target_of(settings), settings.token, Certificates.load(settings), timeout)
        ) as link:
            return [wire.peer_from_pb(peer) for peer in link.snapshot(timeout).peers]
    except PeerLostError as error:
        raise _unreached(settings, error) from None


def find_peer(name: str, settings: Settings, timeout: float) -> PeerInfo:
    """Who has that name, as the coordinator says now. Doesn't join, and starts no coordinator.

    Raises: PeerUnknownError: nobody has it, and the message names who is there; what `list_peers` does.
    """
    found = {peer.name: peer for peer in list_peers(settings, timeout)}
    if name in found:
        return found[name]
    near, some = difflib.get_close_matches(name, found, 3), ", ".join([*sorted(found)[:3], *["..."][: len(found) > 3]])
    hint = f"Near names: {', '.join(near)}" if near else f"There are: {some}" if some else "Nobody has joined"
    raise PeerUnknownError(f"there is no peer {name!r} now, among {len(found)}", hint=hint)


def _unreached(settings: Settings, error: PeerLostError) -> PeerLostError:
    if settings.coordinator is not None:
        hint = "Is the address right, and does `tensorlink coordinator` run there?"
        return PeerLostError(f"no coordinator answers at {settings.coordinator}: {error.message}", hint=hint)
    where = f"namespace {settings.namespace!r} of this host"
    hint = "It starts with the first `init`; that of several hosts is named by TENSORLINK_COORDINATOR"
    return PeerLostError(f"no coordinator runs in {where}", hint=hint)


class Link:
    """A channel to a coordinator. Thread-safe; gRPC errors come out as errors of `tensorlink.errors`.

    A name is looked up here, once, for calls and heartbeats alike: they must not end at two coordinators that have it. So a link
    never follows a name to another address; who lost the coordinator opens a new one. (A channel of gRPC would look again too,
    but no sooner than after half a minute.) Blocks for that, up to `timeout` seconds. Raises: PeerLostError: nobody is there.
    """

    def __init__(self, target: str, token: str | None, certificates: Certificates | None, timeout: float) -> None:
        self._named = target
        self._target = _place_of(target, timeout)
        self._certificates = certificates
        self._answered = False
        self._metadata = wire.token_metadata(token)
        self._channel = wire.channel(self._target, certificates, None if target == self._target else target)
        self._stub = pb_grpc.CoordinatorStub(self._channel)
        self._closed = False

    def call(self, method: str, request: Any, *, timeout: float, phase: str) -> Any:
        """One call. Blocks up to `timeout` seconds.

        Raises:
            PeerLostError: nobody answers there.
            AuthenticationError: it refuses the token or the certificate of this process, or its own is refused here.
            TransferTimeoutError: no answer in time.
            ClosedError: `close` was called meanwhile.
            TensorLinkError: what the coordinator raised.
        """
        try:
            reply = getattr(self._stub, method)(request, timeout=timeout, metadata=self._metadata)
            self._answered = True
            return reply
        except grpc.RpcError as error:
            if self._closed:
                raise ClosedError("the link was closed", phase=phase) from None
            raise self._error(error, phase) from None
        except ValueError as error:  # how gRPC says that the channel is closed
            if self._closed:
                raise ClosedError("the link was closed", phase=phase) from None
            raise CorruptTransferError(f"cannot be sent: {error}", phase=phase) from None

    def membership(self, reply: pb.JoinReply, timeout: float) -> Membership:
        """What a join gave. Blocks, over TCP, to see where heartbeats arrive: a beat itself may not wait for a look-up.

        Raises: CorruptTransferError: the reply makes no sense; PeerLostError: heartbeats don't get there.
        """
        wire.check_version(reply.version)
        address = reply.heartbeat_address
        if address.startswith(":"):
            address = self._target.rpartition(":")[0] + address
        if len(reply.lease_key) != 16 or not reply.lease_s > 0 or not reply.incarnation:
            raise CorruptTransferError("the coordinator's answer to a join makes no sense", phase="join")
        if not address.startswith("unix:"):
            address = self._connectable(address, timeout)
        return Membership(reply.incarnation, reply.lease_key, address, reply.lease_s, reply.expelled)

    def _connectable(self, address: str, timeout: float) -> str:
        try:
            return network.connectable(*network.split_address(address), timeout)
        except ValueError as error:
            raise CorruptTransferError(f"the coordinator's answer to a join makes no sense: {error}") from None
        except OSError as error:
            raise PeerLostError(
                f"the coordinator at {self} answers, but not where it takes heartbeats, {address}: {error}",
                phase="join",
                hint="Open that port too; TENSORLINK_PORTS of the coordinator says which range it is from",
            ) from None

    def _error(self, error: grpc.RpcError, phase: str) -> TensorLinkError:
        refused = None if self._answered else wire.refusal(error, self._target, self._certificates)
        if refused is not None:
            refused.phase = phase
        return refused or wire.error_of(error, phase=phase, where=f"the coordinator at {self}")

    def __str__(self) -> str:
        return self._named if self._named == self._target else f"{self._named} ({self._target})"

    def snapshot(self, timeout: float) -> pb.Snapshot:
        """Everybody who is there now, without joining. Raises: as `call`."""
        call = self._stub.Watch(pb.WatchRequest(version=wire.VERSION), timeout=timeout, metadata=self._metadata)
        try:
            first: pb.WatchReply = next(call)
            return first.snapshot
        except grpc.RpcError as error:
            raise self._error(error, "watch") from None
        finally:
            call.cancel()

    def watch(self, heard: Callable[[str, Any], None]) -> None:
        """Calls `heard("reply", WatchReply)` for each one, and `heard("ended", None)` last, from a daemon thread."""
        call = self._stub.Watch(pb.WatchRequest(version=wire.VERSION), metadata=self._metadata)

        def pump() -> None:
            with contextlib.suppress(grpc.RpcError, ValueError):
                for reply in call:
                    heard("reply", reply)
            heard("ended", None)

        threading.Thread(target=pump, name="tensorlink-watch", daemon=True).start()

    def close(self) -> None:
        """Ends calls in progress and the watch. Idempotent."""
        self._closed = True
        self._channel.close()
