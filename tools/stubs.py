"""Writes tensorlink/_core.pyi from the compiled core, or, with --check, fails when it is out of date."""

from __future__ import annotations

import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUB = ROOT / "tensorlink" / "_core.pyi"


def generate() -> str:
    """The stub of the core as it is compiled now."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "_core.pyi"
        command = [sys.executable, "-m", "nanobind.stubgen", "--quiet", "-m", "tensorlink._core", "-o", str(target)]
        subprocess.run(command, cwd=ROOT, check=True)
        return target.read_text().rstrip() + "\n"


def main(arguments: list[str]) -> int:
    fresh = generate()
    if arguments != ["--check"]:
        STUB.write_text(fresh)
        return 0
    kept = STUB.read_text() if STUB.exists() else ""
    if kept == fresh:
        return 0
    sys.stdout.writelines(difflib.unified_diff(kept.splitlines(True), fresh.splitlines(True), "kept", "generated"))
    print(f"{STUB.relative_to(ROOT)} is out of date: run `make stubs` and commit it")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
