"""Machines that others recorded, with what is known of each, where a checkout lies beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).parents[2].parent / "shared" / "cases"


def names(folder: str, pattern: str) -> list[Any]:
    """Parameters for a test a case; one that is skipped where there are none."""
    found = sorted(path.stem for path in (CASES / folder).glob(pattern))
    return found or [pytest.param("", marks=pytest.mark.skip(reason=f"no recorded machines in {CASES / folder}"))]


def expected(folder: str, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((CASES / folder / f"{name}.json").read_text())["expected"]
    return facts
