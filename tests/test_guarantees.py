"""The tests that `docs/guarantees.md` names exist."""

from __future__ import annotations

import ast
import re

from tests.peer import ROOT

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_each_promise_names_tests_that_exist() -> None:
    lines = (ROOT / "docs/guarantees.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("|") and not line.startswith(("|---", "| promise"))]
    assert len(rows) > 20
    for row in rows:
        named = NAMED.findall(row)
        assert named, f"no test holds this: {row}"
        missing = [f"{path}::{name}" for path, name in named if name not in names_in(path)]
        assert not missing, f"there is no such test: {missing}"
