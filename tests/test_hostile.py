"""Peers that say and write what they like: the victim lives, drops only that connection, and goes on serving others."""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorlink import _core
from tensorlink.errors import CorruptTransferError, PeerLostError, TensorLinkError
from tensorlink.testing import eventually

KEY = bytes(range(16))
POOL = 64 << 20
HELLO, WELCOME, REFUSED, WANT, SEGMENT, NO_SEGMENT, FORGET, KICK, ACK, BYE = range(1, 11)
RING_AT_LEAST = 1 << 20
CORE = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass
class Peer:
    """An engine and where it listens."""

    name: str
    incarnation: int
    path: str
    engine: Any = field(init=False)

    def __post_init__(self) -> None:
        self.engine = _core.Engine(self.name, self.path, KEY, POOL)
        self.engine.start(self.incarnation)

    def connect(self, other: Peer) -> Any:
        return self.engine.connect(other.path, KEY, other.name, other.incarnation, 10.0)


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="tl", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def peers(folder: Path) -> Iterator[list[Any]]:
    """A victim, an honest peer, and the honest one's connection to the victim."""
    victim, honest = Peer("victim", 1, str(folder / "victim")), Peer("honest", 1, str(folder / "honest"))
    made = [victim, honest, honest.connect(victim)]
    yield made
    honest.engine.close()
    victim.engine.close()
    made.clear()


def serves(victim: Peer, honest: Peer, connection: Any) -> None:
    """The victim still takes messages and lets its memory be read."""
    assert connection.send({"number": 7}, "check") is None
    assert victim.engine.receive(victim.engine.source(honest.name), "check", 10.0, None, None) == {"number": 7}
    data = np.random.default_rng(1).integers(0, 256, 200_000, dtype=np.uint8)
    descriptor = victim.engine.expose(data.ctypes.data, data.nbytes)
    target = np.zeros_like(data)
    honest.engine.open(connection, descriptor, 10.0).copy_to(target.ctypes.data, None)
    assert (target == data).all()
    victim.engine.release(_core.claim_of(descriptor))


# Raw clients of the engine's socket


def note(kind: int, a: int = 0, b: int = 0, text: bytes = b"", version: int = 1) -> bytes:
    return struct.pack("<IIQQ", version, kind, a, b) + text


def memfd(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def dial(peer: Peer) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(10)
    made.connect(peer.path)
    return made


def say(client: socket.socket, data: bytes, fds: list[int] | None = None) -> None:
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    client.sendmsg([data], control)
    for fd in fds or []:
        os.close(fd)


def answer(client: socket.socket) -> tuple[int, bytes, list[int]]:
    """(kind, text, descriptors); kind 0: the connection was closed."""
    try:
        data, fds, _, _ = socket.recv_fds(client, 2048, 8)
    except ConnectionError:
        return 0, b"", []
    return (struct.unpack("<I", data[4:8])[0], data[24:], fds) if data else (0, b"", [])


def greeting(victim: Peer, name: bytes = b"evil", to: bytes | None = None, key: bytes = KEY) -> bytes:
    return key + name + b"\0" + (victim.name.encode() if to is None else to)


def sizes_of(victim: Peer) -> list[int]:
    """Sizes of the three descriptors that a connection exchanges: half, doorbell, control."""
    found = {}
    other = Peer("ruler", 1, victim.path + "-ruler")
    connection = other.connect(victim)
    for line in Path("/proc/self/maps").read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) .*memfd:tensorlink-(half|doorbell|control)", line)
        if match:
            found[match[3]] = int(match[2], 16) - int(match[1], 16)
    del connection
    other.engine.close()
    return [found["half"], found["doorbell"], found["control"]]


