"""The coordinator: gRPC service for rendezvous, membership and leases. All of it runs on one event loop.

It holds soft state only. When it dies, established pairs go on; when another starts, peers join it again under the
incarnations they have.
"""
# mypy: disable-error-code="no-untyped-call,misc"

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from tensorlink import network
from tensorlink.control import addresses, runtime_dir, wire
from tensorlink.control import control_pb2 as pb
from tensorlink.control import control_pb2_grpc as pb_grpc
from tensorlink.control.certificates import Certificates, check_caller
from tensorlink.control.heartbeat import MAX_STREAMS, HeartbeatServer
from tensorlink.control.logins import AsyncGate, Logins
from tensorlink.control.membership import KEY_BYTES, MAX_INCARNATION, Change, Lease, Membership
from tensorlink.errors import AuthenticationError, PeerLostError, PeerUnknownError, TensorLinkError, TransportError
from tensorlink.types import PeerInfo

log = logging.getLogger("tensorlink.coordinator")

_MAX_MESSAGE_BYTES = 4 << 20
_MAX_CALLS = 4 * MAX_STREAMS
"""At a time: each member watches, and joins, looks up and waits besides."""
_MAX_LABELS = 64
_MAX_LINKS_BYTES = 64 << 10
_WATCH_BACKLOG = 1024
_MAX_WAIT_S = 3600.0
_PING_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]
Request = TypeVar("Request")
Reply = TypeVar("Reply")


def _guarded(
    method: Callable[[Any, Request, Context], Awaitable[Reply]],
) -> Callable[[Any, Request, Context], Awaitable[Reply]]:
    """Checks the certificate before the call, and turns errors into statuses after it."""

    @functools.wraps(method)
    async def call(self: Coordinator, request: Request, context: Context) -> Reply:
        try:
            self.admit(context)
            return await method(self, request, context)
        except (TensorLinkError, ValueError) as error:
            await context.abort(*wire.status_of(error))
            raise AssertionError("abort raises") from error

    return call


class _Watcher:
    """What one watcher has still to see. One that falls behind gets a new snapshot, and holds nobody up."""

    def __init__(self) -> None:
        self._changes: asyncio.Queue[Change | None] = asyncio.Queue(_WATCH_BACKLOG)

    def push(self, change: Change) -> None:
        if self._changes.full():
            while not self._changes.empty():
                self._changes.get_nowait()
            self._changes.put_nowait(None)
        else:
            self._changes.put_nowait(change)

    async def next(self) -> Change | None:
        """The next change; None: some were skipped, look at everything."""
        return await self._changes.get()


