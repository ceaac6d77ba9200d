"""The gRPC service in every endpoint: hello, messages, releases, mailboxes and scratch objects for peers."""
# mypy: disable-error-code="no-untyped-call,misc"

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import grpc

from tensorlink import network
from tensorlink.control import addresses, mailbox, runtime_dir, wire
from tensorlink.control import control_pb2 as pb
from tensorlink.control import control_pb2_grpc as pb_grpc
from tensorlink.control.certificates import Certificates, check_caller
from tensorlink.control.logins import Gate, Logins
from tensorlink.control.pool import DaemonPool
from tensorlink.errors import AuthenticationError, TensorLinkError, TransportError
from tensorlink.types import PeerId
from tensorlink.version import RELEASE

log = logging.getLogger("tensorlink.control")

_MAX_MAILBOXES = 128
_MAX_CALLS = 4096
_MAX_PADDING = 64 << 10
_STOP_S = 0.5

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Context = grpc.ServicerContext


@dataclass(frozen=True)
class Hello:
    """Who talks, where it runs, and for each of its transports what the other side needs to connect."""

    peer: PeerId
    host: str
    connect: Mapping[str, bytes]
    max_bytes_per_s: int = 0
    """What it gives to one peer on another host at most; 0: as fast as it goes."""


@dataclass(frozen=True)
class Pong:
    """What a peer answers to a ping. Of an older release nothing but `peer` is known."""

    peer: PeerId
    release: str = ""
    """Of TensorLink, `0.1.0`; empty: it doesn't say."""
    utc_us: int = 0
    """Its clock when it answered; 0: it doesn't say."""
    mtu: int = 0
    """Of the interface on which it listens for other hosts, bytes; 0: it doesn't listen, or doesn't say."""


class PeerHandlers(Protocol):
    """What an endpoint does with calls of its peers.

    Called from daemon threads, several at once. What comes in was sent by a holder of the token, and is unchecked
    otherwise. A `TensorLinkError` is raised again in the caller; anything else reaches it as `TransportError`.
    """

    def hello(self, hello: Hello) -> Mapping[str, bytes]:
        """A peer introduces itself; returns what it needs to connect to each transport here."""

    def deliver(self, source: PeerId, sequence: int, tag: str, frame: bytes) -> bytes:
        """A message; the returned bytes are the acknowledgement. May come twice: the sender saw no answer."""

    def release(self, source: PeerId, ids: list[int]) -> None:
        """A peer has done with handles of this one."""

    def mailbox(self, source: PeerId, box: mailbox.Mailbox) -> None:
        """A transport in a peer opened a mailbox. Takes it over, and returns at once."""

    def scratch(self, source: PeerId, nbytes: int) -> bytes:
        """A peer wants something of that size to read, and has done with what it had; returns the handle, none for 0."""


def _guarded(method: Callable[[Any, Request, Context], Reply]) -> Callable[[Any, Request, Context], Reply]:
    """Checks the certificate before the call, and turns errors into statuses after it."""

    @functools.wraps(method)
    def call(self: PeerServer, request: Request, context: Context) -> Reply:
        try:
            if self.certificates:
                check_caller(context.auth_context())
            return method(self, request, context)
        except Exception as error:
            if not context.is_active():
                raise  # the caller has gone, and with it the stream
            if not isinstance(error, (TensorLinkError, ValueError)):
                log.exception("a call of a peer failed here")
            code, details, trailing = wire.status_of(error)
            context.set_trailing_metadata(trailing)
            context.abort(code, details)
            raise AssertionError("abort raises") from error

    return call


def _source(name: str, incarnation: int) -> PeerId:
    return PeerId(wire.check_name(name), incarnation)


