"""`tcp`: two processes, or two endpoints of one process, over loopback."""

from tensorlink.testing import OneProcess, PairMaker, TransportContract, TwoProcesses


class TestTcp(TransportContract):
    transport = "tcp"

    @classmethod
    def make_pairs(cls) -> PairMaker:
        return TwoProcesses("tcp")


class TestTcpInOneProcess(TransportContract):
    transport = "tcp"

    @classmethod
    def make_pairs(cls) -> PairMaker:
        return OneProcess("tcp")
