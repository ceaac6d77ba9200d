"""`local`: two endpoints of one process."""

from tensorlink.testing import OneProcess, PairMaker, TransportContract, TwoProcesses


class TestLocal(TransportContract):
    transport = "local"

    @classmethod
    def make_pairs(cls) -> PairMaker:
        return OneProcess("local")


def test_it_reaches_no_other_process() -> None:
    pairs = TwoProcesses("local")
    pair = pairs.pair(connected=False)
    near, far = pair.near.transport.address(), pair.far.facts()[1]
    assert pair.near.transport.reaches(near, far) == pair.near.transport.reaches(far, near) == "it is another process"
    pair.close()
    pairs.close()