def test_greetings_that_are_wrong(peers: list[Any]) -> None:
    victim, honest, connection = peers
    half, bell, control = sizes_of(victim)

    def good_fds() -> list[int]:
        return [memfd(half), memfd(bell), memfd(control)]

    cases: list[tuple[bytes, list[int], int, bytes]] = [
        (note(HELLO, 1, 1, greeting(victim, key=b"\0" * 16)), good_fds(), REFUSED, b"key"),
        (note(HELLO, 1, 1, greeting(victim)[:10]), good_fds(), 0, b""),
        (note(HELLO, 1, 1, greeting(victim), version=2), good_fds(), REFUSED, b"version"),
        (note(HELLO, 1, 2, greeting(victim)), good_fds(), REFUSED, b"restarted"),
        (note(HELLO, 1, 1, greeting(victim, to=b"somebody")), good_fds(), REFUSED, b"restarted"),
        (note(HELLO, 1, 1, greeting(victim, name=b"")), good_fds(), REFUSED, b"greeting"),
        (note(HELLO, 1, 1, KEY + b"no end"), good_fds(), REFUSED, b"greeting"),
        (note(HELLO, 1, 1, greeting(victim)), [], 0, b""),
        (note(HELLO, 1, 1, greeting(victim)), [memfd(half), memfd(bell)], 0, b""),
        (note(HELLO, 1, 1, greeting(victim)), [*good_fds(), memfd(4096)], 0, b""),
        (note(HELLO, 1, 1, greeting(victim)), [*good_fds(), *good_fds()], REFUSED, b"length"),
        (note(HELLO, 1, 1, greeting(victim)), [memfd(half, 0), memfd(bell), memfd(control)], 0, b""),
        (note(HELLO, 1, 1, greeting(victim)), [memfd(4096), memfd(bell), memfd(control)], 0, b""),
        (note(HELLO, 1, 1, greeting(victim)), [os.open("/dev/null", os.O_RDWR) for _ in range(3)], 0, b""),
        (note(HELLO, 1, 1, greeting(victim)), [memfd(half, 0b1111), memfd(bell, 0b1111), memfd(control)], 0, b""),
        (note(KICK), [], REFUSED, b"greeting"),
        (note(99), [], REFUSED, b"greeting"),
        (b"x", [], REFUSED, b"length"),
        (note(HELLO, 1, 1, greeting(victim) + b"x" * 3000), good_fds(), REFUSED, b"length"),
    ]
    for data, fds, kind, why in cases:
        with dial(victim) as client:
            say(client, data, fds)
            got, text, sent = answer(client)
            assert (got, why in text) == (kind, True), data[:80]
            assert not sent
    serves(victim, honest, connection)
    with dial(victim) as client:  # and a right one, by the same means
        say(client, note(HELLO, 1, 1, greeting(victim)), good_fds())
        kind, _, fds = answer(client)
        assert (kind, len(fds)) == (WELCOME, 3)
        for fd in fds:
            os.close(fd)


def fds_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_flood_of_connections_that_say_nothing(peers: list[Any]) -> None:
    victim, honest, connection = peers
    before = fds_open()
    clients = []
    for _ in range(1000):
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            client.connect(victim.path)
            clients.append(client)
        except BlockingIOError:  # its queue is full: as good as refused
            client.close()
    serves(victim, honest, connection)
    for client in clients:
        client.close()
    third = Peer("third", 1, victim.path + "-third")
    serves(victim, third, third.connect(victim))
    third.engine.close()
    del third
    eventually(lambda: fds_open() <= before + 2, "the descriptors were closed")


def test_random_packets(peers: list[Any]) -> None:
    victim, honest, connection = peers

    @CORE
    @given(
        st.binary(max_size=200)
        | st.builds(note, st.integers(0, 12), text=st.binary(max_size=64).map(lambda b: KEY + b)),
        st.integers(0, 4),
    )
    def attempt(data: bytes, count: int) -> None:
        with dial(victim) as client:
            say(client, data, [memfd(4096) for _ in range(count)] if data else None)

    attempt()
    serves(victim, honest, connection)


