"""Tensors that aren't in host memory: the pool has a copy of them there, and readers copy it onto their device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensorlink.endpoint import Endpoint
from tensorlink.errors import LayoutMismatchError
from tensorlink.types import TensorRef

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64


def put_copied(endpoint: Endpoint, tensors: Sequence[torch.Tensor]) -> TensorRef:
    """A handle of a snapshot of `tensors`, whatever devices they lie on, copied straight into one block of the pool.

    Waits for all streams of their devices: the tensors may have been made on any. Raises: PoolExhaustedError.
    """
    import torch

    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    ends, offset = [], 0
    for tensor in tensors:
        offset += -offset % _ALIGNMENT
        ends.append((offset, offset := offset + tensor.numel() * tensor.element_size()))
    block = endpoint.empty(offset, torch.uint8)
    copies = []
    for tensor, (begin, end) in zip(tensors, ends, strict=True):
        copies.append(block[begin:end].view(tensor.dtype).view(tensor.shape))
        copies[-1].copy_(tensor.detach())
    return endpoint.put(copies, copy=False)


def moved(tensors: Sequence[torch.Tensor], device: str) -> list[torch.Tensor]:
    """The tensors on the current device of that kind. Raises: LayoutMismatchError: this process has none."""
    import torch

    if device == "cpu":
        return list(tensors)
    if not torch.cuda.is_available():
        raise LayoutMismatchError(
            f"the tensors lie on {device}, and this process has no such device",
            hint='Give the actor num_gpus, or call ray.experimental.set_target_device_for_ref(ref, "cpu") before ray.get',
        )
    return [tensor.to(device) for tensor in tensors]
