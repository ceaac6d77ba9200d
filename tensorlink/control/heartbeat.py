"""Serves heartbeats: a stream socket apart from gRPC, cheap enough for a beat of every peer every second or so.

A peer writes its 16-byte lease key; the answer is one byte, `EXTENDED` or `UNKNOWN` (join again). On a unix socket the
kernel says who is at the other end, so a pidfd tells its death at once, even where a forked child keeps the stream
open; a stream that closes ends the lease too. Over TCP a closed stream proves nothing, and the peer's own port is asked:
if nobody listens there any more it has gone, else the lease runs out.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from pathlib import Path

from tensorlink import network
from tensorlink.control import addresses
from tensorlink.control.membership import KEY_BYTES, Membership

EXTENDED, UNKNOWN = b"\x00", b"\x01"
MAX_STREAMS = 4096
_MAX_UNKNOWN = 8
_MAX_BUFFERED = 16 * KEY_BYTES
_PAUSES_S = (0.0, 0.05, 0.2, 0.5)  # a process that ends closes one descriptor after the other


class HeartbeatServer:
    """The listener. All of it runs on the coordinator's event loop."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.streams: dict[_Stream, None] = {}  # the oldest first
        self.bearers: dict[bytes, _Stream] = {}  # lease key -> the stream that brought its last beat
        self._server: asyncio.Server | None = None
        self._asking: set[asyncio.Task[None]] = set()

    async def listen_unix(self, path: Path) -> str:
        """Listens on a unix socket and returns the address for peers."""
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _Stream(self), str(path), backlog=256
        )
        return f"unix:{path}"

    async def listen_tcp(self, host: str, ports: str | None) -> int:
        """Listens on a free port of `host`, of the range `ports`, and returns it. Raises: TransportError: none is free."""
        listener = network.listener(host, ports)
        self._server = await asyncio.get_running_loop().create_server(lambda: _Stream(self), sock=listener, backlog=256)
        port: int = listener.getsockname()[1]
        return port

    def drop_idle(self) -> None:
        """Closes streams that brought no lease in a lease time, and those silent for three."""
        now = time.monotonic()
        for stream in list(self.streams):
            patience = self.membership.lease_s * (3 if stream.key else 1)
            if now - stream.heard > patience:
                stream.close()

    def make_room(self) -> bool:
        """Whether one more stream may come: at `MAX_STREAMS` the oldest that has brought no lease makes way."""
        if len(self.streams) < MAX_STREAMS:
            return True
        stranger = next((stream for stream in self.streams if not stream.key and not stream.closing), None)
        if stranger is not None:
            stranger.close()
        return stranger is not None

    def extend(self, gap_s: float) -> None:
        """Forgives every stream the time in which the coordinator itself was stopped."""
        for stream in self.streams:
            stream.heard += gap_s

    def find_out(self, key: bytes) -> None:
        """Ends a lease whose stream has closed, if nobody listens any more where its peer did."""
        task = asyncio.get_running_loop().create_task(self._find_out(key))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _find_out(self, key: bytes) -> None:
        lease = self.membership.by_key(key)
        place = None if lease is None else addresses.tcp_place(lease.peer.address)
        if place is None:
            return
        for pause_s in _PAUSES_S:
            await asyncio.sleep(pause_s)
            if await network.refuses(*place):
                self.membership.end(key, "its process has gone: nobody listens where it did")
                return

    def close(self) -> None:
        """Closes the listener and every stream."""
        for task in self._asking:
            task.cancel()
        if self._server is not None:
            self._server.close()
        for stream in list(self.streams):
            stream.close()


class _Stream(asyncio.BufferedProtocol):
    """One peer's stream. It reads into a small buffer: asyncio's own of 256 KiB a read costs more than the beat."""

    def __init__(self, server: HeartbeatServer) -> None:
        self.key = b""
        self.heard = time.monotonic()
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(_MAX_BUFFERED)
        self._filled = 0
        self._unknown = 0
        self._local = False
        self._pidfd = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._server.make_room():
            transport.abort()
            return
        self._server.streams[self] = None
        raw = transport.get_extra_info("socket")
        self._local = raw.family == socket.AF_UNIX
        if self._local:
            self._watch_process(raw)

    def _watch_process(self, raw: socket.socket) -> None:
        credentials = raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid not in (os.geteuid(), 0):
            self.close()
        elif pid > 0:  # 0: it lives in a namespace of processes that this one cannot see
            try:
                self._pidfd = os.pidfd_open(pid)
                asyncio.get_running_loop().add_reader(self._pidfd, self._died)
            except ProcessLookupError:
                self.close()
            except OSError:
                pass  # no pidfd here: the closed stream and the lease remain

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        assert self._transport is not None
        self._filled += nbytes
        whole = self._filled // KEY_BYTES * KEY_BYTES
        for at in range(0, whole, KEY_BYTES):
            self._beat(bytes(self._buffer[at : at + KEY_BYTES]), self._transport)
        self._buffer[: self._filled - whole] = self._buffer[whole : self._filled]
        self._filled -= whole
        if self._transport.get_write_buffer_size() > _MAX_BUFFERED:
            self.close()  # it doesn't read its answers

    def _beat(self, key: bytes, transport: asyncio.Transport) -> None:
        if transport.is_closing():
            return
        if self._server.membership.beat(key) is not None:
            if key != self.key:
                self._unbind()
            self._server.bearers[key] = self
            self.key, self._unknown, self.heard = key, 0, time.monotonic()
            transport.write(EXTENDED)
            return
        self._unknown += 1
        transport.write(UNKNOWN)
        if self._unknown >= _MAX_UNKNOWN:
            self.close()

    def _died(self) -> None:
        if self._unbind():
            self._server.membership.end(self.key, "its process died")
        self.close()

    def _unbind(self) -> bool:
        """Whether the lease hung on this stream; a peer that connected again has moved it to another."""
        if self._server.bearers.get(self.key) is not self:
            return False
        del self._server.bearers[self.key]
        return True

    def eof_received(self) -> bool:
        return False  # closes the transport

    def connection_lost(self, error: Exception | None) -> None:
        self._release_pidfd()
        if self in self._server.streams:
            del self._server.streams[self]
            if not self._unbind():
                return
            if self._local:
                self._server.membership.end(self.key, "its heartbeat stream closed")
            else:
                self._server.find_out(self.key)

    def close(self) -> None:
        """Ends the stream. Idempotent."""
        self._release_pidfd()
        if self._transport is not None:
            self._transport.abort()

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def _release_pidfd(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
