"""Actors of the tests inside Ray."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np

import tensorlink as tl


class Member:
    """An actor that has joined with no arguments."""

    def __init__(self) -> None:
        tl.init()

    def me(self) -> tl.PeerId:
        return tl.current().id

    def again(self) -> tl.PeerId:
        return tl.init().id

    def pid(self) -> int:
        return os.getpid()

    def token(self) -> str | None:
        return tl.current().settings.token

    def labels(self) -> dict[str, str]:
        mine = next(peer for peer in tl.peers() if peer.name == tl.current().name)
        return dict(mine.labels)

    def peers(self) -> set[str]:
        return {peer.name for peer in tl.peers()}

    def put(self, count: int) -> dict[str, Any]:
        """A handle, nested."""
        return {"deep": [tl.put(np.arange(count))]}

    def get(self, ref: Any = None, *, nested: Any = None) -> int:
        return int(tl.get(ref if nested is None else nested["deep"][0]).sum())

    def send(self, to: str, value: int) -> None:
        tl.send(np.full(3, value), to)

    def recv(self, source: str, timeout: float = 20.0) -> list[int]:
        got: list[int] = tl.recv(source, timeout=timeout).tolist()
        return got

    def fail(self, kind: str, fields: dict[str, Any]) -> None:
        raise getattr(tl, kind)("it failed", **fields)

    def leave(self) -> None:
        tl.shutdown()


class AsyncMember:
    async def sums(self, refs: list[tl.TensorRef]) -> list[int]:
        """Joins where an event loop runs, and reads all at once."""
        tl.init()
        return [int(got.sum()) for got in await asyncio.gather(*(_awaited(ref) for ref in refs))]


async def _awaited(ref: tl.TensorRef) -> Any:
    return await tl.iget(ref)