def raw_connection(victim: Peer, incarnation: int) -> socket.socket:
    """A connection of a peer that is nothing but a socket."""
    client = dial(victim)
    say(client, note(HELLO, incarnation, 1, greeting(victim)), [memfd(n) for n in sizes_of(victim)])
    kind, _, fds = answer(client)
    assert kind == WELCOME
    for fd in fds:
        os.close(fd)
    return client


@pytest.mark.parametrize(
    ("data", "fds"),
    [
        (note(99), 0),
        (note(HELLO), 0),
        (note(SEGMENT, 5), 0),
        (note(SEGMENT, 5), 2),
        (b"", 0),
        (b"short", 0),
        (note(KICK, version=7), 0),
        (note(WANT, text=b"x" * 5000), 0),
    ],
    ids=["unknown", "second hello", "no fd", "two fds", "empty", "short", "version", "long"],
)
def test_bad_notes_end_only_their_connection(peers: list[Any], data: bytes, fds: int) -> None:
    victim, honest, connection = peers
    with raw_connection(victim, 1) as client:
        say(client, data, [memfd(4096) for _ in range(fds)])
        eventually(
            lambda: [c.peer_name for c in victim.engine.connections()] == [honest.name], "the connection was dropped"
        )
    serves(victim, honest, connection)


def test_good_notes_with_odd_numbers_are_harmless(peers: list[Any]) -> None:
    victim, honest, connection = peers
    client = raw_connection(victim, 1)
    chance = random.Random(1)
    for _ in range(2000):
        kind = chance.choice([WANT, NO_SEGMENT, FORGET, KICK, ACK])
        client.send(note(kind, chance.choice([0, 1, 2**32, 2**64 - 1, chance.getrandbits(64)]), chance.getrandbits(64)))
        if kind == WANT:
            assert answer(client)[0] == NO_SEGMENT
    serves(victim, honest, connection)
    client.close()


# Shared memory that its other owner writes while it is read


