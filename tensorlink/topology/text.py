"""Recorded text as lines: what terminals, logs and web pages add to it is taken off here. Nothing in it is trusted."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tensorlink.errors import TopologyError

MAX_BYTES = 2 << 20
MAX_LINES = 20_000
MAX_LINE = 64 << 10
MAX_WARNINGS = 50

_ESCAPES = re.compile(
    r"(?:\x1b|\x9b|\ufffd|\u241b|\^\[|\\x1b|\\u001b|\\033|\\e)?\[[0-9;?]{0,16}[mK]"  # also where the ESC itself was lost
    r"|\x1b\[[0-9;?]{0,16}[@-~]|\x1b\][^\x07\x1b\n]{0,256}(?:\x07|\x1b\\)?|\x1b[ -/]{0,4}[0-~]"
)
_INVISIBLE = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f\u200b-\u200f\u2028\u2029\u2060\ufeff\ufffd]")
_BOXES = {
    124: " ",
    0x2502: " ",
    0x2503: " ",
    0x2551: " ",
    34: " ",
    39: " ",
    96: " ",
}  # | and the like are sides of tables, quotes of literals


@dataclass(frozen=True)
class Line:
    number: int
    text: str


def decode(data: bytes) -> str:
    """Text of bytes in UTF-8, or UTF-16 with its mark as some shells redirect; what is neither becomes U+FFFD.

    Raises:
        TopologyError: there are more than `MAX_BYTES`.
    """
    if len(data) > MAX_BYTES:
        raise TopologyError(f"a recorded topology has at most {MAX_BYTES} bytes")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8-sig", errors="replace")


def lines_of(text: str) -> list[Line]:
    """Lines without escape codes, boxes and quotes; a literal `\\n` breaks a line where the text has hardly a real one.

    Raises:
        TopologyError: there are more than `MAX_LINES`, or one is longer than `MAX_LINE`.
    """
    if text.count("\\n") > 2 > text.strip().count("\n"):
        text = text.replace("\\r", "").replace("\\n", "\n").replace("\\t", "\t")
    found = re.split(r"\r\n|[\n\r\v\f]", text)
    if len(found) > MAX_LINES:
        raise TopologyError(f"a recorded topology has at most {MAX_LINES} lines")
    for number, line in enumerate(found, 1):
        if len(line) > MAX_LINE:
            raise TopologyError(f"a line has at most {MAX_LINE} characters", line=number, column=MAX_LINE + 1)
    return [
        Line(number, _INVISIBLE.sub(" ", _ESCAPES.sub("", line)).translate(_BOXES))
        for number, line in enumerate(found, 1)
    ]


class Warnings:
    """What a reader has to say, in order, each thing once and not endlessly."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}

    def add(self, text: str, line: int | None = None) -> None:
        self._said.setdefault(text if line is None else f"line {line}: {text}")

    def all(self) -> tuple[str, ...]:
        said = list(self._said)
        more = len(said) - MAX_WARNINGS
        return tuple(said[:MAX_WARNINGS] + ([f"and {more} more"] if more > 0 else []))
