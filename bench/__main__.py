"""`python -m bench [arguments of pytest]`: measures, then prints the table. BENCH_ROUNDS sets how often all take turns."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from bench.report import report

HERE = Path(__file__).parent


def main(arguments: list[str]) -> int:
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tl-bench-") as runtime:
        written = Path(runtime) / "benchmarks.json"
        options = ["-q", "--timeout=900", "--benchmark-columns=median,rounds", f"--benchmark-json={written}"]
        status = pytest.main([str(HERE), *options, *arguments])
        if written.exists() and written.stat().st_size:
            report(written, results)
            print(f"written: {results}/ratios.json, ratios.png")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
