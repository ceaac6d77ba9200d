"""What pyproject.toml and constraints.txt promise: ranges that cover the pins and suit the generated code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
REQUIREMENTS = [
    Requirement(text)
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in group
]
GENERATED = sorted((ROOT / "tensorlink").rglob("*_pb2.py"))


def pinned(name: str) -> Version | None:
    return next((Version(next(iter(pin.specifier)).version) for pin in PINS if same(pin.name, name)), None)


def same(one: str, other: str) -> bool:
    return re.sub(r"[-_.]+", "-", one).lower() == re.sub(r"[-_.]+", "-", other).lower()


@pytest.mark.parametrize("requirement", [r for r in REQUIREMENTS if r.name != "tensorlink"], ids=str)
def test_pin_lies_in_the_range(requirement: Requirement) -> None:
    version = pinned(requirement.name)
    assert version is not None, f"constraints.txt has no pin for {requirement.name}"
    assert version in requirement.specifier


def test_pins_are_exact() -> None:
    assert [str(pin) for pin in PINS if [clause.operator for clause in pin.specifier] != ["=="]] == []


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_oldest_protobuf_runs_the_generated_code(path: Path) -> None:
    match = re.search(r"^# Protobuf Python Version: (\S+)$", path.read_text(), re.MULTILINE)
    assert match is not None
    allowed = next(r.specifier for r in REQUIREMENTS if r.name == "protobuf")
    oldest = max(Version(clause.version) for clause in allowed if clause.operator == ">=")
    assert oldest >= Version(match[1])
    assert f"{Version(match[1]).major + 1}.0" not in allowed, "the next major version warns about this code"


def test_oldest_grpc_runs_the_generated_services() -> None:
    allowed = next(r.specifier for r in REQUIREMENTS if r.name == "grpcio")
    oldest = max(Version(clause.version) for clause in allowed if clause.operator == ">=")
    versions = [
        Version(found)
        for path in (ROOT / "tensorlink").rglob("*_pb2_grpc.py")
        for found in re.findall(r"^GRPC_GENERATED_VERSION = '(\S+)'$", path.read_text(), re.MULTILINE)
    ]
    assert all(version <= oldest for version in versions), f"{versions} needs more than grpcio {oldest}"


@pytest.mark.skipif("TENSORLINK_SANITIZED" in os.environ, reason="runs from a copy that isn't installed")
def test_entry_points_load() -> None:
    found = metadata.distribution("tensorlink").entry_points
    assert {(point.group, point.name) for point in found} >= {
        ("console_scripts", "tensorlink"),
        ("tensorlink.transports", "local"),
        ("tensorlink.transports", "shm"),
    }
    for point in found:
        assert callable(point.load())


def test_source_distribution_holds_what_a_build_needs(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "sdist", "--formats=tar", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    with tarfile.open(next(tmp_path.glob("*.tar"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    native = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".h")]
    needed = [*(str(path.relative_to(ROOT)) for path in native), "LICENSE", "setup.py", "tensorlink/py.typed"]
    assert [path for path in needed if path not in packed] == []
