"""Those that are compared. Each joins two processes, a near one and a far one, and moves objects both ways."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import tensorlink as tl

GIB = 1 << 30
TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Meeting:
    """What both processes know, so that their contenders find each other. Made by the near one, pickled for the far one."""

    rendezvous: str
    """URL of Gloo's store: a file that exists for nobody yet, or an address where nobody listens."""
    to_near: Any
    to_far: Any
    """Queues of torch.multiprocessing, or None."""
    pool_bytes: int = 6 * GIB


class Contender(ABC):
    """One end. `like` in `recv` is an object of the shape that comes: some must know it beforehand."""

    name: ClassVar[str]

    def __init__(self, meeting: Meeting, near: bool) -> None:
        self.meeting = meeting
        self.near = near

    @abstractmethod
    def send(self, obj: Any) -> None:
        """Blocks until `obj` may be changed, as far as this contender can tell."""

    @abstractmethod
    def recv(self, like: Any) -> Any:
        """The next object, in whatever memory this contender likes best."""

    @abstractmethod
    def recv_into(self, out: Any) -> None:
        """The next object, into memory of the caller's."""

    def close(self) -> None:  # noqa: B027 - most have nothing to leave
        """Leaves."""


class TensorLink(Contender):
    name = "tensorlink"

    def __init__(self, meeting: Meeting, near: bool) -> None:
        super().__init__(meeting, near)
        me, self.other = ("bench-near", "bench-far") if near else ("bench-far", "bench-near")
        self.link = tl.init(me, pool_bytes=meeting.pool_bytes, namespace="bench", timeout=TIMEOUT_S)

    def send(self, obj: Any) -> None:
        tl.send(obj, self.other)

    def recv(self, like: Any) -> Any:
        return tl.recv(self.other)

    def recv_into(self, out: Any) -> None:
        tl.recv(self.other, out=out)

    def close(self) -> None:
        tl.shutdown()


class Gloo(Contender):
    name = "gloo"

    def __init__(self, meeting: Meeting, near: bool) -> None:
        super().__init__(meeting, near)
        self.other = 1 if near else 0
        dist.init_process_group("gloo", init_method=meeting.rendezvous, rank=0 if near else 1, world_size=2)

    def send(self, obj: Any) -> None:
        for tensor in _leaves(obj):
            dist.send(tensor, self.other)

    def recv(self, like: Any) -> Any:
        if isinstance(like, dict):
            return {key: self.recv(value) for key, value in like.items()}
        made = torch.empty_like(like)
        dist.recv(made, self.other)
        return made

    def recv_into(self, out: Any) -> None:
        for tensor in _leaves(out):
            dist.recv(tensor, self.other)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the other end may be gone already
            dist.destroy_process_group()


class Queue(Contender):
    """torch.multiprocessing: a tensor in shared memory travels as a file descriptor.

    A private tensor is first copied into new shared memory, as `Tensor.share_memory_` does. Sending a tensor that is
    shared already would be cheaper, and another thing: the receiver then sees what the sender does to it later.
    """

    name = "mp queue"

    def send(self, obj: Any) -> None:
        queue = self.meeting.to_far if self.near else self.meeting.to_near
        queue.put(_shared(obj))

    def recv(self, like: Any) -> Any:
        queue = self.meeting.to_near if self.near else self.meeting.to_far
        return queue.get(timeout=TIMEOUT_S)

    def recv_into(self, out: Any) -> None:
        out.copy_(self.recv(out))


def _leaves(obj: Any) -> list[torch.Tensor]:
    return list(obj.values()) if isinstance(obj, dict) else [obj]


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.UntypedStorage._new_shared(tensor.nbytes)  # type: ignore[no-untyped-call]
    made = torch.empty(0, dtype=tensor.dtype).set_(storage)
    return made.view(tensor.shape).copy_(tensor)


KINDS: tuple[type[Contender], ...] = (TensorLink, Gloo, Queue)
