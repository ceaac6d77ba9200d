"""TensorLink as a tensor transport of Ray: `@ray.method(tensor_transport="tensorlink")`. docs/ray.md is its guide.

Importing this package imports neither ray nor torch; calling its functions does.
"""

from __future__ import annotations

from tensorlink.endpoint import Endpoint

__all__ = ["TRANSPORT", "endpoint", "register"]

TRANSPORT = "tensorlink"
"""The name to give to `tensor_transport=`."""


def register() -> None:
    """Makes `tensor_transport="tensorlink"` known to Ray in this process, for torch tensors on the CPU and on CUDA devices.

    Call it in the driver before actors are made. Ray passes it on to the actors that this process makes or calls, but not to one
    that was restarted; that needs `worker_process_setup_hook="tensorlink.integrations.ray.register"` in the `runtime_env`
    of `ray.init`, which registers it in every worker, or this call in the module that has the actor's class.

    Nothing is started: a process becomes a peer when it first moves a tensor. Idempotent; any thread. Raises: ImportError:
    ray (2.60 or newer) or torch isn't installed.
    """
    from tensorlink.integrations.ray import transport

    transport.register(TRANSPORT)


def endpoint() -> Endpoint:
    """The endpoint of this process: the current one, or one that is started now, named after the actor or worker.

    It is the one through which Ray's tensors go, so an actor that uses `tensorlink.put` and `get` besides needs no other.
    Blocks until it has joined. Raises: as `tensorlink.init`.
    """
    from tensorlink.integrations.ray import process

    return process.endpoint()
