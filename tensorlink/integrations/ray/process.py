"""The one endpoint of a Ray process."""

from __future__ import annotations

import threading

import ray

from tensorlink import api
from tensorlink.endpoint import Endpoint
from tensorlink.errors import ClosedError, NameInUseError

_starting = threading.Lock()


def endpoint() -> Endpoint:
    """The current endpoint; where there is none, one is started. Any thread. Raises: as `tensorlink.init`."""
    try:
        return api.current()
    except ClosedError:
        pass
    with _starting:
        try:
            return api.current()
        except ClosedError:
            return _start()


def _start() -> Endpoint:
    """Joins under the name that an actor keeps when it is restarted: whoever has an old handle is told so."""
    try:
        return api.init()
    except NameInUseError:  # its predecessor isn't known to be dead yet, on a host that cannot be reached
        return api.init(f"ray-worker-{ray.get_runtime_context().get_worker_id()}")
