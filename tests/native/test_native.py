"""The native test programs of `csrc/test`: plain, under ThreadSanitizer, and under AddressSanitizer with UBSan."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.authority import Authority

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SUITES = sorted(path.stem.removesuffix("_test") for path in (CSRC / "test").glob("*_test.cpp"))
ENGINE = {"tcp"}  # suites that need the whole engine, which takes minutes to compile with a sanitizer
PROGRAMS = {"plain": ("all", "all"), "thread": ("small", "engine"), "address": ("small", "engine")}
"""What the program of each flavour is called that has the small suites, and what the one that has those of the engine."""
SMALL = ("arena.cpp", "crc32c.cpp", "flight.cpp", "hmac.cpp", "inbox.cpp", "point.cpp", "segments.cpp")
COMMON = ["-std=c++17", "-g1", "-Wall", "-Wextra", "-fno-strict-aliasing", "-pthread", f"-I{CSRC}"]
FLAVOURS = {
    "plain": ["-O0"],
    "thread": ["-O1", "-fsanitize=thread", "-Wno-tsan"],
    "address": [
        "-O0",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    ],  # half as long to compile, and as much is seen
}


def sources(suites: str) -> list[Path]:
    """What a program is made of: its suites, and of the core what they need. Codecs and copies are tested from Python."""
    tests = [CSRC / "test" / "main.cpp"]
    left_out = {"all": set[str](), "small": ENGINE, "engine": {*SUITES} - ENGINE}[suites]
    tests += [CSRC / "test" / f"{suite}_test.cpp" for suite in SUITES if suite not in left_out]
    if suites == "small":
        return [*tests, *(CSRC / name for name in SMALL)]
    return [*tests, *(path for path in sorted(CSRC.glob("*.cpp")) if path.stem not in ("copy", "meta", "parallel"))]


@pytest.fixture(scope="module")
def programs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, str], Path]]:
    """Test programs by flavour and suites. The compiler makes all that this run wants from now on, one on each processor."""
    asked = (item.callspec.params for item in request.session.items if item.path == request.path)  # type: ignore[attr-defined]
    wanted = dict.fromkeys((one["flavour"], one.get("suites", PROGRAMS[one["flavour"]][True])) for one in asked)
    folder = tmp_path_factory.mktemp("native")
    pool = ThreadPoolExecutor(os.cpu_count())
    made = {one: pool.submit(make, *one, folder) for one in wanted}
    yield lambda flavour, suites: made[flavour, suites].result()
    pool.shutdown(cancel_futures=True)


def make(flavour: str, suites: str, parent: Path) -> Path:
    """The test program of some suites in one flavour; skips where the compiler cannot make it."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = parent / f"{suites}-{flavour}"
    folder.mkdir()
    flags = [*COMMON, *FLAVOURS[flavour], f"-DTL_SUITES_{suites.upper()}"]
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}\n")
    probe = subprocess.run(
        [compiler, *flags, str(empty), "-o", str(folder / "empty")], capture_output=True, check=False
    )
    if probe.returncode or subprocess.run([str(folder / "empty")], capture_output=True, check=False).returncode:
        pytest.skip(f"programs with {' '.join(FLAVOURS[flavour])} cannot be made or run here")
    whole, made = folder / "whole.cpp", folder / "native"  # one unit: most of the time goes into the standard headers
    whole.write_text("".join(f'#include "{source}"\n' for source in sources(suites)))
    subprocess.run([compiler, *flags, str(whole), "-o", str(made)], check=True)
    return made


def _suites() -> list[Any]:
    found = []
    for flavour in FLAVOURS:
        for suite in SUITES:
            suites = PROGRAMS[flavour][suite in ENGINE]
            marks = [pytest.mark.soak] if suite in ENGINE and flavour != "plain" else []
            found.append(pytest.param(flavour, suites, suite, id=f"{suite}-{flavour}", marks=marks))
    return found


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_tcp_by_tls(programs: Callable[[str, str], Path], flavour: str, tmp_path: Path) -> None:
    Authority(tmp_path).issue("peer")
    command = [str(programs(flavour, PROGRAMS[flavour][True])), "tcp"]
    environment = {**os.environ, "TL_CERTIFICATES": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("flavour", "suites", "suite"), _suites())
def test_suite(programs: Callable[[str, str], Path], flavour: str, suites: str, suite: str) -> None:
    program = programs(flavour, suites)
    done = subprocess.run([str(program), suite], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
