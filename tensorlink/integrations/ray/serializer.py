"""Keeps what Ray does to the serialization of torch tensors to the values that travel by a tensor transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray import cloudpickle
from ray._private import tensor_serialization_utils

_Reducer = Callable[[Any], Any]


def confine() -> None:
    """From now on tensors in other values of this process are serialized as if no tensor transport were there.

    Once a process has stored one value for a tensor transport, Ray serializes every torch tensor by a function of its own, which
    pickles it twice. Idempotent; does nothing where Ray's internals aren't those that are known.
    """
    import torch

    table = cloudpickle.CloudPickler.dispatch
    rays = table.get(torch.Tensor)
    if rays is None or isinstance(rays, _Confined):
        return
    worker: Any = ray._private.worker.global_worker
    context = worker.get_serialization_context()
    state = getattr(context, "_thread_local", None)
    if hasattr(state, "use_external_transport"):
        zero_copy = getattr(context, "_zero_copy_tensors_enabled", False)
        plain = tensor_serialization_utils.zero_copy_tensors_reducer if zero_copy else _reduced
        table[torch.Tensor] = _Confined(rays, plain, state)


def _reduced(tensor: Any) -> Any:
    return tensor.__reduce_ex__(5)


class _Confined:
    """Ray's reducer while a thread serializes for a tensor transport, the one of before otherwise."""

    def __init__(self, rays: _Reducer, plain: _Reducer, state: Any) -> None:
        self._rays = rays
        self._plain = plain
        self._state = state

    def __call__(self, tensor: Any) -> Any:
        external = getattr(self._state, "use_external_transport", False)
        return (self._rays if external else self._plain)(tensor)
