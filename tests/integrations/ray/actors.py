"""The actor of these tests: it runs what it is told. Workers import it from here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray
import torch

import tensorlink as tl
from tensorlink import _core
from tensorlink.integrations.ray import register

register()

kept: dict[str, Any] = {}


@ray.remote(num_cpus=0)
class Actor:
    """Runs functions, and hands on their results by TensorLink (`make`) or by Ray (`call`)."""

    @ray.method(tensor_transport="tensorlink")
    def make(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def total(self, *values: Any, also: Any = None) -> float:
        """The sum of all tensors in the values."""
        return float(sum(tensor.double().sum() for value in [*values, also] for tensor in tensors_in(value)))


class Reader:
    """What a driver of its own makes an actor of."""

    def total(self, value: torch.Tensor) -> float:
        return float(value.sum())


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []


def pool() -> dict[str, Any]:
    return tl.stats()["pool"]  # type: ignore[no-any-return]


def ranged(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float64)


def put(function: Callable[..., Any], *args: Any) -> list[ray.ObjectRef[Any]]:
    return [ray.put(function(*args), _tensor_transport="tensorlink")]


def keep(value: torch.Tensor) -> torch.Tensor:
    kept["value"] = value
    return value


def add_to_kept(number: float) -> None:
    kept["value"].add_(number)


def fail() -> None:
    raise KeyError("of the user's own")


def many(count: int) -> dict[str, torch.Tensor]:
    tensors = {f"layer.{i}": torch.full((8, 8), float(i)) for i in range(count)}
    return {**tensors, "tied": tensors["layer.1"]}


def odd() -> dict[str, torch.Tensor]:
    """Tensors that aren't plain."""
    grid = torch.arange(12.0).reshape(3, 4)
    return {
        "transposed": grid.t(),
        "every other": grid[:, ::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "of a parameter": torch.nn.Parameter(torch.ones(3)) * 2,
        "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "0-d": torch.tensor(5),
        "empty": torch.empty(0, 3),
    }


def stored() -> int:
    """How many objects Ray's own store for direct transport has here."""
    store = ray._private.worker.global_worker.rdt_manager.rdt_store
    return store.get_num_objects()  # type: ignore[no-any-return]


def pid() -> int:
    return os.getpid()


def arm(plan: str) -> None:
    _core.arm_points(plan)


def knows(name: str) -> bool:
    return any(peer.name == name for peer in tl.peers())
