"""What is looked after now and then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tensorlink import upkeep


def test_a_lease_that_ran_out_twice_in_a_row_is_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat may be refused, a new lease given and lost again, and no look in between see it well."""
    monkeypatch.setattr(upkeep, "_AGAIN_S", 0.0)
    asked: list[None] = []
    engine: Any = SimpleNamespace(heartbeat_state=lambda: upkeep._REJECTED)
    control: Any = SimpleNamespace(rejoin_needed=lambda: asked.append(None))
    kept: Any = SimpleNamespace(_engine=engine, _control=control, _ask_at=0.0)
    for _ in range(2):
        upkeep.Upkeep._heartbeat(kept)
    assert len(asked) == 2