class PeerServer(pb_grpc.PeerServiceServicer):
    """Serves `handlers` on a unix socket in the run-time directory, and for other hosts on TCP at the IP address `listen`,
    if it is given, at a port of the range `ports`; from the moment it is made until `close`.

    `address` is what a `PeerClient` needs: the gRPC targets, with commas between them.

    Raises:
        AuthenticationError: the run-time directory is somebody else's, or `listen` is given and neither a token nor
            certificates.
        TransportError: there is no place for a socket, or no free port.
    """

    def __init__(
        self,
        handlers: PeerHandlers,
        *,
        name: str,
        token: str | None = None,
        listen: str | None = None,
        ports: str | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        if listen is not None and not (token or certificates):
            raise AuthenticationError(
                f"listening on {listen} needs a token or certificates", phase="listen", hint="Set TENSORLINK_TOKEN"
            )
        self.name = name
        self.incarnation = 0
        """Set by the endpoint once it has joined."""
        self.max_bytes_per_s = 0
        """What peers are told in the hello."""
        self._logins = Logins(token)
        self.certificates = certificates
        self._handlers = handlers
        self._host = listen
        self._pid = os.getpid()
        self._boxes: set[mailbox.Mailbox] = set()
        self._lock = threading.Lock()
        self._closed = False
        directory = runtime_dir.runtime_dir()
        runtime_dir.sweep(directory)
        self._path = runtime_dir.private_socket(directory)
        self.address = wire.unix_target(self._path)
        self._pool = DaemonPool("tensorlink-peer")
        self._server = grpc.server(
            cast(ThreadPoolExecutor, self._pool),
            interceptors=[Gate(self._logins)],
            options=wire.SERVER_OPTIONS,
            maximum_concurrent_rpcs=_MAX_CALLS,
        )
        pb_grpc.add_PeerServiceServicer_to_server(self, self._server)
        try:
            self._listen(listen, ports)
        except BaseException:
            self._server.start()  # gRPC never frees a server that was not started
            self.close()
            raise
        self._server.start()

    def _listen(self, host: str | None, ports: str | None) -> None:
        try:
            self._server.add_insecure_port(self.address)
        except RuntimeError as error:
            raise TransportError(f"cannot listen on {self._path}: {error}", phase="listen") from None
        if host is not None:
            port = addresses.add_tcp_port(self._server, self.certificates, host, ports)
            self.address += f",{network.join_address(host, port)}"

    def close(self) -> None:
        """Ends calls and mailboxes and removes the socket, within a second. Idempotent; does nothing after `fork`."""
        if os.getpid() != self._pid or self._closed:
            return
        self._closed = True
        self._logins.close()
        with self._lock:
            boxes = list(self._boxes)
        for box in boxes:
            box.end("the peer shuts down")
        self._server.stop(_STOP_S).wait(2 * _STOP_S)
        self._pool.shutdown()
        runtime_dir.remove(self._path)

    # The service

    @_guarded
    def Hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloReply:
        wire.check_version(request.version)
        peer = _source(request.name, request.incarnation)
        connect = self._handlers.hello(Hello(peer, request.host, dict(request.connect)))
        return pb.HelloReply(
            version=wire.VERSION,
            name=self.name,
            incarnation=self.incarnation,
            connect=dict(connect),
            max_bytes_per_s=self.max_bytes_per_s,
        )

    @_guarded
    def Deliver(self, request: pb.DeliverRequest, context: Context) -> pb.DeliverReply:
        source = _source(request.source, request.incarnation)
        return pb.DeliverReply(ack=self._handlers.deliver(source, request.sequence, request.tag, request.frame))

    @_guarded
    def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.Empty:
        self._handlers.release(_source(request.source, request.incarnation), list(request.ids))
        return pb.Empty()

    @_guarded
    def Ping(self, request: pb.PingRequest, context: Context) -> pb.PingReply:
        return pb.PingReply(
            name=self.name,
            incarnation=self.incarnation,
            release=RELEASE,
            utc_us=time.time_ns() // 1000,
            mtu=network.mtu_of(self._host) or 0,
            padding=bytes(min(len(request.padding), _MAX_PADDING)),
        )

    @_guarded
    def Scratch(self, request: pb.ScratchRequest, context: Context) -> pb.ScratchReply:
        source = _source(request.source, request.incarnation)
        return pb.ScratchReply(handle=self._handlers.scratch(source, request.nbytes))

    @_guarded
    def Mailbox(self, frames: Iterator[pb.MailboxFrame], context: Context) -> Iterator[pb.MailboxFrame]:
        first = next(frames, None)
        if first is None:
            return iter(())
        source = _source(first.source, first.incarnation)
        box = mailbox.Mailbox(source.name, first.transport)
        self._adopt(box)
        context.add_callback(lambda: self._forget(box))
        if first.data:
            box.arrived(first.data)
        threading.Thread(target=_pump, args=(frames, box), name="tensorlink-mailbox", daemon=True).start()
        self._handlers.mailbox(source, box)
        return (pb.MailboxFrame(data=data) for data in box.outgoing())

    def _adopt(self, box: mailbox.Mailbox) -> None:
        with self._lock:
            if self._closed or len(self._boxes) >= _MAX_MAILBOXES:
                raise TransportError("no more mailboxes can be opened here", peer=self.name, phase="mailbox")
            self._boxes.add(box)

    def _forget(self, box: mailbox.Mailbox) -> None:
        box.end("the stream ended")
        with self._lock:
            self._boxes.discard(box)


def _pump(frames: Iterator[pb.MailboxFrame], box: mailbox.Mailbox) -> None:
    try:
        for frame in frames:
            if not box.arrived(frame.data):
                return
    except Exception as error:  # gRPC ends the iterator of a lost stream in several ways
        log.debug("a mailbox stream broke: %r", error)
    box.end("the other side closed it")


__all__ = ["Hello", "PeerHandlers", "PeerServer", "Pong"]
