"""What a check says, and how a check is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from tensorlink.errors import TensorLinkError

Verdict = Literal["ok", "note", "warn", "fail"]
ORDER: tuple[Verdict, ...] = ("ok", "note", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """One check's outcome."""

    check: str
    verdict: Verdict
    """`ok`: as it should be; `note`: good to know, or not to be found out; `warn`: works, and something is lost by it;
    `fail`: something that is asked for doesn't work."""
    reason: str
    """What was seen, and why it matters."""
    mend: str | None = None
    """The command or setting that mends it."""


def worst(findings: Iterable[Finding]) -> Verdict:
    """The gravest verdict; `ok` where nothing was found."""
    return max((one.verdict for one in findings), key=ORDER.index, default="ok")


def failed(check: str, error: TensorLinkError | ValueError, verdict: Verdict = "fail") -> Finding:
    """What an error of the library says, its hint as the way to mend it."""
    if isinstance(error, TensorLinkError):
        return Finding(check, verdict, error.message, error.hint)
    return Finding(check, verdict, str(error))


def unknown(check: str, error: Exception) -> Finding:
    """A check that an error of its own has ended: nothing is known, so nothing is wrong either."""
    return Finding(check, "note", f"could not be found out: {type(error).__name__}: {error}")


def guarded(check: str, look: Callable[[], Finding | None]) -> list[Finding]:
    """What a check says. One that raises has found nothing out, and harms no other; None: there is nothing to say."""
    try:
        found = look()
    except Exception as error:
        return [unknown(check, error)]
    return [] if found is None else [found]
