"""A small ordered channel of messages between the two halves of a transport, carried by gRPC until a lane stands."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from tensorlink.errors import PeerLostError, TransferTimeoutError

_INBOX_LIMIT = 256
_INBOX_BYTES = 64 << 20


class Mailbox:
    """One end. Messages are bytes, at most 64 MiB each, and arrive in order, once. Thread-safe.

    `peer` is the name of the other side and `transport` who talks. Each end is closed by its owner; when one end
    closes, the other still reads what had arrived, then gets `PeerLostError`.
    """

    def __init__(self, peer: str, transport: str) -> None:
        self.peer = peer
        self.transport = transport
        self._changed = threading.Condition()
        self._inbox: deque[bytes] = deque()
        self._outbox: deque[bytes] = deque()
        self._ended: str | None = None

    def send(self, message: bytes) -> None:
        """Queues a message; doesn't wait until it is there. Raises: PeerLostError: the mailbox is closed."""
        with self._changed:
            if self._ended is not None:
                raise self._lost()
            self._outbox.append(message)
            self._changed.notify_all()

    def recv(self, timeout: float) -> bytes:
        """The next message, waited for.

        Raises:
            TransferTimeoutError: none came in `timeout` seconds.
            PeerLostError: the other side closed or died, and all it sent was read.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._inbox or self._ended is not None, timeout):
                raise TransferTimeoutError("no message in time", peer=self.peer, transport=self.transport)
            if not self._inbox:
                raise self._lost()
            message = self._inbox.popleft()
            self._changed.notify_all()
            return message

    def close(self, *, linger_s: float = 0.5) -> None:
        """Ends this end, after giving what was queued up to `linger_s` seconds to leave. Idempotent, never raises."""
        with self._changed:
            if self._ended is None:
                self._changed.wait_for(lambda: not self._outbox or self._ended is not None, linger_s)
        self.end("it was closed here")

    def end(self, reason: str) -> None:
        """Marks the stream as over. For the carrier."""
        with self._changed:
            if self._ended is None:
                self._ended = reason
            self._changed.notify_all()

    def arrived(self, message: bytes) -> bool:
        """Takes a message in, waiting while the reader is far behind; False: nobody reads any more. For the carrier."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_room() or self._ended is not None)
            if self._ended is not None:
                return False
            self._inbox.append(message)
            self._changed.notify_all()
            return True

    def _has_room(self) -> bool:
        return len(self._inbox) < _INBOX_LIMIT and sum(map(len, self._inbox)) < _INBOX_BYTES

    def outgoing(self) -> Iterator[bytes]:
        """What is to be sent, until the end. For the carrier."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._outbox or self._ended is not None)
                if not self._outbox:
                    return
                message = self._outbox.popleft()
                self._changed.notify_all()
            yield message

    def _lost(self) -> PeerLostError:
        return PeerLostError(f"the mailbox ended: {self._ended}", peer=self.peer, transport=self.transport)
