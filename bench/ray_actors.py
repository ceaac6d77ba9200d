"""Two Ray actors and the ways in which a value gets from one to the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray.experimental.collective import create_collective_group
from ray.experimental.rdt import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
)
from ray.experimental.rdt.tensor_transport_manager import FetchRequest

import tensorlink as tl
from bench.measure import each
from tensorlink.integrations import ray as tlray

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20


class Nothing(TensorTransportManager):
    """A transport that moves nothing: what a value costs by it, direct transport itself costs."""

    def tensor_transport_backend(self) -> str:
        return "NOTHING"

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> TensorTransportMetadata:
        return TensorTransportMetadata([(tuple(tensor.shape), tensor.dtype) for tensor in rdt_object], "cpu")

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any, target_buffers: Any = None
    ) -> list[Any]:
        return [torch.empty(shape, dtype=dtype) for shape, dtype in tensor_transport_metadata.tensor_meta]

    def fetch_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any, target_buffers: Any = None
    ) -> Any:
        return FetchRequest(
            obj_id, self.recv_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata)
        )

    def wait_fetch_complete(self, fetch_request: Any, timeout: float = -1) -> Any:
        return fetch_request.tensors

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise NotImplementedError

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: Any) -> None:
        pass

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        pass


register_tensor_transport("nothing", ["cpu"], Nothing, torch.Tensor)
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

    @ray.method(tensor_transport="nothing")
    def by_nothing(self, name: str) -> Any:
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


def lend_nixl(folder: Path) -> str | None:
    """Makes `folder` a place on the search path that has NIXL and nothing else of the interpreter `BENCH_NIXL_PYTHON`, which
    needs no Ray nor torch. Returns why actors can't have it; None: they can."""
    python = os.environ.get("BENCH_NIXL_PYTHON", sys.executable)
    asked = "import nixl, sys; print(sys.version_info[:2]); print(nixl.__file__)"
    done = subprocess.run([python, "-P", "-c", asked], capture_output=True, text=True, timeout=60)
    if done.returncode:
        return f"no NIXL in Ray: {python} has no `nixl` (BENCH_NIXL_PYTHON names another interpreter)"
    version, file = done.stdout.splitlines()
    if version != str(sys.version_info[:2]):
        return f"no NIXL in Ray: {python} is another version of Python than this one"
    folder.mkdir()
    for package in Path(file).parent.parent.glob("nixl*"):
        (folder / package.name).symlink_to(package)
    return None


class Pair:
    """A source and a destination, in a Ray of their own."""

    def __init__(self, folder: Path) -> None:
        lent = folder.with_name("nixl")
        self.without_nixl = lend_nixl(lent)
        """Why NIXL takes no part; None: it does."""
        # NIXL last: tensorlink and what else the user has there come before it.
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH"), str(lent)]))
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
