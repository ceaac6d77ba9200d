"""From Ray's object store to TensorLink, the difference being four lines: `python examples/ray_rdt.py`.

It prints how long 64 MiB of weights take from one actor to another, in both ways.
"""

import time

import ray
import torch

from tensorlink.integrations.ray import register

register()  # 1: before the classes that name the transport


@ray.remote(num_cpus=0)
class Trainer:
    def __init__(self) -> None:
        self.weights = {f"layer.{i}": torch.randn(1024, 1024) for i in range(16)}

    def by_object_store(self) -> dict[str, torch.Tensor]:
        return self.weights

    @ray.method(tensor_transport="tensorlink")  # 2: the rest of the program stays as it is
    def by_tensorlink(self) -> dict[str, torch.Tensor]:
        return self.weights


@ray.remote(num_cpus=0, enable_tensor_transport=True)  # type: ignore[call-overload]  # 3: who receives needs this
class Worker:
    def use(self, weights: dict[str, torch.Tensor]) -> float:
        return float(sum(tensor.view(-1)[::1024].sum() for tensor in weights.values()))


def main() -> None:
    # 4: workers register it when they start, so that it is there after a restart too
    ray.init(num_cpus=2, runtime_env={"worker_process_setup_hook": "tensorlink.integrations.ray.register"})
    trainer, worker = Trainer.remote(), Worker.remote()  # type: ignore[attr-defined]
    for name in ("by_object_store", "by_tensorlink"):
        make = getattr(trainer, name)
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            ray.get(worker.use.remote(make.remote()))
            times.append(time.perf_counter() - begin)
        print(f"{name}: {sorted(times[1:])[2] * 1e3:.1f} ms")
    ray.shutdown()


if __name__ == "__main__":
    main()
