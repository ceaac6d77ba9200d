"""Every error that TensorLink raises, sorted by what the caller does next.

A failure names the peer, the transport and the phase it happened in, and carries a hint: the next step to take.
All of them pickle with their fields, so they survive queues, process pools and Ray.
"""

from __future__ import annotations

import re


class TensorLinkError(Exception):
    """Base of every error below.

    `peer`, `transport` and `phase` say where it happened and `hint` what to do next; each is None where unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        peer: str | None = None,
        transport: str | None = None,
        phase: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.peer = peer
        self.transport = transport
        self.phase = phase
        self.hint = hint

    def __str__(self) -> str:
        where = [
            f"{key} {value}"
            for key, value in (("peer", self.peer), ("transport", self.transport), ("phase", self.phase))
            if value is not None and not _names(self.message, value)
        ]
        text = self._what() + (f" [{', '.join(where)}]" if where else "")
        return f"{text.removesuffix('.')}. {self.hint}" if self.hint else text

    def _what(self) -> str:
        return self.message


def _names(message: str, value: str) -> bool:
    """Whether the message already says `value`, as a word: a peer called `a` isn't named by an article."""
    return f"'{value}'" in message or (
        len(value) > 2 and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", message) is not None
    )


class ClosedError(TensorLinkError):
    """The endpoint was shut down, drains, was never started, or belongs to the parent of this forked process. Call `init`."""


class NameInUseError(TensorLinkError):
    """A live peer has this name. Choose another, or stop the other one first."""


class PeerUnknownError(TensorLinkError, LookupError):
    """No peer of this name joined before the deadline; the message lists names that are near."""


class PeerLostError(TensorLinkError, ConnectionError):
    """The peer died, left or cannot be reached. What it had completely sent is still delivered."""


class PeerRestartedError(PeerLostError):
    """The peer is back under the same name with a new incarnation: get a new handle from it and go on."""


class StaleRefError(TensorLinkError, LookupError):
    """The handle was released, has expired or never existed. Ask its owner for a new one."""


class TransferTimeoutError(TensorLinkError, TimeoutError):
    """The deadline passed. Nothing was consumed, and nothing more is written to any buffer of the caller.

    `waited` says for how long it waited for what, how far it had come, and when there were last news.
    """

    def __init__(self, message: str, *, waited: str | None = None, **fields: str | None) -> None:
        super().__init__(message, **fields)
        self.waited = waited

    def _what(self) -> str:
        return f"{self.message} ({self.waited})" if self.waited else self.message


class TransferCancelledError(TensorLinkError):
    """The transfer was cancelled by this process. Nothing more is written to any buffer of the caller."""


class LayoutMismatchError(TensorLinkError, ValueError):
    """Shapes, dtypes, devices or names differ from what was asked for. No byte was written."""


class NoPathError(TensorLinkError):
    """No allowed transport reaches the peer; the message lists each one and why it was rejected."""


class PoolExhaustedError(TensorLinkError, MemoryError):
    """The pool's budget is spent; the message says who holds what. Release handles, drop views or raise the budget."""


class AuthenticationError(TensorLinkError, PermissionError):
    """The other side refused the token or the certificate, or has one that is refused here, or runs as another user."""


class CorruptTransferError(TensorLinkError):
    """What arrived isn't what was sent: a checksum differs, or a message that a peer sent cannot be parsed."""


class TopologyError(TensorLinkError, ValueError):
    """A recorded topology cannot be read. `line` and `column` say where, counted from 1; None where there is no such place."""

    def __init__(
        self, message: str, *, line: int | None = None, column: int | None = None, **fields: str | None
    ) -> None:
        super().__init__(message, **fields)
        self.line = line
        self.column = column

    def _what(self) -> str:
        places = [f"{name} {at}" for name, at in (("line", self.line), ("column", self.column)) if at is not None]
        return f"{', '.join(places)}: {self.message}" if places else self.message


class TransportError(TensorLinkError):
    """A transport failed in a way that no other error describes.

    `code` is the native status (an errno) of a call that failed here; 0 or None: it was the path to the peer.
    """

    def __init__(self, message: str, *, code: int | None = None, **fields: str | None) -> None:
        super().__init__(message, **fields)
        self.code = code
