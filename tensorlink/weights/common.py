"""What both ends of weights share: how a publisher is called, and how they count."""

from __future__ import annotations

from typing import Any

from tensorlink.api import current
from tensorlink.endpoint import Endpoint

CLOSED = b""
"""On the board in place of a descriptor: the publisher was closed."""


def service(name: str) -> str:
    """Under which a publisher is found."""
    return f"weights/{name}"


def open_endpoint(endpoint: Endpoint | None) -> Endpoint:
    """That, or the current one. Raises: ClosedError."""
    chosen = current() if endpoint is None else endpoint
    chosen._check()
    return chosen


def count(stats: dict[str, Any], nbytes: int, seconds: float) -> None:
    """Adds one version that was published or pulled."""
    stats["bytes"] = nbytes
    stats["seconds"] = seconds
    stats["total_bytes"] += nbytes
    stats["total_seconds"] += seconds
