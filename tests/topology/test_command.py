"""`tensorlink topo`, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tensorlink
from tests.topology.machines import NCCL, TABLE

ROOT = Path(tensorlink.__file__).parents[1]


def run(*arguments: str, stdin: str = "", code: str = "pass") -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-c", f"import sys; {code}; from tensorlink.cli import main; main()"]
    return subprocess.run(
        [*start, "topo", *arguments], input=stdin, capture_output=True, text=True, timeout=100, cwd=ROOT, check=False
    )


def test_json_of_what_comes_by_stdin() -> None:
    done = run("--from", "-", "--json", stdin=TABLE)
    said = json.loads(done.stdout)
    assert done.returncode == 0 and said["warnings"] == []
    assert [(one["name"], one["kind"], one["device"]) for one in said["devices"]][2:] == [
        ("NIC0", "nic", "mlx5_0"),
        ("NIC1", "nic", "mlx5_bond_1"),
    ]
    assert said["links"][0] | {"a": "GPU0", "b": "GPU1", "class": "NV18", "bytes_per_s": None} == said["links"][0]


def test_this_machine_and_a_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "topo.xml").write_text(NCCL)
    done = run("--from", str(tmp_path / "topo.xml"), "--plot", str(tmp_path / "out.svg"))
    assert done.returncode == 0 and "nearest NIC mlx5_0 by PIX" in done.stdout, done.stderr
    drawn = "".join(ElementTree.parse(tmp_path / "out.svg").getroot().itertext())
    assert all(word in drawn for word in ("GPU0", "mlx5_0", "NV18, 450 GB/s", "SYS", "200 Gbit/s"))
    assert "NUMA node 0" in run().stdout or "CPU0" in run().stdout


def test_errors_are_one_line(tmp_path: Path) -> None:
    broken = run("--from", "-", stdin="nothing\nof the kind")
    assert broken.returncode == 1 and "line 2, column 1" in broken.stderr and "Traceback" not in broken.stderr
    missing = run("--from", str(tmp_path / "none"))
    assert missing.returncode == 1 and "cannot read" in missing.stderr
    plain = run("--from", "-", "--plot", str(tmp_path / "a.svg"), stdin=TABLE, code="sys.modules['matplotlib'] = None")
    assert plain.returncode == 1 and "tensorlink[plot]" in plain.stderr, plain.stderr
