"""What every test gets: an environment of its own, and a check that its module left nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

# Pools of math threads would outlive the tests and fight for the cores. Read when torch and numpy load, so set here.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"
# Whoever starts the tests in the background of a script has them ignore Ctrl-C, and all that they start too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests import leaks  # noqa: E402


def make_runtime_dir() -> Path:
    """A private directory with a short path: the path of a unix socket must fit into 107 bytes."""
    return Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tensorlink")
    group.addoption(
        "--transports", help="what all peers use, as in the setting: tcp; tests of shared memory are skipped"
    )
    group.addoption("--control", help="what carries their messages, as in the setting: grpc")
    group.addoption("--settle", type=float, default=15.0, help="seconds that a module's last threads have to end")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (transports := config.getoption("transports")):
        return
    from tensorlink.settings import Settings

    if Settings(transports=transports).allows("shm"):
        return
    for item in items:
        if item.get_closest_marker("shm"):
            item.add_marker(pytest.mark.skip(reason="it is about shared memory"))


def _chosen(config: pytest.Config) -> dict[str, str]:
    """The environment that the command line asks for."""
    chosen = {
        "TENSORLINK_TRANSPORTS": config.getoption("transports"),
        "TENSORLINK_CONTROL": config.getoption("control"),
    }
    chosen = {name: value for name, value in chosen.items() if value}
    return {**chosen, "TENSORLINK_TOKEN": "a secret of the tests"} if "TENSORLINK_TRANSPORTS" in chosen else chosen


@pytest.fixture(scope="session", autouse=True)
def _isolated_session(request: pytest.FixtureRequest) -> Iterator[None]:
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
        for name, value in _chosen(request.config).items():
            patch.setenv(name, value)
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield
    shutil.rmtree(folder)


@pytest.fixture(scope="module", autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest, _isolated_session: None) -> Iterator[None]:
    """Fails a module after which a child, thread, descriptor, memory file or mapping of one is left.

    After a failed test, which keeps alive what its frames hold, it only cleans up.
    """
    before, failed = leaks.Snapshot.take(), request.session.testsfailed
    yield
    left = leaks.settle(
        before, timeout=request.config.getoption("--settle") if request.session.testsfailed == failed else 0.0
    )
    leaks.end_children(before)
    if request.session.testsfailed == failed:
        assert not left, "left behind by this module:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`XDG_RUNTIME_DIR` of this test and of the processes it starts: endpoints of two tests never meet.

    The cache lies in it too, so that no test measures what another one's figures decide.
    """
    folder = make_runtime_dir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
