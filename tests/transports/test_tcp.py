"""`tcp`: two processes, or two endpoints of one process, over loopback, and two hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from tensorlink.testing import FaultsContract, OneProcess, PairMaker, TransportContract, TwoProcesses
from tensorlink.transports.tcp import TcpAddress
from tests.hosts import Host, Network, networks
from tests.peer import nursery

__all__ = ["networks", "nursery"]

pytestmark = pytest.mark.usefixtures("nursery")  # from before this module, which must leave nothing behind


class TestTcp(TransportContract):
    transport = "tcp"

    @classmethod
    def make_pairs(cls) -> PairMaker:
        return TwoProcesses("tcp")


class TestTcpUnderFaults(FaultsContract):
    transport = "tcp"

    @classmethod
    def make_pairs(cls) -> PairMaker:
        return TwoProcesses("tcp")

    @classmethod
    def through(cls, address: bytes, relayed: Callable[[str, int], int]) -> bytes:
        told = TcpAddress.decode(address)
        return dataclasses.replace(told, port=relayed(told.host, told.port)).encode()


class TestTcpInOneProcess(TransportContract):
    transport = "tcp"
    test_more_than_4_gib = None  # a minute, and nothing in it that the processes would change

    @classmethod
    def make_pairs(cls) -> PairMaker:
        return OneProcess("tcp")


class TwoHosts(TwoProcesses):
    """This process is on one host as far as the network goes, the far one on the other."""

    def __init__(self, near: Host, far: Host) -> None:
        super().__init__("tcp")
        self.listen, self.far_listen = near.ip, far.ip
        self.prefix = far.command()


class TestTcpBetweenHosts(TransportContract):
    transport = "tcp"
    test_more_than_4_gib = None  # as above

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _hosts(cls, networks: Callable[[int], Network]) -> Iterator[None]:
        near, far = networks(2).hosts
        cls.pairs = TwoHosts(near, far)
        with near.inside():
            yield
            cls.pairs.close()

    @classmethod
    def setup_class(cls) -> None:
        """The hosts come from a fixture, which makes the pairs."""

    @classmethod
    def teardown_class(cls) -> None:
        """As above."""
