"""Generates the protobuf code beside its `.proto` files; with `--check`, fails if what is there is out of date."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(ROOT.glob("tensorlink/*/*.proto"))


def generate(into: Path) -> None:
    """Writes `_pb2.py` and `.pyi` of every source, and `_pb2_grpc.py` of those that define services, below `into`."""
    from grpc_tools import protoc

    for source in SOURCES:
        arguments = ["protoc", f"-I{ROOT}", f"--python_out={into}", f"--pyi_out={into}"]
        if "\nservice " in source.read_text():
            arguments.append(f"--grpc_python_out={into}")
        if protoc.main([*arguments, str(source.relative_to(ROOT))]) != 0:
            raise SystemExit(f"protoc failed on {source}")


def stale() -> list[str]:
    """Generated files that are missing or differ from what their sources give now."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = [path for path in Path(scratch).rglob("*") if path.is_file()]
        names = {path: path.relative_to(scratch) for path in fresh}
        return [
            str(name)
            for path, name in names.items()
            if not (ROOT / name).exists() or (ROOT / name).read_bytes() != path.read_bytes()
        ]


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
    elif wrong := stale():
        raise SystemExit(f"out of date: {', '.join(sorted(wrong))}. Run `make proto`")


if __name__ == "__main__":
    main()
