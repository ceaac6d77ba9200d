"""Two processes that every contender joins, once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.multiprocessing

from bench.contenders import KINDS, Contender, Meeting
from bench.far import FarProcess


class Bench:
    """Both ends of all contenders."""

    def __init__(self, meeting: Meeting) -> None:
        self.far = FarProcess(meeting)
        self.ends: dict[str, Contender] = {kind.name: kind(meeting, near=True) for kind in KINDS}

    def close(self) -> None:
        self.far.close()
        for end in self.ends.values():
            end.close()


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    context = torch.multiprocessing.get_context("spawn")
    folder: Path = tmp_path_factory.mktemp("bench")
    made = Bench(Meeting(f"file://{folder}/gloo", to_near=context.Queue(), to_far=context.Queue()))
    yield made
    made.close()
