"""`tensorlink topo`, as a user runs it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tensorlink
from tensorlink.cli import main
from tests.topology.machines import NCCL, TABLE

ROOT = Path(tensorlink.__file__).parents[1]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, from its entry point: a process of its own takes a second and more to import."""

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["tensorlink", "topo", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return subprocess.CompletedProcess(sys.argv, int(caught.value.code or 0), said.out, said.err)

    return run


def process(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "tensorlink.cli", "topo", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=100, cwd=ROOT, check=False)


def test_json_of_what_comes_by_stdin() -> None:
    done = process("--from", "-", "--json", stdin=TABLE)
    said = json.loads(done.stdout)
    assert done.returncode == 0 and said["warnings"] == []
    assert [(one["name"], one["kind"], one["device"]) for one in said["devices"]][2:] == [
        ("NIC0", "nic", "mlx5_0"),
        ("NIC1", "nic", "mlx5_bond_1"),
    ]
    assert said["links"][0] | {"a": "GPU0", "b": "GPU1", "class": "NV18", "bytes_per_s": None} == said["links"][0]


def test_this_machine_and_a_drawing(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "topo.xml").write_text(NCCL)
    done = process("--from", str(tmp_path / "topo.xml"), "--plot", str(tmp_path / "out.svg"))  # keeps its fonts open
    assert done.returncode == 0 and "nearest NIC mlx5_0 by PIX" in done.stdout, done.stderr
    drawn = "".join(ElementTree.parse(tmp_path / "out.svg").getroot().itertext())
    assert all(word in drawn for word in ("GPU0", "mlx5_0", "NV18, 450 GB/s", "SYS", "200 Gbit/s"))
    assert any(word in run().stdout for word in ("NUMA node 0", "CPU0"))


def test_errors_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = run("--from", "-", stdin="nothing\nof the kind")
    assert broken.returncode == 1 and "line 2, column 1" in broken.stderr and "Traceback" not in broken.stderr
    cut = run("--from", "-", stdin=NCCL[:-20])
    assert cut.returncode == 1 and "line 16, column 13" in cut.stderr and cut.stdout == ""
    missing = run("--from", str(tmp_path / "none"))
    assert missing.returncode == 1 and "cannot read" in missing.stderr
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plain = run("--from", "-", "--plot", str(tmp_path / "a.svg"), stdin=TABLE)
    assert plain.returncode == 1 and "tensorlink[plot]" in plain.stderr, plain.stderr
