"""`shm`: two processes of one host, or two endpoints of one process."""

import json

from tensorlink.testing import FaultsContract, OneProcess, PairMaker, TransportContract, TwoProcesses


class TestShm(TransportContract):
    transport = "shm"

    @classmethod
    def make_pairs(cls) -> PairMaker:
        return TwoProcesses("shm")


class TestShmUnderFaults(FaultsContract):
    transport = "shm"

    @classmethod
    def make_pairs(cls) -> PairMaker:
        return TwoProcesses("shm")


class TestShmInOneProcess(TransportContract):
    transport = "shm"
    test_more_than_4_gib = None  # 40 s, and nothing in it that the processes would change

    @classmethod
    def make_pairs(cls) -> PairMaker:
        return OneProcess("shm")


def test_it_reaches_no_other_host() -> None:
    pair = OneProcess("shm").pair(connected=False)
    near = pair.near.transport.address()
    far = json.dumps({**json.loads(near), "host": "elsewhere"}).encode()
    assert pair.near.transport.reaches(near, far) == pair.near.transport.reaches(far, near) == "it is on another host"
    pair.close()
