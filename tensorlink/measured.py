"""What was measured of the ways between two hosts: in memory, refined by what transfers show, and in a file for the next time.

A way has two figures. A transfer of at most `SMALL_NBYTES` tells its latency, by the time that the bandwidth doesn't account for;
one of at least `BULK_NBYTES` its bandwidth, by the time that the latency doesn't account for. Where the other figure accounts for
more than half of the time, it tells nothing, unless it was faster than that figure allows: then it speaks against that one. A
transfer of a size in between would tell a mixture of both, and tells neither.

A figure begins as the median of its first three observations. Each later one moves it by an eighth of the distance on a
logarithmic scale, on which four times more or less is the farthest: so no single one, be it a stall of a minute, changes it by
more than a fifth.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tensorlink.types import Figure
from tensorlink.version import RELEASE

log = logging.getLogger("tensorlink")

OFF = "off"
FILE = "paths.json"
SMALL_NBYTES = 16 << 10
BULK_NBYTES = 1 << 20

_FORMAT = 1
_FIRST = 3
_WEIGHT = 1 / 8
_FARTHEST = 4.0
_LEAST, _MOST = 1e-12, 1e15  # no latency is less, no rate is more
_MOST_ROWS = 512
_MOST_BYTES = 1 << 20
_MOST_TEXT = 255
_MOST_SAMPLES = 1 << 31
_LOCK_S = 1.0
_LOOK_S = 0.002
_NONE: Mapping[str, Figure] = {}

Key = tuple[str, str, str, str]
"""Version, the two hosts in order, transport."""


class _Half(NamedTuple):
    """Latency or bandwidth; with less than three observations it has no value yet."""

    value: float = 0.0
    samples: int = 0
    first: tuple[float, ...] = ()

    def after(self, seen: float) -> _Half:
        seen = min(max(seen, _LEAST), _MOST)
        if self.samples:
            factor = min(max(seen / self.value, 1 / _FARTHEST), _FARTHEST) ** _WEIGHT
            return _Half(self.value * factor, min(self.samples + 1, _MOST_SAMPLES))
        first = sorted((*self.first, seen))
        return _Half(first=tuple(first)) if len(first) < _FIRST else _Half(first[_FIRST // 2], _FIRST)


class _Row(NamedTuple):
    latency: _Half
    rate: _Half
    at: float = 0.0
    """When it last changed, by the clock of the host."""

    def after(self, nbytes: int, seconds: float) -> _Row:
        by_latency = self.latency.value
        by_bytes = nbytes / self.rate.value if self.rate.samples else 0.0
        small = nbytes <= SMALL_NBYTES
        left = seconds - (by_bytes if small else by_latency)
        if seconds / 2 > left > 0:
            return self
        if small == (left > 0):
            return _Row(self.latency.after(left if small else seconds), self.rate, time.time())
        return _Row(self.latency, self.rate.after(nbytes / (seconds if small else left)), time.time())

    def figure(self, declared: Figure | None) -> Figure | None:
        """Both halves; what was not observed is as declared. None: nothing was, or one half is nowhere to be had."""
        samples = max(self.latency.samples, self.rate.samples)
        latency_s, rate = self.latency.value, self.rate.value
        if declared is not None:
            latency_s, rate = latency_s or declared.latency_s, rate or declared.bytes_per_s
        return Figure(latency_s, rate, samples) if samples and latency_s and rate else None


class Measured:
    """Figures of the ways between hosts, by transport; both directions of a way share them. Thread-safe.

    Loads the file in `folder` when it is made; None: `$XDG_CACHE_HOME/tensorlink`, or `~/.cache/tensorlink`. A file that is
    damaged or of another format counts as empty, with one warning, and the next `save` replaces it. With `on=False` it knows
    nothing, learns nothing and writes nothing. No method raises for what is on disk, or waits for more than a second.
    """

    def __init__(self, folder: Path | None = None, *, on: bool = True) -> None:
        folder = folder if folder is not None else _cache()
        self._file = _File(folder) if on and folder is not None else None
        self._on = on
        self._version = RELEASE
        self._lock = threading.Lock()
        self._declared: dict[str, Figure] = {}
        self._changed: set[Key] = set()
        read = self._file.read() if self._file else {}
        self._rows = {key: row for key, row in read.items() if key[0] == self._version}
        self._figures: dict[tuple[str, str], dict[str, Figure]] = {}
        for key in self._rows:
            self._tell(key)

    @classmethod
    def by_setting(cls, setting: str | None) -> Measured:
        """As the setting `measured` says: a folder, or `off`."""
        return cls(on=False) if setting == OFF else cls(Path(setting) if setting else None)

    @property
    def path(self) -> Path | None:
        """The file; None: there is none."""
        return self._file.path if self._file else None

    def of(self, here: str, there: str) -> Mapping[str, Figure]:
        """What is known between two hosts, by transport; not to be changed. Doesn't block."""
        return self._figures.get((here, there) if here <= there else (there, here), _NONE)

    def declare(self, transport: str, figure: Figure) -> None:
        """What a transport says of itself stands for the half of a figure that nothing was observed of."""
        with self._lock:
            self._declared[transport] = figure
            for key in self._rows:
                if key[3] == transport:
                    self._tell(key)

    def observe(self, here: str, there: str, transport: str, nbytes: int, seconds: float) -> None:
        """One transfer over that way, which had it to itself. Cheap; writes nothing to disk."""
        if not self._on or SMALL_NBYTES < nbytes < BULK_NBYTES or not 0 < seconds < math.inf:
            return
        with self._lock:
            key = self._key(here, there, transport)
            before = self._rows.get(key) or _Row(_Half(), _Half())
            after = before.after(nbytes, seconds)
            if after is not before:
                self._set(key, after)

    def put(self, here: str, there: str, transport: str, figure: Figure) -> None:
        """Replaces what is known by something measured on purpose. Raises: ValueError: that is no figure."""
        row = _row_of(figure.latency_s, figure.samples, figure.bytes_per_s, figure.samples, time.time())
        if row is None:
            raise ValueError(f"no way has these figures: {figure}")
        if self._on:
            with self._lock:
                self._set(self._key(here, there, transport), row)

    def save(self) -> bool:
        """Writes what has changed, beside what other processes have written meanwhile: of a way that several have changed
        the latest counts. False: it isn't on disk. Blocks for a second at most, while another process writes."""
        if self._file is None:
            return False
        with self._lock:
            changed = {key: self._rows[key] for key in self._changed if key in self._rows and _known(self._rows[key])}
        if changed and not self._file.merge(changed):  # meanwhile transfers go on
            return False
        with self._lock:
            self._changed -= {key for key, row in changed.items() if self._rows.get(key) is row}
        return True

    def _key(self, here: str, there: str, transport: str) -> Key:
        return (self._version, here, there, transport) if here <= there else (self._version, there, here, transport)

    def _set(self, key: Key, row: _Row) -> None:
        if key not in self._rows and len(self._rows) >= _MOST_ROWS:
            oldest = min(self._rows, key=lambda key: self._rows[key].at)
            del self._rows[oldest]
            self._tell(oldest)
        self._rows[key] = row
        self._changed.add(key)
        self._tell(key)

    def _tell(self, key: Key) -> None:
        """Brings what `of` gives up to date: a new dict, as a reader may have the old one."""
        pair, transport = key[1:3], key[3]
        row = self._rows.get(key)
        figure = row.figure(self._declared.get(transport)) if row else None
        others = {name: known for name, known in self._figures.get(pair, {}).items() if name != transport}
        self._figures[pair] = others | ({transport: figure} if figure else {})
        if not self._figures[pair]:
            del self._figures[pair]


