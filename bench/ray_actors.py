"""Two Ray actors and the ways in which a value gets from one to the other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray.experimental.collective import create_collective_group

import tensorlink as tl
from bench.measure import each
from tensorlink.integrations import ray as tlray

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20

tlray.register()  # before the class: Ray looks the name up when it meets it; and in each worker that imports this module

VALUES: dict[str, Callable[[], Any]] = {
    "1 KiB": lambda: torch.arange(256, dtype=torch.float32),
    "1 MiB": lambda: torch.arange(MIB // 4, dtype=torch.float32),
    "256 MiB": lambda: torch.arange(64 * MIB, dtype=torch.float32),
    "state dict, 300 tensors, 75 MiB": lambda: {f"layer.{i}": torch.full((256, 256), float(i)) for i in range(300)},
}


@ray.remote(num_cpus=0)
class Actor:
    """Either end."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._value: Any = None
        self._name = ""

    def plain(self, name: str) -> Any:
        if name != self._name:
            self._name, self._value = name, VALUES[name]()
        return self._value

    @ray.method(tensor_transport="tensorlink")
    def by_tensorlink(self, name: str) -> Any:
        return self.plain(name)

    @ray.method(tensor_transport="gloo")
    def by_gloo(self, name: str) -> Any:
        return self.plain(name)

    @ray.method(tensor_transport="nixl")
    def by_nixl(self, name: str) -> Any:
        return self.plain(name)

    def handle(self, name: str) -> tl.TensorRef:
        return tlray.endpoint().put(self.plain(name), reads=1)

    def read(self, value: Any) -> float:
        """Looks at each page, so that whoever has mapped memory only pays for it here."""
        tensors = value.values() if isinstance(value, dict) else [value]
        return float(sum(tensor.view(-1)[::1024].sum() for tensor in tensors))

    def read_handle(self, handle: tl.TensorRef) -> float:
        return self.read(tlray.endpoint().get(handle))


class Pair:
    """A source and a destination, in a Ray of their own."""

    def __init__(self, folder: Path) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=1 << 30,
            log_to_driver=False,
            _temp_dir=str(folder),
            runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
        )

        self.source, self.target = Actor.remote(), Actor.remote()  # type: ignore[attr-defined]
        create_collective_group([self.source, self.target], backend="gloo")

    def milliseconds(self, way: str, name: str, repeats: int) -> float:
        """Median time from asking the source until the target has looked at all of it."""
        make = getattr(self.source, way)
        read = self.target.read_handle if way == "handle" else self.target.read
        return each(lambda: ray.get(read.remote(make.remote(name))), repeats) * 1e3

    def close(self) -> None:
        ray.shutdown()