class Coordinator(pb_grpc.CoordinatorServicer):
    """The service and its listeners. Make it, `listen_unix` or `listen_tcp`, then `stop`; all on one event loop."""

    def __init__(self, *, token: str | None, lease_s: float, certificates: Certificates | None = None) -> None:
        self._token = token
        self._logins = Logins(token)
        self._certificates = certificates
        self._epoch = secrets.token_bytes(8)
        self._members = Membership(lease_s, self._changed)
        self._heartbeats = HeartbeatServer(self._members)
        self._heartbeat_address = ""
        self._watchers: set[_Watcher] = set()
        self._next_change = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._stopping = False
        self._empty_since = time.monotonic()
        self._ever_joined = False

    # Listening

    async def listen_unix(self, path: Path) -> None:
        """Serves on the unix socket `path`, replacing whatever lies there, with the heartbeats beside it."""
        beats = path.with_suffix(".hb")
        runtime_dir.remove(beats)
        self._heartbeat_address = await self._heartbeats.listen_unix(beats)
        # Bound under another name and renamed: at `path` there is never a socket that refuses.
        private = runtime_dir.private_socket(path.parent, "c")
        server = self._make_server()
        try:
            server.add_insecure_port(wire.unix_target(private))
        except RuntimeError as error:
            raise TransportError(f"cannot listen on {private}: {error}", phase="listen") from None
        await self._start(server)
        if path.is_dir():
            runtime_dir.remove(path)
        os.replace(private, path)

    async def listen_tcp(self, host: str, port: int, ports: str | None = None) -> int:
        """Serves on TCP and returns the port: 0 is a free one of the range `ports`, which that of the heartbeats is too.

        `host` is an IP address or a name; `::` and `0.0.0.0` stand for all addresses, v4 and v6. Raises:
            AuthenticationError: there is neither a token nor a certificate; anyone who reaches the port could join.
            TransportError: the address cannot be bound.
        """
        if not (self._token or self._certificates):
            raise AuthenticationError(
                f"listening on {host}:{port} needs a token or certificates",
                phase="listen",
                hint="Set TENSORLINK_TOKEN, or TENSORLINK_TLS_CERT, _KEY and _CA",
            )
        try:
            host = network.ip_of(host)
        except OSError as error:
            raise TransportError(f"cannot listen on {host}: {error.strerror}", phase="listen") from None
        server = self._make_server()
        bound = addresses.add_tcp_port(server, self._certificates, host, ports, port)
        # Peers put the host they dialled before the colon: this one may be a wildcard.
        self._heartbeat_address = f":{await self._heartbeats.listen_tcp(host, ports)}"
        await self._start(server)
        return bound

    def _make_server(self) -> grpc.aio.Server:
        options = [*wire.SERVER_OPTIONS, ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)]
        gates = [AsyncGate(self._logins)]
        self._server = grpc.aio.server(options=options, interceptors=gates, maximum_concurrent_rpcs=_MAX_CALLS)
        pb_grpc.add_CoordinatorServicer_to_server(self, self._server)
        return self._server

    async def _start(self, server: grpc.aio.Server) -> None:
        await server.start()
        self._ticker = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        """Stops serving; calls in progress are cut off."""
        self._stopping = True
        if self._ticker is not None:
            self._ticker.cancel()
        if self._server is not None:
            await self._server.stop(grace=None)
        self._heartbeats.close()

    async def until_idle(self, *, grace_s: float, first_s: float) -> None:
        """Returns when the last peer has been gone for `grace_s`, or nobody came in `first_s`. Joins fail then."""
        while True:
            patience = grace_s if self._ever_joined else first_s
            left = self._empty_since + patience - time.monotonic()
            if len(self._members) == 0 and left <= 0:
                self._stopping = True
                return
            await self._change_within(left if len(self._members) == 0 else _MAX_WAIT_S)

    async def _tick(self) -> None:
        lease_s = self._members.lease_s
        period = min(0.25, lease_s / 8)
        last = time.monotonic()
        while True:
            await asyncio.sleep(period)
            now = time.monotonic()
            gap = now - last - period
            last = now
            if gap > min(1.0, lease_s / 4):
                self._members.extend(gap)  # we were stopped, and heard nobody meanwhile
                self._heartbeats.extend(gap)
                continue
            self._members.expire()
            self._heartbeats.drop_idle()
            self._logins.tell()

    # Changes

    def _changed(self, change: Change) -> None:
        self._ever_joined = True
        self._empty_since = time.monotonic()
        for watcher in self._watchers:
            watcher.push(change)
        event, self._next_change = self._next_change, asyncio.Event()
        event.set()
        log.info("%s %s %s", change.peer.id, change.kind, change.reason)

    async def _change_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._next_change.wait(), max(seconds, 0.001))

    async def _wait_for(self, find: Callable[[], Lease | None], wait_s: float) -> Lease | None:
        deadline = time.monotonic() + min(max(wait_s, 0.0), _MAX_WAIT_S)
        while True:
            found = find()
            left = deadline - time.monotonic()
            if found is not None or left <= 0:
                return found
            await self._change_within(left)

    def admit(self, context: Context) -> None:
        """Raises: AuthenticationError: the call, whose token is right, carries a certificate for something else."""
        if self._certificates:
            check_caller(context.auth_context())
        self._members.hear()

    # The service

    @_guarded
    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        wire.check_version(request.version)
        peer = _checked_peer(request.peer)
        claimed = max(request.utc_us, *request.known.values(), 0)
        if len(request.known) > wire.MAX_KNOWN:
            raise ValueError(
                f"a join may tell {wire.MAX_KNOWN} known names, not {len(request.known)}: leave out the oldest"
            )
        if len(request.nonce) != KEY_BYTES or claimed > MAX_INCARNATION:
            raise ValueError("not a join: nonce, clock or known incarnations are out of range")
        self._members.learn(request.known)
        holder = self._members.holder(peer.name)
        if holder is not None and holder.nonce != request.nonce and peer.incarnation <= holder.peer.incarnation:
            await self._until_silent(holder)
        if self._stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator is stopping")
        lease = self._members.join(peer, request.nonce, request.peer.links, utc_us=request.utc_us)
        return pb.JoinReply(
            incarnation=lease.peer.incarnation,
            lease_key=lease.key,
            lease_s=self._members.lease_s,
            heartbeat_address=self._heartbeat_address,
            version=wire.VERSION,
            expelled=lease.expelled,
        )

    @_guarded
    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.Empty:
        self._members.end(request.lease_key, "it left")
        return pb.Empty()

    @_guarded
    async def Resolve(self, request: pb.ResolveRequest, context: Context) -> pb.Peer:
        name = wire.check_name(request.name)
        lease = await self._wait_for(lambda: self._members.holder(name), request.wait_s)
        if lease is None:
            raise _unknown(f"no peer {name!r} has joined", self._members.near(name), "resolve")
        return wire.peer_to_pb(lease.peer, lease.links)

    @_guarded
    async def Find(self, request: pb.FindRequest, context: Context) -> pb.Peer:
        service = wire.check_name(request.service)
        lease = await self._wait_for(lambda: self._members.server_of(service), request.wait_s)
        if lease is None:
            raise _unknown(f"no peer serves {service!r}", self._members.near(service, services=True), "find")
        return wire.peer_to_pb(lease.peer, lease.links)

    @_guarded
    async def Advertise(self, request: pb.AdvertiseRequest, context: Context) -> pb.Empty:
        names = [wire.check_name(name) for name in request.add]
        lease = self._members.by_key(request.lease_key)
        if lease is None:
            raise PeerLostError("the lease has ended", phase="advertise", hint="Join again")
        for name in names:
            other = self._members.server_of(name)
            if other is not None and other is not lease:
                await self._until_silent(other)
        self._members.advertise(lease, names, request.remove)
        if request.leaving:
            self._members.retire(lease)
        return pb.Empty()

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchReply]:
        try:
            self.admit(context)
            wire.check_version(request.version)
        except TensorLinkError as error:
            await context.abort(*wire.status_of(error))
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            yield self._snapshot()
            while True:
                change = await watcher.next()
                yield self._snapshot() if change is None else _change_to_pb(change)
        finally:
            self._watchers.discard(watcher)

    def _snapshot(self) -> pb.WatchReply:
        peers = [wire.peer_to_pb(peer) for peer in self._members.peers()]
        return pb.WatchReply(snapshot=pb.Snapshot(epoch=self._epoch, lease_s=self._members.lease_s, peers=peers))

    async def _until_silent(self, lease: Lease) -> None:
        """Returns when the holder has shown that it lives, or when its lease has ended."""
        asked = time.monotonic()
        ping = asyncio.create_task(self._pings(lease.peer))
        try:
            while self._members.by_key(lease.key) is lease and lease.last_beat <= asked:
                if ping.done() and ping.result():
                    return
                await self._change_within(0.02)
        finally:
            ping.cancel()

    async def _pings(self, peer: PeerInfo) -> bool:
        target = addresses.route_to(peer.address).target
        if not target:
            return False
        try:
            async with wire.aio_channel(target, self._certificates) as channel:
                metadata = wire.token_metadata(self._token)
                reply = await pb_grpc.PeerServiceStub(channel).Ping(
                    pb.PingRequest(), timeout=_PING_S, metadata=metadata
                )
                return bool(reply.name == peer.name)
        except (grpc.RpcError, ValueError):
            return False


