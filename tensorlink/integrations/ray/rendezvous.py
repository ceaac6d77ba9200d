"""Inside Ray: drivers, actors and tasks of one Ray namespace find each other by a detached actor that runs the coordinator.

The actor is made by the first who looks, lives on the node of Ray's head, restarts elsewhere if it dies, and ends after
its last peer. Only Ray hands out its address and its token, which never changes while there are peers.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from dataclasses import replace
from typing import Any

from tensorlink.errors import ClosedError, PeerLostError, TensorLinkError, TransferTimeoutError
from tensorlink.rendezvous import Place, Rendezvous
from tensorlink.settings import Settings

GRACE_S = 5.0
"""The coordinator's actor ends this long after its last peer."""
_SHORT = 8
_HEAD = "node:__internal_head__"  # the resource by which Ray marks that node


def detect(asked: bool) -> Rendezvous | None:
    """That of this process, if Ray is initialised in it; nothing is imported to see that."""
    ray = sys.modules.get("ray")
    started = getattr(ray, "is_initialized", None)  # None while it is being imported
    if ray is None or started is None or not started():
        return None
    if ray.util.client.ray.is_connected():
        return None  # a driver of Ray Client isn't in the cluster, and need not reach its nodes
    return RayRendezvous(ray)


class RayRendezvous(Rendezvous):
    """The processes of one Ray namespace, which by default is one job."""

    name = "ray"
    precedence = 1
    """Before torchrun: its variables come with the environment of whoever started Ray, and Ray Train sets some."""

    def __init__(self, ray: Any) -> None:
        context = ray.get_runtime_context()
        labels = {key: str(value) for key, value in context.get_node_labels().items()}
        super().__init__(_peer_name(context, context.worker.mode != ray.WORKER_MODE), labels)
        self._ray = ray
        self._cluster = _cluster(context)

    def look(self, settings: Settings, timeout: float) -> Place:
        """Blocks until Ray has started the actor. Raises: PeerLostError: it died just now, or Ray cannot start it yet;
        ClosedError: this process has left that Ray cluster."""
        ray = self._ray
        if not ray.is_initialized() or _cluster(ray.get_runtime_context()) != self._cluster:
            # To go on would start another Ray.
            raise ClosedError("Ray, in which this peer met the others, was shut down here", phase="join")
        try:
            # Not ray.get, of which Ray warns in async actors.
            place: Place = start(settings).place.remote().future().result(timeout)
        except TimeoutError:
            raise TransferTimeoutError(f"Ray gave no coordinator in {timeout:.0f} s", phase="join") from None
        except (ray.exceptions.RayError, ValueError) as error:  # the latter: the name was freed in that moment
            cause = getattr(error, "cause", None)
            if isinstance(cause, TensorLinkError):
                raise cause from None
            raise PeerLostError(f"Ray's actor {actor_name(settings)}: {error}", phase="join") from None
        return place


def _cluster(context: Any) -> tuple[str, str]:
    return context.get_node_id(), context.get_job_id()


def _peer_name(context: Any, in_driver: bool) -> str:
    """`driver-01000000` by the job, for several may share a namespace; an actor's name, or `Class-1a2b3c4d` by its id, both of
    which a restart keeps; `function-1a2b3c4d` for tasks, by their worker, which runs many."""
    if in_driver:
        return f"driver-{context.get_job_id()}"
    function = (context.get_task_function_name() or "").split(".")
    actor = context.get_actor_id()
    if actor is None:
        return f"{function[-1] or 'task'}-{context.get_worker_id()[:_SHORT]}"
    kind = function[-2] if len(function) > 1 else "actor"
    return context.get_actor_name() or f"{kind}-{actor[:_SHORT]}"


def actor_name(settings: Settings) -> str:
    return f"coordinator:{settings.namespace}"


def actor_namespace(ray: Any) -> str:
    """Where the coordinator's actor is for those of this process's Ray namespace: not among the user's own actors."""
    return f"tensorlink:{ray.get_runtime_context().namespace}"


def start(settings: Settings, **options: Any) -> Any:
    """The handle of the coordinator's actor, which is made if there is none; `options` are Ray's. Blocks until Ray has its name,
    not until it runs."""
    import ray

    if settings.token is None and not settings.tls_cert:
        settings = replace(settings, token=secrets.token_hex(32))
    chosen: dict[str, Any] = {
        "name": actor_name(settings),
        "namespace": actor_namespace(ray),
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "scheduling_strategy": _at_the_head(ray),
    }
    # A restart uses the same arguments, so the token stays.
    return ray.remote(TensorLinkCoordinator).options(**{**chosen, **options}).remote(settings)


def _at_the_head(ray: Any) -> Any:
    """The node that no autoscaler takes away, and whose end is the cluster's; said outright, since else a placement group of the
    caller might take the actor in, and end it."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    heads = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD in node["Resources"]]
    return NodeAffinitySchedulingStrategy(heads[0], soft=True) if heads else "DEFAULT"


class TensorLinkCoordinator:
    """The actor. A process of its own, so no tensor and no Python of a peer can delay it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._serving: asyncio.Task[None] | None = None
        self._address: asyncio.Future[str] | None = None

    async def place(self) -> Place:
        """Where it listens: begins to at the first call. Raises: what `hosted.serve` does."""
        if self._address is None:
            self._address = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._address))
        return Place(await asyncio.shield(self._address), self._settings.token)

    async def _serve(self, address: asyncio.Future[str]) -> None:
        import ray

        from tensorlink.control import hosted  # nobody else needs the service

        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        try:
            await hosted.serve(self._settings, host, address.set_result, grace_s=GRACE_S)
        except Exception as error:
            if address.done():
                raise
            self._address = None
            address.set_exception(error)
            return
        ray.kill(ray.get_runtime_context().current_actor)  # by itself: Ray starts it no more, and frees the name
