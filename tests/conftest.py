"""What every test gets: an environment of its own, and a check that its module left nothing behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

# Pools of math threads would outlive the tests and fight for the cores. Read when torch and numpy load, so set here.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

from tests import leaks  # noqa: E402


def make_runtime_dir() -> Path:
    """A private directory with a short path: the path of a unix socket must fit into 107 bytes."""
    return Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))


@pytest.fixture(scope="session", autouse=True)
def _isolated_session() -> Iterator[None]:
    """Nothing of the user's is touched, not even by fixtures that live longer than a test."""
    leaks.adopt_orphans()
    resource_tracker.ensure_running()
    thread = threading.Thread(target=int)  # with the first thread TSan starts one of its own
    thread.start()
    thread.join()
    folder = make_runtime_dir()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TENSORLINK_")]:
            patch.delenv(name)
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield
    shutil.rmtree(folder)


@pytest.fixture(scope="module", autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest, _isolated_session: None) -> Iterator[None]:
    """Fails a module after which a child, thread, descriptor, memory file or mapping of one is left.

    After a failed test, which keeps alive what its frames hold, it only cleans up.
    """
    before, failed = leaks.Snapshot.take(), request.session.testsfailed
    yield
    left = leaks.settle(before, timeout=5.0 if request.session.testsfailed == failed else 0.0)
    leaks.end_children(before)
    if request.session.testsfailed == failed:
        assert not left, "left behind by this module:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`XDG_RUNTIME_DIR` of this test and of the processes it starts: endpoints of two tests never meet."""
    folder = make_runtime_dir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
