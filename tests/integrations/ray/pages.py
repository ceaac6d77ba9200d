"""docs/ray.md and examples/ray_rdt.py as a reader runs them, each with a Ray of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import make_runtime_dir
from tests.integrations.ray.clusters import ROOT, environment

pytest.importorskip("ray")
pytest.importorskip("torch")


@pytest.fixture
def folder() -> Iterator[Path]:
    yield (made := make_runtime_dir())
    subprocess.run(["rm", "-rf", str(made)], check=True)


def run(script: Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(script)],
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        | environment(folder, lease_s=60)
        | {"RAY_TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_snippets_of_the_page(folder: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/ray.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) == 4
    script = folder / "page.py"
    script.write_text("\n".join(snippets))
    run(script, folder)


def test_the_example(folder: Path) -> None:
    out = run(ROOT / "examples/ray_rdt.py", folder)
    assert re.findall(r"^(\w+): [\d.]+ ms$", out, re.MULTILINE) == ["by_object_store", "by_tensorlink"]