class _File:
    """The rows on disk. The folder and the file are for their user only; a file is replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / FILE
        self._told = False

    def read(self) -> dict[Key, _Row]:
        """All rows, those of other versions too."""
        try:
            return self._parse(_content(self.path))
        except OSError as error:
            log.debug("no measured figures from %s: %s", self.path, error)
            return {}
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            self._tell(
                f"it is damaged, and replaced by the next that are saved ({type(error).__name__}: {error})"[:250]
            )
            return {}

    def _parse(self, text: str) -> dict[Key, _Row]:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            raise ValueError(f"it has the format {content['format']!r:.20}, not {_FORMAT}")
        found = [_parsed(row) for row in content["rows"]]
        good = dict(row for row in found if row is not None)
        if None in found:
            self._tell(f"{found.count(None)} of {len(found)} rows are damaged")
        return good

    def _tell(self, why: str) -> None:
        level = logging.DEBUG if self._told else logging.WARNING
        self._told = True
        log.log(level, "ignored measured figures in %s: %s", self.path, why)

    def merge(self, changed: Mapping[Key, _Row]) -> bool:
        """Whether they are on disk now."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self._folder / "paths.lock"):
                rows = self.read()
                for key, row in changed.items():
                    if key not in rows or rows[key].at <= row.at:
                        rows[key] = row
                _replace(self.path, _text(rows))
        except OSError as error:
            log.debug("measured figures were not saved in %s: %s", self._folder, error)
            return False
        return True


