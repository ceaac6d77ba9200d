"""Calls to one peer's service."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import grpc

from tensorlink.control import addresses, wire
from tensorlink.control import control_pb2 as pb
from tensorlink.control import control_pb2_grpc as pb_grpc
from tensorlink.control.certificates import Certificates
from tensorlink.control.mailbox import Mailbox
from tensorlink.control.peer_service import Hello, Pong
from tensorlink.control.runtime_dir import host_identity
from tensorlink.errors import ClosedError, PeerLostError, TransportError
from tensorlink.types import PeerId

_MAX_RELEASE = 64


class PeerClient:
    """A channel to one incarnation of one peer, at the `address` of its `PeerInfo`; `me` is who calls. Thread-safe.

    It uses the first target of the address that can be reached from here: the peer's unix socket, if somebody listens
    on it, else TCP. Every call takes `timeout` in seconds and raises:
        PeerLostError: nobody answers; the message names each target and why.
        TransferTimeoutError: no answer in time; whether the peer acted on it is unknown.
        AuthenticationError: the peer refuses the token or the certificate of this process, or its own is refused here.
        ClosedError: `close` was called, or this is a forked child.
        TensorLinkError: what the peer raised.
    """

    def __init__(
        self,
        address: str,
        *,
        peer: str,
        me: PeerId,
        token: str | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        self.peer = peer
        self.max_bytes_per_s = 0
        """What the peer gives to one on another host at most, as its hello has said; 0: as fast as it goes."""
        self._me = me
        self._pid = os.getpid()
        self._closed = False
        self._metadata = wire.token_metadata(token)
        self._certificates = certificates
        self._route = addresses.route_to(address)
        self._answered = False
        self._channel = wire.channel(self._route.target or "unix:/", certificates)
        self._stub = pb_grpc.PeerServiceStub(self._channel)

    def hello(self, connect: Mapping[str, bytes], timeout: float) -> Hello:
        """Introduces this process; `connect` is for each transport what the peer needs. Returns the same of the peer.

        Raises: TensorLinkError: the peer speaks another version.
        """
        request = pb.HelloRequest(
            version=wire.VERSION,
            name=self._me.name,
            incarnation=self._me.incarnation,
            host=host_identity(),
            connect=dict(connect),
        )
        reply = self._call("Hello", request, timeout)
        wire.check_version(reply.version)
        self.max_bytes_per_s = reply.max_bytes_per_s
        return Hello(PeerId(reply.name, reply.incarnation), "", dict(reply.connect), reply.max_bytes_per_s)

    def deliver(self, sequence: int, tag: str, frame: bytes, timeout: float) -> bytes:
        """Delivers a message of at most 64 MiB and returns the peer's acknowledgement."""
        request = pb.DeliverRequest(
            source=self._me.name, incarnation=self._me.incarnation, sequence=sequence, tag=tag, frame=frame
        )
        ack: bytes = self._call("Deliver", request, timeout).ack
        return ack

    def release(self, ids: list[int], timeout: float) -> None:
        """Says that this process has done with handles of the peer."""
        self._call(
            "Release", pb.ReleaseRequest(source=self._me.name, incarnation=self._me.incarnation, ids=ids), timeout
        )

    def ping(self, timeout: float) -> PeerId:
        """Who answers there; incarnation 0: it has not joined yet."""
        return self.about(timeout).peer

    def about(self, timeout: float, padding: int = 0) -> Pong:
        """What it tells of itself. With `padding` that many bytes go there, and up to 64 KiB come back: large
        packets, both ways."""
        reply = self._call("Ping", pb.PingRequest(padding=bytes(padding)), timeout)
        release = reply.release if len(reply.release) <= _MAX_RELEASE and reply.release.isprintable() else ""
        return Pong(PeerId(reply.name, reply.incarnation), release, reply.utc_us, reply.mtu)

    def scratch(self, nbytes: int, timeout: float) -> bytes:
        """The handle of an object to measure with: of that size, or of what the peer has room for. It ends with the next call,
        of which one for 0 bytes gives none, after a minute, or when this process leaves.

        Raises: PoolExhaustedError: there is no room, or too many others are measuring.
        """
        request = pb.ScratchRequest(source=self._me.name, incarnation=self._me.incarnation, nbytes=nbytes)
        handle: bytes = self._call("Scratch", request, timeout).handle
        return handle

    def mailbox(self, transport: str) -> Mailbox:
        """Opens a mailbox to the same transport in the peer. Returns at once; a lost peer mostly shows at the first `recv`."""
        self._check("mailbox")

        def frames() -> Iterator[pb.MailboxFrame]:
            yield pb.MailboxFrame(source=self._me.name, incarnation=self._me.incarnation, transport=transport)
            for data in box.outgoing():
                yield pb.MailboxFrame(data=data)

        box = Mailbox(self.peer, transport)
        call = self._stub.Mailbox(frames(), metadata=self._metadata)
        threading.Thread(target=_pump, args=(call, box), name="tensorlink-mailbox", daemon=True).start()
        return box

    def close(self) -> None:
        """Ends calls in progress and mailboxes. Idempotent; does nothing in a forked child."""
        if os.getpid() == self._pid:
            self._closed = True
            self._channel.close()

    def _check(self, phase: str) -> None:
        if self._closed or os.getpid() != self._pid:
            raise ClosedError("the connection to the peer is closed", peer=self.peer, phase=phase)
        if not self._route.target:
            raise PeerLostError(f"{self.peer} cannot be reached: {self._route}", peer=self.peer, phase=phase)

    def _call(self, method: str, request: Any, timeout: float) -> Any:
        phase = method.lower()
        self._check(phase)
        try:
            reply = getattr(self._stub, method)(request, timeout=timeout, metadata=self._metadata)
            self._answered = True
            return reply
        except grpc.RpcError as error:
            self._check(phase)
            refused = None if self._answered else wire.refusal(error, self._route.target, self._certificates)
            if refused is not None:
                refused.peer, refused.phase = self.peer, phase
                raise refused from None
            where, hint = f"{self.peer} at {self._route}", None if self._answered else self._route.hint
            raise wire.error_of(error, peer=self.peer, phase=phase, where=where, hint=hint) from None
        except ValueError as error:  # how gRPC says that the channel was closed meanwhile
            self._check(phase)
            raise TransportError(f"cannot be sent: {error}", peer=self.peer, phase=phase) from None


def _pump(call: Any, box: Mailbox) -> None:
    with contextlib.suppress(ValueError):
        try:
            for frame in call:
                if not box.arrived(frame.data):
                    return
        except grpc.RpcError as error:
            box.end(str(wire.error_of(error, phase="mailbox")))
    box.end("the other side closed it")
