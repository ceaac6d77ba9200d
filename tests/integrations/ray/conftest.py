"""One Ray for the tests of a module: a real one, on this machine, which nobody else uses."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator

import pytest

import tensorlink as tl
from tests import leaks
from tests.integrations.ray.clusters import ray_folder

RAY_LIMIT_S = 8.0
# Read when Ray is imported, so set here: the limit after which it gives up a transfer, 60 s otherwise.
os.environ["RAY_rdt_fetch_fail_timeout_milliseconds"] = str(int(RAY_LIMIT_S * 1000))  # noqa: SIM112 - Ray names it


@pytest.fixture(scope="module", autouse=True)
def _leaves_nothing(_isolated_session: None) -> Iterator[None]:
    """As for all modules, but for the threads and sockets that Ray keeps in a driver after its shutdown."""
    before = leaks.Snapshot.take()
    yield
    deadline = time.monotonic() + 15.0
    while (left := [what for what in leaks.settle(before, 0.0) if not _rays(what)]) and time.monotonic() < deadline:
        select.select([], [], [], 0.05)
    leaks.end_children(before)
    assert not left, "left behind by this module:\n" + "\n".join(left)


def _rays(what: str) -> bool:
    return what.startswith(("thread native ", "fd ")) and "tensorlink" not in what


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A driver that is connected to a Ray whose workers find this checkout and register the transport when they start."""
    with ray_folder(lease_s=60) as folder:  # a stopped process is silent, not gone
        import ray

        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 << 20,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(folder / "ray"),
            runtime_env={"worker_process_setup_hook": "tensorlink.integrations.ray.register"},
        )
        yield
        ray.shutdown()
        tl.shutdown()


@pytest.fixture(autouse=True)
def runtime_dir() -> None:
    """That of the Ray of the module: its driver is a peer of its actors."""
