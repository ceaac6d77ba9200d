"""Where the coordinator is, told by somebody else: waited for, followed when it moves, given up when that one says so."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorlink as tl
from tensorlink import rendezvous
from tensorlink.control import Hosted
from tensorlink.endpoint import open_endpoint
from tensorlink.errors import AuthenticationError, ClosedError, PeerLostError, TransportError
from tensorlink.rendezvous import Place, Rendezvous
from tensorlink.settings import Settings
from tests.control.control_processes import eventually

TOKEN = "a secret of these tests"
SETTINGS = Settings(token=TOKEN, lease_s=2.0, timeout=20.0)


class Board(Rendezvous):
    """What it tells is what is written on it."""

    name = "board"

    def __init__(self, name: str, places: list[Place | Exception]) -> None:
        super().__init__(name, {"rack": "r1", "zone": "z1"})
        self.places = places
        self.looks = 0
        self.looked = threading.Event()

    def look(self, settings: Settings, timeout: float) -> Place:
        self.looks += 1
        self.looked.set()
        if not self.places:
            raise PeerLostError("nothing is written yet")
        place = self.places[-1]
        if isinstance(place, Exception):
            raise place
        return place


class Coordinators:
    """Real ones, each in its process."""

    def __init__(self) -> None:
        self.hosted: list[Hosted] = []

    def start(self) -> Place:
        self.hosted.append(Hosted(SETTINGS, "127.0.0.1", 20.0))
        return Place(self.hosted[-1].address, TOKEN)

    def kill(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not self.pids(), "the coordinators are dead")

    @staticmethod
    def pids() -> list[int]:
        """Those that this process started."""
        mine = str(os.getpid()).encode()
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _hosted(entry, mine)]


def _hosted(process: Path, starter: bytes) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"tensorlink.control.hosted" in words and starter in words


@pytest.fixture
def coordinators() -> Iterator[Coordinators]:
    started = Coordinators()
    yield started
    for hosted in started.hosted:
        hosted.release()
    started.kill()


@pytest.fixture
def join() -> Iterator[Callable[[Rendezvous], tl.Endpoint]]:
    opened: list[tl.Endpoint] = []

    def start(met: Rendezvous, settings: Settings = SETTINGS) -> tl.Endpoint:
        opened.append(open_endpoint(None, settings, None, met))
        return opened[-1]

    yield start
    for endpoint in opened:
        endpoint.shutdown()


def exchange(one: tl.Endpoint, other: tl.Endpoint) -> None:
    one.send(np.arange(3), other.name)
    assert other.recv(one.name, timeout=20).tolist() == [0, 1, 2]


def test_peers_meet_where_they_are_told_to(
    coordinators: Coordinators, join: Callable[..., tl.Endpoint], runtime_dir: Path
) -> None:
    place = coordinators.start()
    one, other = join(Board("one", [place])), join(Board("other", [place]))
    exchange(one, other)
    assert one.name == "one" and one.peers()[0].labels == {"rack": "r1", "zone": "z1"}


def test_what_the_user_set_counts_before_what_is_told(join: Callable[..., tl.Endpoint]) -> None:
    board = Board("one", [ClosedError("nobody may ask")])
    one = join(board, Settings(coordinator=_embedded(), labels={"zone": "mine"}))
    assert board.looks == 0
    assert one.peers()[0].labels == {"rack": "r1", "zone": "mine"}


def _embedded() -> str:
    from tensorlink.control.embedded import find_or_start

    return f"unix:{find_or_start('default', token=None, lease_s=5.0, timeout=20.0)}"


def test_a_place_that_is_not_known_yet_is_waited_for(
    coordinators: Coordinators, join: Callable[..., tl.Endpoint]
) -> None:
    board = Board("one", [])
    thread = threading.Thread(target=lambda: join(board))
    thread.start()
    assert board.looked.wait(20)
    board.places.append(coordinators.start())
    thread.join(20)
    assert not thread.is_alive() and board.looks > 1


def test_the_wait_ends_at_the_deadline_and_says_why() -> None:
    with pytest.raises(PeerLostError, match="nothing is written yet.*TENSORLINK_RENDEZVOUS=none"):
        Board("one", []).find(SETTINGS, 0.1)


def test_close_ends_the_wait() -> None:
    board = Board("one", [])
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            board.find(SETTINGS, 60)
        except ClosedError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert board.looked.wait(20)
    board.close()
    thread.join(20)
    assert failed


def test_a_coordinator_that_comes_back_elsewhere_is_followed(
    coordinators: Coordinators, join: Callable[..., tl.Endpoint]
) -> None:
    places: list[Place | Exception] = [coordinators.start()]
    one, other = join(Board("one", places)), join(Board("other", places))
    before = one.id, other.id
    coordinators.kill()
    places.append(coordinators.start())
    late = join(Board("late", places))
    exchange(late, one)  # known to the new one, so all have joined that
    exchange(other, late)
    assert (one.id, other.id) == before


def test_an_environment_that_has_ended_closes_the_endpoint(
    coordinators: Coordinators, join: Callable[..., tl.Endpoint]
) -> None:
    places: list[Place | Exception] = [coordinators.start()]
    one = join(Board("one", places))
    places.append(ClosedError("it was shut down"))
    coordinators.kill()
    eventually(lambda: one.closed, "the endpoint is closed")
    with pytest.raises(ClosedError):
        one.put(np.arange(3))


def test_another_token_is_refused(coordinators: Coordinators, join: Callable[..., tl.Endpoint]) -> None:
    place = coordinators.start()
    with pytest.raises(AuthenticationError):
        join(Board("one", [Place(place.coordinator, "another one")]), Settings(timeout=20.0))


class TestHosted:
    def test_it_goes_after_its_last_peer(self, coordinators: Coordinators, join: Callable[..., tl.Endpoint]) -> None:
        one = join(Board("one", [coordinators.start()]))
        coordinators.hosted[0].release()
        assert coordinators.pids()
        one.shutdown()
        eventually(lambda: not coordinators.pids(), "it has gone")

    def test_it_goes_with_a_starter_that_is_killed(
        self, coordinators: Coordinators, join: Callable[..., tl.Endpoint]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        starter = context.Process(target=_hold, args=(theirs,))
        starter.start()
        address = ours.recv()
        one = join(Board("one", [Place(address, TOKEN)]))
        pid = starter.pid
        starter.kill()
        starter.join()
        eventually(lambda: not any(_hosted(entry, str(pid).encode()) for entry in Path("/proc").glob("[0-9]*")), "gone")
        assert not one.closed

    def test_where_it_cannot_listen_it_says_why(self) -> None:
        with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.200"):
            Hosted(SETTINGS, "192.0.2.200", 20.0)


def _hold(pipe: Any) -> None:
    hosted = Hosted(SETTINGS, "127.0.0.1", 20.0)
    pipe.send(hosted.address)
    signal.pause()


class TestDetect:
    def test_nothing_is_there(self) -> None:
        assert rendezvous.detect(None) is None
        assert rendezvous.detect("none") is None

    def test_what_is_asked_for_must_be_installed(self) -> None:
        with pytest.raises(ValueError, match="no rendezvous 'slurm' is installed; there are: none, ray, torchrun"):
            rendezvous.detect("slurm")

    def test_what_is_asked_for_must_be_there(self) -> None:
        with pytest.raises(ValueError, match="doesn't run in ray"):
            rendezvous.detect("ray")

    def test_settings(self) -> None:
        loaded = Settings.load({"TENSORLINK_LABELS": "rack=r7, zone = b", "TENSORLINK_RENDEZVOUS": "none"})
        assert loaded.labels == {"rack": "r7", "zone": "b"} and loaded.rendezvous == "none"
