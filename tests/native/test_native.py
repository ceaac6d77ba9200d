"""The native test programs of `csrc/test`: plain, under ThreadSanitizer, and under AddressSanitizer with UBSan."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = [
    *sorted((CSRC / "test").glob("*.cpp")),
    *(path for path in sorted(CSRC.glob("*.cpp")) if path.stem not in ("copy", "meta", "parallel")),
]
SUITES = sorted(path.stem.removesuffix("_test") for path in (CSRC / "test").glob("*_test.cpp"))
COMMON = ["-std=c++17", "-g1", "-Wall", "-Wextra", "-fno-strict-aliasing", "-pthread", f"-I{CSRC}"]
FLAVOURS = {
    "plain": ["-O2"],
    "thread": ["-O1", "-fsanitize=thread", "-Wno-tsan"],
    "address": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}


@pytest.fixture(scope="module", params=FLAVOURS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test program in one flavour; skips where the compiler cannot make it."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp(request.param)
    flags = [*COMMON, *FLAVOURS[request.param]]
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}\n")
    probe = subprocess.run(
        [compiler, *flags, str(empty), "-o", str(folder / "empty")], capture_output=True, check=False
    )
    if probe.returncode or subprocess.run([str(folder / "empty")], capture_output=True, check=False).returncode:
        pytest.skip(f"programs with {' '.join(FLAVOURS[request.param])} cannot be made or run here")
    whole, made = folder / "whole.cpp", folder / "native"  # one unit: most of the time goes into the standard headers
    whole.write_text("".join(f'#include "{source}"\n' for source in SOURCES))
    subprocess.run([compiler, *flags, str(whole), "-o", str(made)], check=True)
    return made


@pytest.mark.parametrize("suite", SUITES)
def test_suite(program: Path, suite: str) -> None:
    done = subprocess.run([str(program), suite], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
