"""The contract suite of transports, for ours and for other people's.

A transport is tested by a subclass of `TransportContract` that says how connected pairs are made:

    class TestMine(TransportContract):
        transport = "mine"

        @classmethod
        def make_pairs(cls) -> PairMaker:
            return TwoProcesses("mine")

`FaultsContract`, subclassed in the same way, tries it under faults: of a wrapper around it, and of a relay that its connections
pass through. `tensorlink.testing.faults` has both.

Needs pytest, numpy and hypothesis.
"""

import pytest

pytest.register_assert_rewrite("tensorlink.testing.data", "tensorlink.testing.ends", "tensorlink.testing.underfaults")

from tensorlink.testing.contract import TransportContract  # noqa: E402
from tensorlink.testing.pairs import OneProcess, Pair, PairMaker, Side, TwoProcesses, eventually  # noqa: E402
from tensorlink.testing.underfaults import FaultsContract  # noqa: E402

__all__ = [
    "FaultsContract",
    "OneProcess",
    "Pair",
    "PairMaker",
    "Side",
    "TransportContract",
    "TwoProcesses",
    "eventually",
]