def _checked_peer(message: pb.Peer) -> PeerInfo:
    """The joiner as it describes itself. Raises: ValueError: something in it is out of range."""
    wire.check_name(message.name)
    if len(message.labels) > _MAX_LABELS:
        raise ValueError(f"a peer has at most {_MAX_LABELS} labels, not {len(message.labels)}")
    for key, value in message.labels.items():
        wire.check_name(key)
        if value:
            wire.check_name(value)
    if len(message.links) > _MAX_LINKS_BYTES:
        raise ValueError(
            f"what a peer tells of its links has at most {_MAX_LINKS_BYTES} bytes, not {len(message.links)}"
        )
    if len(message.host.encode()) > wire.MAX_NAME_BYTES:
        raise ValueError(f"the identity of a host has at most {wire.MAX_NAME_BYTES} bytes")
    for service in message.services:
        wire.check_name(service)
    wire.check_name(message.address, addresses.MAX_ADDRESS_BYTES)
    if message.incarnation > MAX_INCARNATION:
        raise ValueError(f"incarnation {message.incarnation} is out of range")
    return wire.peer_from_pb(message)


def _unknown(what: str, near: list[str], phase: str) -> PeerUnknownError:
    hint = f"Near names: {', '.join(near)}" if near else "`tensorlink peers` lists who is there"
    return PeerUnknownError(what, phase=phase, hint=hint)


def _change_to_pb(change: Change) -> pb.WatchReply:
    kind = {"up": pb.Change.UP, "down": pb.Change.DOWN, "updated": pb.Change.UPDATED}[change.kind]
    return pb.WatchReply(change=pb.Change(kind=kind, peer=wire.peer_to_pb(change.peer), reason=change.reason))
