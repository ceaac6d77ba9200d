"""Ray for test modules: an environment that its workers inherit, and a check for what it leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensorlink as tl
from tests import leaks

ROOT = Path(tl.__file__).parents[1]
SMALL = {"include_dashboard": False, "object_store_memory": 80 << 20}


@contextlib.contextmanager
def ray_folder() -> Iterator[str]:
    """A directory for one Ray, whose processes find this checkout."""
    folder = tempfile.mkdtemp(prefix="tl-ray-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("TENSORLINK_LEASE_S", "2")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest, _isolated_session: None) -> Iterator[None]:
    """As that of all tests, but for the threads and descriptors which Ray keeps in a driver after `ray.shutdown`."""
    before, failed = leaks.Snapshot.take(), request.session.testsfailed
    yield
    now = leaks.Snapshot.take()
    known = dataclasses.replace(now, children=before.children, memory=before.memory)
    left = leaks.settle(known, timeout=20.0 if request.session.testsfailed == failed else 0.0)
    leaks.end_children(before)
    if request.session.testsfailed == failed:
        assert not left, "left behind by this module:\n" + "\n".join(left)