def _content(path: Path) -> str:
    """Raises: OSError; ValueError: it isn't a file of this user, or too large to be one of ours."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # what waits for nobody
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ValueError(f"it is no file of user {os.geteuid()}")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(_MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return data.decode()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock of one that dies is gone with it. Raises: OSError, TimeoutError: for a second."""
    deadline = time.monotonic() + _LOCK_S
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("another process keeps the lock") from None
                time.sleep(_LOOK_S)
        yield
    finally:
        os.close(fd)


def _replace(path: Path, text: str) -> None:
    """Under the lock, so that one name is enough for what isn't whole yet, and what a killed process left is written over."""
    new = path.with_name(path.name + ".new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        os.fchmod(fd, 0o600)
        file.write(text)
    os.replace(new, path)


def _text(rows: Mapping[Key, _Row]) -> str:
    newest = sorted(rows.items(), key=lambda item: item[1].at)[-_MOST_ROWS:]
    lines = (
        {
            "version": key[0],
            "hosts": key[1:3],
            "transport": key[3],
            "latency_s": row.latency.value,
            "latency_samples": row.latency.samples,
            "bytes_per_s": row.rate.value,
            "bytes_samples": row.rate.samples,
            "at": row.at,
        }
        for key, row in newest
    )
    return json.dumps({"format": _FORMAT, "rows": list(lines)}, indent=1)


def _parsed(found: Any) -> tuple[Key, _Row] | None:
    """A row as it was read; None: it is none."""
    try:
        names = [found["version"], *found["hosts"], found["transport"]]
        numbers = (found[name] for name in ("latency_s", "latency_samples", "bytes_per_s", "bytes_samples", "at"))
        row = _row_of(*numbers)
    except (LookupError, TypeError):
        return None
    if row is None or len(names) != 4 or not all(type(name) is str and len(name) <= _MOST_TEXT for name in names):
        return None
    version, one, other, transport = names
    return (version, min(one, other), max(one, other), transport), row


def _row_of(latency_s: Any, latency_samples: Any, bytes_per_s: Any, bytes_samples: Any, at: Any) -> _Row | None:
    """None: no row has these values."""
    latency, rate = _half_of(latency_s, latency_samples), _half_of(bytes_per_s, bytes_samples)
    if latency is None or rate is None or not _number(at):
        return None
    row = _Row(latency, rate, min(float(at), time.time()))  # nothing is newer than what is written now
    return row if _known(row) else None


def _half_of(value: Any, samples: Any) -> _Half | None:
    if type(samples) is not int or not 0 <= samples <= _MOST_SAMPLES or not _number(value):
        return None
    return _Half(float(value), samples) if samples and value else None if samples or value else _Half()


def _number(value: Any) -> bool:
    return type(value) in (int, float) and (value == 0 or _LEAST <= value <= _MOST)


def _known(row: _Row) -> bool:
    return bool(row.latency.samples or row.rate.samples)


def _cache() -> Path | None:
    """The folder of this user's cache; None: there is no telling (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    base = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    return Path(base, "tensorlink") if os.path.isabs(base) else None


__all__ = ["BULK_NBYTES", "OFF", "SMALL_NBYTES", "Measured"]
