"""Parsers of what peers send, under changed bytes: those of the core under ASan, those in Python as they are.

`TENSORLINK_FUZZ_S` is how long each of them is tried; `make fuzz` sets it, and tries the native ones in its own way.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.parsers import CORPUS, PARSERS, attempt

FUZZ = Path(__file__).resolve().parents[2] / "csrc" / "fuzz"
HARNESSES = sorted(path.stem.removesuffix("_fuzz") for path in FUZZ.glob("*_fuzz.cpp"))
SECONDS = float(os.environ.get("TENSORLINK_FUZZ_S", "1"))
# Not optimised, and of UBSan the checks that are cheap to compile: here the compiler takes longer than what it makes.
CHECKS = "address,bounds,shift,signed-integer-overflow,bool,enum,pointer-overflow"
FLAGS = [
    "-std=c++17",
    "-O0",
    "-g1",
    "-fno-strict-aliasing",
    "-pthread",
    f"-fsanitize={CHECKS}",
    "-fno-sanitize-recover=all",
]


def corpus(name: str) -> list[Path]:
    return sorted((CORPUS / name).iterdir())


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All harnesses with the driver of our own; skips where the compiler cannot make it."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("fuzz")
    empty, made = folder / "empty.cpp", folder / "fuzz"
    empty.write_text("int main() {}\n")
    probe = subprocess.run([compiler, *FLAGS, str(empty), "-o", str(made)], capture_output=True, check=False)
    if probe.returncode or subprocess.run([str(made)], capture_output=True, check=False).returncode:
        pytest.skip("programs with sanitizers cannot be made or run here")
    subprocess.run([compiler, *FLAGS, str(FUZZ / "main.cpp"), "-o", str(made)], check=True)
    return made


def test_each_harness_has_a_corpus() -> None:
    assert {*HARNESSES, *PARSERS} == {path.name for path in CORPUS.iterdir()}
    assert all(corpus(name) for name in {*HARNESSES, *PARSERS})


@pytest.mark.timeout(300)
def test_native_parsers(program: Path, tmp_path: Path) -> None:
    seconds = str(min(SECONDS, 10.0))
    runs = {
        name: subprocess.Popen(
            [str(program), name, seconds, "1", *map(str, corpus(name))],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for name in HARNESSES
    }
    told = {name: run.communicate()[1] for name, run in runs.items()}
    bad = {name: (tmp_path / f"crash-{name}").read_bytes() for name, run in runs.items() if run.returncode}
    assert not bad, "\n".join(f"{name} ended by {data!r}\n{told[name][-4000:]}" for name, data in bad.items())


@st.composite
def changed(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """One of the corpus with a few bytes changed, cut, doubled or put in."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        until = min(len(data), at + draw(st.integers(0, 16)))
        data[at:until] = draw(st.one_of(st.binary(max_size=12), st.just(bytes(data[at:until] * 2))))
    return bytes(data)


# Hypothesis and not Atheris: what parses here is C (json, protobuf, our core), into which Atheris sees no further, and the tests
# have Hypothesis anyway.
@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("name", PARSERS)
def test_python_parsers(name: str) -> None:
    seeds = [path.read_bytes() for path in corpus(name)]
    for data in seeds:
        attempt(name, data)

    @settings(database=None, deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
    @given(changed(seeds))
    def change(data: bytes) -> None:
        attempt(name, data)

    end = time.monotonic() + SECONDS
    chosen = random.Random(1)
    seed(1)(change)()
    while SECONDS > 1 and time.monotonic() < end:
        seed(chosen.getrandbits(32))(change)()
