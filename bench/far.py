"""The far process: it does what the near one orders, by name, while that one measures."""

from __future__ import annotations

import multiprocessing.connection
import traceback
from typing import Any

import torch
import torch.multiprocessing

import tensorlink as tl
from bench.contenders import KINDS, Contender, Meeting

TOKEN = torch.zeros(1)  # what acknowledges a receipt


class Far:
    """Runs in the far process; each method is an order, and says what is sent to the near one meanwhile."""

    def __init__(self, meeting: Meeting) -> None:
        self.ends: dict[str, Contender] = {kind.name: kind(meeting, near=False) for kind in KINDS}
        self.kept: list[tl.TensorRef] = []

    def echo(self, name: str, like: Any, count: int, into: bool) -> None:
        """Sends back what comes."""
        end = self.ends[name]
        out = torch.zeros_like(like) if into else None
        for _ in range(count):
            if into:
                end.recv_into(out)
            else:
                out = end.recv(like)
            end.send(out)

    def sink(self, name: str, like: Any, count: int, into: bool) -> None:
        """Takes what comes, and acknowledges each."""
        end = self.ends[name]
        out = _zeros_like(like) if into else None
        for _ in range(count):
            got = end.recv_into(out) if into else end.recv(like)
            end.send(TOKEN)
            del got

    def put(self, nbytes: int) -> bytes:
        """A handle of a float32 tensor that lies in the pool of this process, filled with ones."""
        tensor = tl.empty((nbytes // 4,), torch.float32)
        tensor.fill_(1.0)
        self.kept.append(tl.put(tensor, copy=False))
        return self.kept[-1].to_bytes()

    def drop(self) -> None:
        """Releases what `put` made."""
        for ref in self.kept:
            ref.release()
        self.kept.clear()


def _zeros_like(like: Any) -> Any:
    if isinstance(like, dict):
        return {key: torch.zeros_like(value) for key, value in like.items()}
    return torch.zeros_like(like)


def serve(orders: multiprocessing.connection.Connection, meeting: Meeting) -> None:
    """Body of the process: until the pipe ends."""
    far = Far(meeting)
    while True:
        try:
            order, arguments = orders.recv()
        except EOFError:
            break
        try:
            orders.send((True, getattr(far, order)(*arguments)))
        except Exception:
            orders.send((False, traceback.format_exc()))
    for end in far.ends.values():
        end.close()


class FarProcess:
    """The near process's view of it."""

    def __init__(self, meeting: Meeting) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, meeting), name="bench-far")
        self._process.start()
        theirs.close()

    def start(self, order: str, *arguments: Any) -> None:
        """Orders, and goes on. `result` must be called before the next order."""
        self._orders.send((order, arguments))

    def result(self) -> Any:
        """What the last order gave. Raises: RuntimeError with its traceback."""
        good, value = self._orders.recv()
        if not good:
            raise RuntimeError(f"the far process failed:\n{value}")
        return value

    def call(self, order: str, *arguments: Any) -> Any:
        self.start(order, *arguments)
        return self.result()

    def close(self) -> None:
        self._orders.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
