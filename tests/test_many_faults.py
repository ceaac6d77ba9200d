"""A little of what `make soak` does thousands of times: one fault after the other, and what must come of it (bench/faults.py)."""

from __future__ import annotations

import contextlib

import pytest

from bench.faults import PRELOADED, WAYS, Run
from tests.peer import Nursery


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("faults", [50, pytest.param(1000, marks=pytest.mark.soak)])
def test_many_faults(faults: int) -> None:
    with contextlib.closing(Nursery(PRELOADED)) as nursery:
        run = Run(nursery, faults, lease_s=0.3, seed=1, ways=WAYS if faults > 100 else (WAYS[0], WAYS[3]))
        run.run()
    assert not run.wrong, "\n".join([*run.wrong, run.tables()])