class Scribbler:
    """A native connection, and mappings of our own of the memory through which its two ends believe each other."""

    def __init__(self, folder: Path, victim: Peer, name: str) -> None:
        known: set[int] = set()
        for old in self._new_halves(known):
            old.close()
        self.peer = Peer(name, 1, str(folder / name))
        self.connection = self.peer.connect(victim)
        self.halves = self._new_halves(known)

    @staticmethod
    def _new_halves(known: set[int]) -> list[mmap.mmap]:
        """The halves of connections that this process has open; each end keeps the one that it made. Adds to `known` inodes."""
        found = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                path = f"/proc/self/fd/{number}"
                if "tensorlink-half" in os.readlink(path):
                    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                    inode = os.fstat(fd).st_ino
                    if inode not in known:
                        known.add(inode)
                        found.append(mmap.mmap(fd, 0))
                    os.close(fd)
        return found

    @staticmethod
    def path_of(half: mmap.mmap) -> str:
        """A descriptor that an engine of this process has of that half."""
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                path = f"/proc/self/fd/{number}"
                if "tensorlink-half" in os.readlink(path):
                    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                    with mmap.mmap(fd, 0) as other:
                        same = other[:] == half[:]
                    os.close(fd)
                    if same:
                        return path
        raise AssertionError("no engine has it")

    def scribble(self, chance: random.Random) -> None:
        """Random words, half of them near the headers of the rings."""
        for half in self.halves:
            ring = len(half) - RING_AT_LEAST - 4096
            for _ in range(200):
                at = chance.randrange(len(half) // 8) * 8 if chance.random() < 0.5 else ring + chance.randrange(600) * 8
                value = chance.choice([0, 8, 2**64 - 1, 2**32, chance.getrandbits(64), chance.randrange(1 << 21)])
                struct.pack_into("<Q", half, min(at, len(half) - 8), value)

    def close(self) -> None:
        self.peer.engine.close()
        for half in self.halves:
            half.close()


@pytest.mark.parametrize("seed", range(12))
def test_scribbling_over_rings_and_holds(folder: Path, peers: list[Any], seed: int) -> None:
    victim, honest, connection = peers
    evil = Scribbler(folder, victim, "evil")
    assert len(evil.halves) == 2
    chance = random.Random(seed)
    for _ in range(5):
        evil.scribble(chance)
        try:
            evil.connection.send({"x": np.zeros(100)}, "noise")
        except TensorLinkError:
            break
        with contextlib.suppress(TensorLinkError, TypeError):
            victim.engine.receive(victim.engine.source("evil"), "noise", 0.0, None, None)
    for back in [c for c in victim.engine.connections() if c.peer_name == "evil"]:
        try:
            back.send({"x": 1}, "reply")
        except TensorLinkError as error:
            assert isinstance(error, PeerLostError)
    victim.engine.sweep()
    victim.engine.usage()
    serves(victim, honest, connection)
    evil.close()
    serves(victim, honest, connection)


def test_a_peer_that_writes_for_ever_starves_nobody(folder: Path, peers: list[Any]) -> None:
    victim, honest, connection = peers
    evil = Scribbler(folder, victim, "evil")
    stop = threading.Event()

    def scribble() -> None:
        chance = random.Random(3)
        while not stop.is_set():
            evil.scribble(chance)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(20):
            start = time.monotonic()
            serves(victim, honest, connection)
            assert time.monotonic() - start < 5
    finally:
        stop.set()
        thread.join()
    evil.close()


FLOOD = """
import mmap, sys
fd, tail, head = map(int, sys.argv[1:])
words = memoryview(mmap.mmap(fd, 0)).cast("Q")  # whole words: struct writes byte by byte
print("flooding", flush=True)
while True:
    words[tail // 8] = words[head // 8] // 64 * 64 + (1 << 19)
"""


def ring_word(ring: mmap.mmap, at: int) -> int:
    with memoryview(ring).cast("Q") as words:
        return int(words[at // 8])


def test_a_flood_of_valid_messages_starves_nobody(folder: Path, peers: list[Any]) -> None:
    """The ring never empties: it is full of messages that came before, and its tail runs ahead of every read."""
    victim, honest, connection = peers
    evil = Scribbler(folder, victim, "evil")
    tag = "d" * 24
    assert evil.connection.send(None, tag) is None
    assert victim.engine.receive(victim.engine.source("evil"), tag, 10.0, None, None) is None
    ring = next(half for half in evil.halves if half.find(tag.encode()) >= 0)
    data = ring.find(tag.encode()) - 40  # after the length and the header of the first frame
    tail, head = data - 128, data - 64

    def repeated(nbytes: int) -> bytes:
        """A frame of so many bytes with the number of the first one."""
        size = nbytes - 40
        return struct.pack("<QIHHIIQQ", nbytes - 8, 0x314D4C54, size, 0, 0, 0, 0, 1) + b"d" * size

    at = struct.unpack_from("<Q", ring, tail)[0]
    gap = -at % 64 + 64
    ring[data + at + gap : data + RING_AT_LEAST] = repeated(64) * ((RING_AT_LEAST - at - gap) // 64)
    ring[data : data + (at // 64) * 64] = repeated(64) * (at // 64)
    ring[data + at : data + at + gap] = repeated(gap)
    struct.pack_into("<Q", ring, tail, RING_AT_LEAST)
    eventually(
        lambda: (victim.engine.receive(0, "none", 0.0, None, None), ring_word(ring, head) == RING_AT_LEAST)[1],
        "a lap was read",
    )
    ring[data : data + at + gap] = repeated(64) * ((at + gap) // 64)
    fd = os.open(evil.path_of(ring), os.O_RDWR)
    command = [sys.executable, "-c", FLOOD, str(fd), str(tail), str(head)]
    with subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE) as flood:
        os.close(fd)
        try:
            assert flood.stdout is not None
            assert flood.stdout.readline() == b"flooding\n"
            before = ring_word(ring, head)
            while ring_word(ring, head) < before + 16 * RING_AT_LEAST:  # it is being read meanwhile
                start = time.monotonic()
                serves(victim, honest, connection)
                assert time.monotonic() - start < 5
                assert evil.connection.up
        finally:
            flood.kill()
    assert evil.connection.up
    evil.close()


# Parsers that Python reaches


def test_frames_of_another_carrier(peers: list[Any]) -> None:
    victim, honest, connection = peers
    packed = _core.pack({"x": np.arange(4)})
    good = honest.engine.frame("victim", 1, "tag", packed.meta, b"", packed.to_bytes())

    def attempt(frame: bytes) -> None:
        try:
            victim.engine.deliver("evil", 1, frame)
        except CorruptTransferError:
            return
        with contextlib.suppress(TensorLinkError, TypeError):
            victim.engine.receive(_core.ANY_SOURCE, "tag", 0.0, None, None)

    @CORE
    @given(st.binary(max_size=120))
    def noise(frame: bytes) -> None:
        attempt(frame)

    @CORE
    @given(st.integers(0, len(good)), st.binary(min_size=1, max_size=8), st.integers(0, len(good) + 8))
    def patched(at: int, patch: bytes, length: int) -> None:
        attempt((good[:at] + patch + good[at + len(patch) :])[:length])

    noise()
    patched()
    victim.engine.deliver("honest", 1, good)  # it has a number of its own, which the ring's next one follows
    serves(victim, honest, connection)


def test_descriptors_of_nobody(peers: list[Any]) -> None:
    victim, honest, connection = peers
    data = np.arange(1000)
    good = victim.engine.expose(data.ctypes.data, data.nbytes)

    def attempt(descriptor: bytes) -> None:
        with contextlib.suppress(TensorLinkError, TypeError):
            view = honest.engine.open(connection, descriptor, 5.0)
            view.unpack(_core.pack(data).meta, None)

    words = st.sampled_from([0, 1, 2, 4096, 2**32, 2**63, 2**64 - 1, 2**64 - 4096]) | st.integers(0, 2**64 - 1)

    @CORE
    @given(
        st.lists(st.tuples(words, words, words), max_size=4), st.integers(0, 5), st.integers(0, 2), st.integers(0, 2)
    )
    def forged(extents: list[tuple[int, int, int]], count: int, meta: int, counted: int) -> None:
        head = good[:8] + struct.pack("<HHI", count, meta, counted)
        attempt(head + b"".join(struct.pack("<QQQ", *extent) for extent in extents))

    @CORE
    @given(words, words)
    def forged_in_place(offset: int, nbytes: int) -> None:
        attempt(good[:24] + struct.pack("<QQ", offset, nbytes))

    forged()
    forged_in_place()
    serves(victim, honest, connection)


def test_a_segment_that_shrinks_is_refused(peers: list[Any]) -> None:
    """Only sealed memory is mapped: else its owner could make our reads fault."""
    victim, honest, connection = peers
    client = raw_connection(victim, 1)
    say(client, note(SEGMENT, 1), [memfd(1 << 20, 0)])
    eventually(
        lambda: [c.peer_name for c in victim.engine.connections()] == [honest.name], "the connection was dropped"
    )
    serves(victim, honest, connection)
    client.close()


@pytest.mark.shm
def test_memory_that_a_peer_gets_cannot_be_written(peers: list[Any]) -> None:
    victim = peers[0]
    data = np.ones(1 << 20, np.uint8)
    descriptor = victim.engine.expose(data.ctypes.data, data.nbytes)
    with dial(victim) as client:
        say(client, note(HELLO, 1, 1, greeting(victim)), [memfd(n) for n in sizes_of(victim)])
        kind, _, fds = answer(client)
        assert kind == WELCOME
        client.send(note(WANT, struct.unpack_from("<Q", descriptor, 40)[0]))
        kind, _, segment = answer(client)
        assert (kind, len(segment)) == (SEGMENT, 1)
        for fd in (fds[2], segment[0]):  # the control segment, and the pool
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ).close()
        for fd in (*fds, *segment):
            os.close(fd)
