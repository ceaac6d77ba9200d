"""The flight recorder: what it says of processes that wait, were stopped or were killed; and that it trusts no file."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pickle
import shutil
import signal
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import tensorlink as tl
from tensorlink import flight, recording
from tensorlink.cli.app import app
from tensorlink.endpoint import open_endpoint
from tensorlink.errors import CorruptTransferError, TransferTimeoutError
from tests.joined import join
from tests.peer import Peer, eventually, nursery, spawn

__all__ = ["join", "nursery", "spawn"]

TCP = {"TENSORLINK_TRANSPORTS": "tcp", "TENSORLINK_TOKEN": "a secret of the tests"}
SIZE = 8 << 20


def file_of(endpoint: tl.Endpoint) -> Path:
    return Path(endpoint._engine.flight.path)


def own_file() -> str:
    return str(file_of(tl.current()))


def receive(source: str, timeout: float | None = None) -> None:
    tl.recv(source, tag="grads", timeout=timeout)


def put_slowly(nbytes: int) -> bytes:
    return tl.put(np.zeros(nbytes, np.uint8)).to_bytes()


def get(ref: bytes) -> None:
    tl.get(tl.TensorRef.from_bytes(ref), out=np.empty(SIZE, np.uint8))


def row(path: str | Path, check: Callable[[recording.Record], object]) -> recording.Record | None:
    return next((record for record in recording.read(Path(path)).operations if check(record)), None)


def stopped(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in TCP.items():
        monkeypatch.setenv(name, value)
    return TCP


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """What an endpoint that lives no more wrote."""
    with tl.init("alone") as endpoint:
        for number in range(5):
            endpoint._engine.flight.note("step", str(number))
        return Path(shutil.copy(file_of(endpoint), tmp_path / "flight-1-00000000"))


def cli(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["flight", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


# Processes


def test_a_process_killed_in_the_middle_of_a_transfer(tcp: dict[str, str], join: Callable[..., Peer]) -> None:
    with tl.init("owner", max_bytes_per_s=2 << 20) as owner:
        reader = join("reader")
        path = reader.call(own_file)
        reader.start(get, put_slowly(SIZE))
        eventually(lambda: row(path, lambda record: record.done > 0), "bytes arrive")
        sent = eventually(lambda: row(file_of(owner), lambda record: record.done > 0), "bytes are sent")
        assert (sent.what, sent.peer, sent.total) == ("serve", "reader", SIZE)
        reader.kill()
        found = recording.read(Path(path))
        (read,) = found.operations
        assert found.state == "died" and found.name == "reader"
        assert (read.peer, read.transport, read.phase, read.total) == ("owner", "tcp", "bytes", SIZE)
        assert 0 < read.done < SIZE
        shown = cli(path)
        assert all(word in shown for word in ("died", "owner", "tcp", "bytes", "of 8.0 MiB")), shown


def test_a_stopped_owner_is_waited_for(tcp: dict[str, str], join: Callable[..., Peer]) -> None:
    with tl.init("reader") as reader:
        owner = join("owner")
        ref = tl.TensorRef.from_bytes(owner.call(put_slowly, SIZE))
        reader.get(ref)
        owner.signal(signal.SIGSTOP)
        eventually(lambda: stopped(owner.pid), "all its threads stand still")
        with pytest.raises(TransferTimeoutError) as caught:
            reader.get(ref, timeout=0.4)
        owner.signal(signal.SIGCONT)
        error = pickle.loads(pickle.dumps(caught.value))
        assert error.waited == caught.value.waited and error.waited in str(error)
        assert error.waited.startswith("waited 0.4 s for an answer of 'owner' over tcp: 0.0 of 8.0 MiB"), error.waited
        event = recording.read(file_of(reader)).events[-1]
        assert (event.peer, event.outcome, event.failed, event.total) == ("owner", "TransferTimeout", True, SIZE)


@pytest.mark.shm
def test_two_that_wait_for_each_other(join: Callable[..., Peer], runtime_dir: Path) -> None:
    pair = {name: join(name) for name in ("left", "right")}
    files = {name: peer.call(own_file) for name, peer in pair.items()}
    pair["left"].start(receive, "right")
    pair["right"].start(receive, "left")
    for name, other in (("left", "right"), ("right", "left")):
        waits = eventually(partial(row, files[name], lambda record: record.what == "recv"), f"{name} waits")
        assert (waits.peer, waits.phase, waits.note) == (other, "message", "grads")
    assert recording.circles(recording.read(Path(path)) for path in files.values()) == [["left", "right"]]
    shown = cli()
    assert "wait for each other: left for right for left" in shown, shown
    assert "a message with tag 'grads' of 'right'" in shown
    assert "left" in cli(str(pair["right"].pid))


def test_a_silent_process_is_told_from_a_live_one() -> None:
    with tl.init("alone") as alone:
        found = recording.read(file_of(alone))
        assert found.state == "alive" and found.name == "alone" and found.incarnation == alone.id.incarnation
        assert dataclasses.replace(found, now=found.beat + 10).state == "silent"


def fork_and_fail() -> tuple[bytes, bytes]:
    path = file_of(tl.current())
    recorder = tl.current()._engine.flight
    before = path.read_bytes()
    if (pid := os.fork()) == 0:
        recorder.note("child", "failed", failed=True)
        with flight.doing(recorder, "child", "", ""):
            tl.shutdown()
        os._exit(0)
    os.waitpid(pid, 0)
    return before[4096:], path.read_bytes()[4096:]


def test_a_forked_child_writes_nothing(join: Callable[..., Peer]) -> None:
    before, after = join("parent").call(fork_and_fail)
    assert before == after


# Errors say what was waited for


def test_errors_carry_the_short_form() -> None:
    with tl.init("alone") as alone:

        def late(call: Callable[[], Any]) -> str:
            with pytest.raises(TransferTimeoutError) as caught:
                call()
            assert caught.value.waited and caught.value.waited in str(caught.value)
            return caught.value.waited

        other = open_endpoint("other", tl.Settings.load())
        with other, tl.WeightPublisher("policy", {"w": np.zeros(2)}, endpoint=other):
            subscriber = tl.WeightSubscriber("policy", {"w": np.zeros(2)})
            assert late(lambda: alone.recv("other", tag="x", timeout=0.1)) == (
                "waited 0.1 s for a message with tag 'x' of 'other'"
            )
            assert "for a message with tag 'y'" in late(lambda: alone.irecv(tag="y", timeout=0.1).wait())
            posted = alone.irecv("other")
            assert "for a message of 'other'" in late(lambda: posted.wait(0.1))
            assert "for a message of 'other'" in late(lambda: tl.wait([posted], timeout=0.1))
            posted.cancel()
            assert "for a version of 'policy' of 'other'" in late(lambda: subscriber.pull(timeout=0.6))
            pull = subscriber.ipull(timeout=20)
            assert "for a version" in late(lambda: pull.wait(0.2))
            pull.cancel()
            other.send(1, "alone")
            alone.recv("other")
            assert "last news " in late(lambda: alone.recv("other", tag="x", timeout=0.1))
        events = recording.read(file_of(alone)).events
        assert [event.what for event in events if event.outcome == "TransferTimeout"] == [
            "pull"
        ]  # shorter ones were looks


def test_an_error_of_another_thread_or_time_is_not_quoted() -> None:
    with tl.init("alone") as alone:
        with pytest.raises(TransferTimeoutError):
            alone.recv("alone", tag="x", timeout=0.3)
        with pytest.raises(tl.PeerUnknownError):
            alone.send(1, "nobody", timeout=0.01)
        last = recording.read(file_of(alone)).events[-1]
        assert (last.peer, last.note) != ("alone", "x")


# Files


def test_a_calm_endpoint_takes_its_file_with_it(runtime_dir: Path) -> None:
    with tl.init("calm") as endpoint:
        path = file_of(endpoint)
        assert path.parent == runtime_dir / "tensorlink" and path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()
    with tl.init("failed") as endpoint, pytest.raises(TransferTimeoutError):
        endpoint.recv("failed", timeout=0.3)
    (kept,) = flight.files(runtime_dir / "tensorlink")
    assert recording.read(kept).state == "left" and recording.read(kept).failures > 0


def test_a_file_never_grows() -> None:
    with tl.init("alone") as alone:
        path, recorder = file_of(alone), alone._engine.flight
        size = path.stat().st_size
        for number in range(3000):
            recorder.note("step", str(number), "peer" * 50, text="é" * 200)
        found = recording.read(path)
        assert path.stat().st_size == size <= recording.MAX_NBYTES
        assert [int(event.outcome) for event in found.events][-1] == 2999 and 500 < len(found.events) < 1000
        assert found.events[-1].note.endswith("é…") and found.events[-1].peer.endswith("r…")


def test_off_and_a_place_that_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    monkeypatch.setenv("TENSORLINK_FLIGHT", "off")
    with tl.init("off") as endpoint:
        assert endpoint._engine.flight.path == ""
        with pytest.raises(TransferTimeoutError, match="waited 0.1 s"):
            endpoint.recv(timeout=0.1)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TENSORLINK_FLIGHT", str(tmp_path / "file" / "folder"))
    with caplog.at_level(logging.DEBUG, "tensorlink"), tl.init("nowhere", log="DEBUG") as endpoint:
        assert endpoint._engine.flight.path == ""
    assert "no flight recorder" in caplog.text
    monkeypatch.setenv("TENSORLINK_FLIGHT", str(tmp_path / "flights"))
    with tl.init("there") as endpoint:
        assert file_of(endpoint).parent == tmp_path / "flights"
        assert "there" in cli()


def test_old_files_are_swept(recorded: Path, tmp_path: Path) -> None:
    alive = recorded.read_bytes()
    recorded.unlink()
    ended = bytearray(alive)
    struct.pack_into("<Q", ended, 32, 1)  # started just after the boot: nobody that lives
    for number in range(flight.KEPT + 5):
        (tmp_path / f"flight-1-{number:08x}").write_bytes(ended)
    (tmp_path / f"flight-{os.getpid()}-ffffffff").write_bytes(alive)
    old = tmp_path / "flight-1-aaaaaaaa"
    old.write_bytes(ended)
    os.utime(old, (1, 1))
    (tmp_path / "flight-1-bbbbbbbb").symlink_to(__file__)
    (tmp_path / "flight-notes.txt").write_text("mine")
    flight.sweep(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert {f"flight-{os.getpid()}-ffffffff", "flight-notes.txt", "flight-1-bbbbbbbb"} < left
    assert old.name not in left and len(left) <= flight.KEPT + 3


# Nothing in a file is trusted


def record_at(data: bytes, slot: int) -> int:
    header_size, record_size, operations = struct.unpack_from("<3I", data, 12)
    return int(header_size + (operations + slot) * record_size)


def test_torn_records_are_left_out(recorded: Path) -> None:
    path, data = recorded, recorded.read_bytes()
    numbers = [event.number for event in recording.parse(data, data, path).events]
    last = record_at(data, numbers[-1] - 1)

    def left(number: int, *, twice: bool) -> list[int]:
        torn = bytearray(data)
        struct.pack_into("<Q", torn, last, number)
        return [event.number for event in recording.parse(bytes(torn) if twice else data, bytes(torn), path).events]

    assert left((1 << 64) - 1, twice=True) == numbers[:-1]  # killed in the middle of it
    assert left(numbers[-1] + 768, twice=False) == numbers[:-1]  # written again while it was read
    assert left(numbers[-1] + 768, twice=True) == numbers[:-1]  # a number that was never given
    assert left(numbers[-1] + 1, twice=True) == numbers[:-1]  # one of another place


def test_what_is_no_flight_file(recorded: Path, tmp_path: Path) -> None:
    data = recorded.read_bytes()
    for what in (b"", b"TLFLIGHT", data[:-1], data + b"\0", b"X" + data[1:], data[:8] + b"\2" + data[9:], data * 2):
        with pytest.raises(CorruptTransferError):
            recording.parse(what, what, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorruptTransferError):
        recording.read(tmp_path / "pipe")
    for bad in (str(tmp_path / "pipe"), str(tmp_path / "none"), "4194303"):
        done = CliRunner().invoke(app, ["flight", bad])
        assert done.exit_code == 1 and "Traceback" not in done.output


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_safely(recorded: Path, data: st.DataObject) -> None:
    path, bytes_of_it = recorded, bytearray(recorded.read_bytes())
    first = record_at(bytes(bytes_of_it), 0)
    places = st.one_of(st.integers(0, 100), st.integers(first, first + 2048), st.integers(0, len(bytes_of_it) - 8))
    for at, word in data.draw(st.lists(st.tuples(places, st.binary(min_size=1, max_size=8)), max_size=12)):
        bytes_of_it[at : at + len(word)] = word
    try:
        found = recording.parse(bytes(bytes_of_it), bytes(bytes_of_it), path)
    except CorruptTransferError:
        return
    for record in (*found.operations, *found.events):
        assert record.told(found.now).isprintable()
    assert found.name.isprintable() and found.state in ("alive", "silent", "left", "died")
    recording.circles([found])
    json.dumps(dataclasses.asdict(found), default=str)


@given(st.binary(max_size=600))
def test_no_bytes_are_a_header(data: bytes) -> None:
    with pytest.raises(CorruptTransferError):
        recording.parse(b"TLFLIGHT" + data, b"TLFLIGHT" + data, Path("f"))
    recording.told(data[:256].ljust(256, b"\0"))


def test_json() -> None:
    with tl.init("alone") as alone:
        (found,) = json.loads(cli(str(file_of(alone)), "--json"))
        assert found["name"] == "alone" and found["state"] == "alive"
