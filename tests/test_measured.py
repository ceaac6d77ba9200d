"""Measured figures: what observations make of them, and the file that several processes share."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorlink.measured import BULK_NBYTES, FILE, SMALL_NBYTES, Measured
from tensorlink.types import Figure
from tests.peer import Peer, eventually, kept, nursery, say, spawn

__all__ = ["nursery", "spawn"]

pytestmark = pytest.mark.usefixtures("nursery")

HERE, THERE = "host-a", "host-b"
WAY = (HERE, THERE, "tcp")
KNOWN = Figure(100e-6, 1e9, 7)

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine takes its time

latencies = st.floats(1e-6, 0.1)
rates = st.floats(1e6, 1e11)
bulk = st.integers(BULK_NBYTES, 1 << 34)
small = st.integers(0, SMALL_NBYTES)
figures = st.builds(Figure, latencies, rates, st.integers(1, 1000))
seconds = st.floats(1e-9, 1e6)


def fresh(figure: Figure | None = None) -> Measured:
    """One without a file."""
    made = Measured(Path("/nonexistent"))
    if figure is not None:
        made.put(*WAY, figure)
    return made


def of(measured: Measured) -> Figure:
    return measured.of(HERE, THERE)["tcp"]


# What observations make of a figure


@patient
@given(latency_s=latencies, rate=rates, sizes=st.lists(bulk, min_size=3, max_size=8), few=small)
def test_a_steady_way_is_found_out(latency_s: float, rate: float, sizes: list[int], few: int) -> None:
    measured = fresh()
    measured.declare("tcp", Figure(1.0, 1.0))
    for nbytes in [few] * 3 + sizes + [few] * 3:
        measured.observe(*WAY, nbytes, latency_s + nbytes / rate)
    found = of(measured)
    assert latency_s <= found.latency_s * 1.001 and found.latency_s <= 1.001 * (latency_s + few / rate)
    told = [nbytes for nbytes in sizes if nbytes / rate > 1.1 * (latency_s + few / rate)]
    if len(told) >= 3:
        assert found.bytes_per_s == pytest.approx(rate, rel=0.05)
    if all(nbytes / rate < 0.9 * latency_s for nbytes in sizes):
        assert found.bytes_per_s == 1.0, "it took no time that counts"


def test_figures_are_near_where_sizes_tell_them_apart() -> None:
    measured = fresh()
    for _ in range(10):
        measured.observe(*WAY, 1024, 200e-6 + 1024 / 1e9)
        measured.observe(*WAY, 64 << 20, 200e-6 + (64 << 20) / 1e9)
    found = of(measured)
    assert found.latency_s == pytest.approx(200e-6, rel=0.02) and found.bytes_per_s == pytest.approx(1e9, rel=0.02)


@patient
@given(figure=figures, nbytes=st.one_of(small, bulk), taken=seconds, asked=st.integers(0, 1 << 36))
def test_no_single_observation_changes_a_prediction_by_more_than_a_fifth(
    figure: Figure, nbytes: int, taken: float, asked: int
) -> None:
    measured = fresh(figure)
    measured.observe(*WAY, nbytes, taken)
    before, after = (known.latency_s + asked / known.bytes_per_s for known in (figure, of(measured)))
    assert 1 / 1.2 < after / before < 1.2


@patient
@given(good=st.lists(st.floats(0.9, 1.1), min_size=2, max_size=2), outlier=seconds, place=st.integers(0, 2))
def test_a_first_observation_that_is_an_outlier_decides_nothing(good: list[float], outlier: float, place: int) -> None:
    measured = fresh()
    measured.declare("tcp", Figure(1e-4, 1e9))
    times = [factor * 0.1 for factor in good]
    times.insert(place, outlier)
    for taken in times:
        assert not measured.of(HERE, THERE), "not before the third"
        measured.observe(*WAY, 100 << 20, taken)
    assert 0.089 < (100 << 20) / of(measured).bytes_per_s < 0.111


@patient
@given(rate=rates, change=st.floats(1 / 50, 50))
def test_a_lasting_change_is_followed(rate: float, change: float) -> None:
    measured = fresh(Figure(1e-6, rate))
    for _ in range(60):
        measured.observe(*WAY, 1 << 34, (1 << 34) / (rate * change))
    assert of(measured).bytes_per_s == pytest.approx(rate * change, rel=0.05)


def test_what_is_faster_than_a_figure_allows_speaks_against_that_figure() -> None:
    measured = fresh(Figure(0.1, 1e6, 9))
    for _ in range(80):
        measured.observe(*WAY, 1 << 20, 0.001)
    found = of(measured)
    assert found.latency_s == pytest.approx(0.001, rel=0.2) and found.bytes_per_s == 1e6
    measured.put(*WAY, Figure(0.1, 1e3, 9))
    for _ in range(80):
        measured.observe(*WAY, 10_000, 0.001)
    found = of(measured)
    assert found.bytes_per_s == pytest.approx(1e7, rel=0.2) and found.latency_s == 0.1


@patient
@given(nbytes=st.integers(SMALL_NBYTES + 1, BULK_NBYTES - 1), taken=seconds)
def test_what_tells_a_mixture_tells_nothing(nbytes: int, taken: float) -> None:
    measured = fresh(KNOWN)
    measured.observe(*WAY, nbytes, taken)
    assert of(measured) == KNOWN


@pytest.mark.parametrize("taken", [0.0, -1.0, math.inf, math.nan])
def test_times_that_are_none_are_ignored(taken: float) -> None:
    measured = fresh(KNOWN)
    measured.observe(*WAY, BULK_NBYTES, taken)
    assert of(measured) == KNOWN


def test_what_was_not_observed_is_as_declared_or_unknown() -> None:
    measured = fresh()
    for _ in range(3):
        measured.observe(*WAY, BULK_NBYTES, 0.001)
    assert not measured.of(HERE, THERE), "half a figure"
    measured.declare("tcp", Figure(5e-5, 3e9))
    assert (of(measured).latency_s, of(measured).samples) == (5e-5, 3)


def test_both_directions_are_one_way_and_transports_are_apart() -> None:
    measured = fresh(KNOWN)
    measured.put(THERE, HERE, "ucx", Figure(1e-6, 1e10))
    assert measured.of(THERE, HERE) == measured.of(HERE, THERE) == {"tcp": KNOWN, "ucx": Figure(1e-6, 1e10)}
    assert measured.of(HERE, "host-c") == {}


@pytest.mark.parametrize("figure", [Figure(0, 1e9), Figure(1e-6, math.nan), Figure(-1, 1e9), Figure(1e-6, 1e9, 0)])
def test_what_is_no_figure_is_refused(figure: Figure) -> None:
    with pytest.raises(ValueError, match="no way has these figures"):
        fresh().put(*WAY, figure)


# The file


@patient
@given(figures=st.dictionaries(st.sampled_from(["tcp", "shm", "ucx"]), figures))
def test_what_was_saved_is_there_the_next_time(tmp_path_factory: pytest.TempPathFactory, figures: Any) -> None:
    folder = tmp_path_factory.mktemp("cache")
    measured = Measured(folder)
    for transport, figure in figures.items():
        measured.put(HERE, THERE, transport, figure)
    assert measured.save()
    assert Measured(folder).of(THERE, HERE) == figures


def test_figures_beyond_belief_do_not_spoil_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    measured = Measured(tmp_path)
    for nbytes, taken in ((1 << 62, 1e-300), (0, 1e-300), (1 << 62, 1e-9), (0, 1e-9)) * 200:
        measured.observe(*WAY, nbytes, taken)
    assert measured.save() and Measured(tmp_path).of(HERE, THERE) == measured.of(HERE, THERE) != {}
    assert not caplog.records


def test_the_file_is_in_the_cache_of_the_user_and_for_nobody_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value, folder in (
        ("XDG_CACHE_HOME", str(tmp_path / "cache"), tmp_path / "cache/tensorlink"),
        ("XDG_CACHE_HOME", "relative", tmp_path / ".cache/tensorlink"),
    ):
        monkeypatch.setenv(name, value)
        monkeypatch.setenv("HOME", str(tmp_path))
        measured = Measured.by_setting(None)
        measured.put(*WAY, KNOWN)
        assert measured.save()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
            FILE: 0o600,
            "paths.lock": 0o600,
        }


def test_off_knows_and_writes_nothing(tmp_path: Path) -> None:
    saved = Measured.by_setting(str(tmp_path))
    saved.put(*WAY, KNOWN)
    assert saved.save()
    off = Measured.by_setting("off")
    off.put(*WAY, KNOWN)
    off.observe(*WAY, BULK_NBYTES, 1.0)
    assert off.of(HERE, THERE) == {} and not off.save()


def row(**other: Any) -> dict[str, Any]:
    """A row of the file."""
    known = {"hosts": [HERE, THERE], "transport": "tcp", "latency_s": 1e-4, "latency_samples": 3, "at": 1.0}
    return {"version": version(), **known, "bytes_per_s": 1e9, "bytes_samples": 7, **other}


def version() -> str:
    measured = fresh(KNOWN)
    return next(iter(measured._rows))[0]


DAMAGED: dict[str, str | bytes] = {
    "empty": "",
    "cut": json.dumps({"format": 1, "rows": [row()]})[:-20],
    "no text": b"\xff\xfe\x00",
    "a list": "[]",
    "another format": json.dumps({"format": 2, "rows": [row()]}),
    "rows that are none": json.dumps({"format": 1, "rows": 7}),
    "deep": "[" * 100_000,
    "large": json.dumps({"format": 1, "rows": [], "more": "x" * (1 << 20)}),
    "a rate of nothing": json.dumps({"format": 1, "rows": [row(bytes_per_s=0)]}),
    "a rate below nothing": json.dumps({"format": 1, "rows": [row(bytes_per_s=-1)]}),
    "no number": json.dumps({"format": 1, "rows": [row(bytes_per_s=math.nan)]}),
    "a huge number": json.dumps({"format": 1, "rows": [row(bytes_per_s=10**400)]}),
    "no hosts": json.dumps({"format": 1, "rows": [row(hosts=None)]}),
    "three hosts": json.dumps({"format": 1, "rows": [row(hosts=["a", "b", "c"])]}),
    "samples by the half": json.dumps({"format": 1, "rows": [row(bytes_samples=1.5)]}),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_content_is_ignored_with_one_warning_and_replaced(
    tmp_path: Path, content: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.WARNING, "tensorlink"):
        measured = Measured(tmp_path)
        assert measured.of(HERE, THERE) == {}
        measured.put(*WAY, KNOWN)
        assert measured.save()
    assert len(caplog.records) == 1 and str(tmp_path / FILE) in caplog.text
    assert of(Measured(tmp_path)) == KNOWN and len(caplog.records) == 1


def test_one_row_that_is_none_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"format": 1, "rows": [row(transport="ucx", at="x"), row()]}))
    assert list(Measured(tmp_path).of(HERE, THERE)) == ["tcp"]


def test_rows_of_other_versions_count_for_those(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"format": 1, "rows": [row(version="0.0.1")]}))
    measured = Measured(tmp_path)
    assert measured.of(HERE, THERE) == {}
    measured.put(*WAY, KNOWN)
    assert measured.save()
    rows = json.loads((tmp_path / FILE).read_text())["rows"]
    assert {found["version"] for found in rows} == {"0.0.1", version()}


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just("tcp")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
changes = st.dictionaries(st.sampled_from(list(row())), values, max_size=3)


@patient
@given(content=st.one_of(st.binary(), values, st.lists(changes, max_size=3)))
def test_whatever_the_file_holds_what_comes_of_it_is_figures(
    tmp_path_factory: pytest.TempPathFactory, content: Any
) -> None:
    folder = tmp_path_factory.getbasetemp() / "whatever"
    folder.mkdir(exist_ok=True)
    if isinstance(content, list):
        content = {"format": 1, "rows": [row(**one) if isinstance(one, dict) else one for one in content]}
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / FILE).write_bytes(data)
    measured = Measured(folder)
    for found in measured._figures.values():
        assert all(
            0 < one.latency_s <= 1e15 and 0 < one.bytes_per_s <= 1e15 and one.samples > 0 for one in found.values()
        )
    measured.put(*WAY, KNOWN)
    assert measured.save() and of(Measured(folder)) == KNOWN


@pytest.mark.parametrize("place", ["fifo", "link", "folder", "a file is the folder"])
def test_what_is_no_file_harms_nothing(tmp_path: Path, place: str) -> None:
    folder, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    if place == "a file is the folder":
        folder.write_text("")
    else:
        folder.mkdir()
    if place == "fifo":
        os.mkfifo(folder / FILE)
    elif place == "link":
        (folder / FILE).symlink_to(elsewhere)
    elif place == "folder":
        (folder / FILE).mkdir()
    measured = Measured(folder)
    measured.put(*WAY, KNOWN)
    assert measured.save() == (place in ("fifo", "link")), "they are replaced, not written to"
    assert not elsewhere.exists()


def test_the_oldest_rows_go(tmp_path: Path) -> None:
    rows = [row(transport=f"t{i}", at=float(i + 1)) for i in range(700)]
    (tmp_path / FILE).write_text(json.dumps({"format": 1, "rows": rows}))
    measured = Measured(tmp_path)
    measured.put(*WAY, KNOWN)
    assert measured.save()
    kept_rows = Measured(tmp_path).of(HERE, THERE)
    assert len(kept_rows) == 512 and "tcp" in kept_rows and "t699" in kept_rows and "t0" not in kept_rows


def test_nobody_waits_long_for_a_lock_that_is_kept(tmp_path: Path) -> None:
    measured = Measured(tmp_path)
    measured.put(*WAY, KNOWN)
    with open(tmp_path / "paths.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        began = time.monotonic()
        assert not measured.save()
        assert time.monotonic() - began < 5
    assert measured.save() and of(Measured(tmp_path)) == KNOWN


def open_in(folder: Path) -> None:
    kept["measured"] = Measured(folder)


def save_many(number: int, rounds: int) -> None:
    """One row more each time. Who finds the lock kept for a second, on a busy machine, has another turn."""
    measured = kept["measured"]
    for i in range(rounds):
        measured.put(HERE, THERE, f"{number}-{i}", KNOWN)
        eventually(measured.save, "the figures are saved")


def test_processes_that_save_at_once_lose_nothing(tmp_path: Path, spawn: Callable[..., Peer]) -> None:
    processes = [spawn() for _ in range(4)]
    for process in processes:
        process.call(open_in, tmp_path)
    for number, process in enumerate(processes):
        process.start(save_many, number, 20)
    while not all(process.ready(0.005) for process in processes):
        if (tmp_path / FILE).exists():
            json.loads((tmp_path / FILE).read_text())  # never half of one
    for process in processes:
        process.finish()
    assert len(Measured(tmp_path).of(HERE, THERE)) == 80


def save_for_ever() -> None:
    say("it begins")
    save_many(0, 1 << 30)


def test_a_process_that_is_killed_while_it_saves_leaves_a_whole_file(
    tmp_path: Path, spawn: Callable[..., Peer]
) -> None:
    for _ in range(3):
        process = spawn()
        process.call(open_in, tmp_path)
        process.start(save_for_ever)
        process.hear()
        eventually((tmp_path / FILE).exists, "it has saved")
        process.kill()
        json.loads((tmp_path / FILE).read_text())
        measured = Measured(tmp_path)
        measured.put(*WAY, KNOWN)
        assert measured.save(), "and no lock"


def test_of_two_that_changed_the_same_way_the_latest_counts(tmp_path: Path, spawn: Callable[..., Peer]) -> None:
    late = Measured(tmp_path)
    other = spawn()
    other.call(open_in, tmp_path)
    other.call(save_many, 0, 1)
    late.put(HERE, THERE, "0-0", Figure(1.0, 1e6))
    assert late.save()
    other.call(save_many, 1, 1)  # it knows of the older one
    assert Measured(tmp_path).of(HERE, THERE)["0-0"] == Figure(1.0, 1e6)
