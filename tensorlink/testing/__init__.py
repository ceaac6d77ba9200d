"""The contract suite of transports, for ours and for other people's.

A transport is tested by a subclass of `TransportContract` that says how connected pairs are made:

    class TestMine(TransportContract):
        transport = "mine"

        @classmethod
        def make_pairs(cls) -> PairMaker:
            return TwoProcesses("mine")

`tensorlink.testing.faults` has a relay that hurts the connections which pass through it.

Needs pytest, numpy and hypothesis.
"""

import pytest

pytest.register_assert_rewrite("tensorlink.testing.data", "tensorlink.testing.ends")

from tensorlink.testing.contract import TransportContract  # noqa: E402
from tensorlink.testing.pairs import OneProcess, Pair, PairMaker, Side, TwoProcesses, eventually  # noqa: E402

__all__ = ["OneProcess", "Pair", "PairMaker", "Side", "TransportContract", "TwoProcesses", "eventually"]
