"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d{1,15})\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of `65536`, `64K`, `64KiB` or `2GiB`. Raises: ValueError: it is no number of bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"a size is like 65536, 64KiB or 2GiB, not {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]
