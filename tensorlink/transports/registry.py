"""Finds transports by the entry points `tensorlink.transports`, ours and other people's alike, and loads them when asked."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from tensorlink.errors import TransportError
from tensorlink.transports.base import Transport

GROUP = "tensorlink.transports"


def installed() -> dict[str, EntryPoint]:
    """Every installed transport by name, none of them loaded. Where two have one name, the first found counts."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, point)
    return found


def load(name: str) -> type[Transport]:
    """The transport class of that name.

    Raises: TransportError: it isn't installed (the message lists those that are), cannot be imported, or is none.
    """
    points = installed()
    if name not in points:
        raise TransportError(f"no transport {name!r} is installed; there are: {', '.join(sorted(points)) or 'none'}")
    try:
        kind = points[name].load()
    except Exception as error:
        raise TransportError(f"transport {name!r} cannot be loaded: {error}", transport=name) from error
    if not (isinstance(kind, type) and issubclass(kind, Transport)):
        raise TransportError(f"transport {name!r} is no Transport class but {kind!r}", transport=name)
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing:
        raise TransportError(f"transport {name!r} lacks {', '.join(missing)}", transport=name)
    return kind
