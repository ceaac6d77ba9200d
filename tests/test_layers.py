"""Imports point down, never up or sideways; modules do no work while they are imported; nobody names a plugin."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.layers import RANKS, check, unit

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tensorlink"


def module_name(path: Path) -> str:
    """`transports.shm` for tensorlink/transports/shm.py, `transports` for its __init__, '' for the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


GENERATED = ("_pb2", "_pb2_grpc")
SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if not path.stem.endswith(GENERATED)}
MODULES = {"_core"} | {module_name(path) for path in PACKAGE.rglob("*.py")}
ENTRY_POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
PLUGINS = {name for group in ENTRY_POINTS.values() for name in group}


@pytest.mark.parametrize("module", SOURCES)
def test_module_keeps_to_its_layer(module: str) -> None:
    violations = check(module, SOURCES[module].read_text(), MODULES, PLUGINS)
    assert not violations, "\n".join(map(str, violations))


VIOLATIONS = {
    "up": ("types", "from tensorlink.endpoint import Endpoint", "points up"),
    "up, inside a function": ("errors", "def f():\n    import tensorlink.types", "points up"),
    "up, of a module as a name": ("settings", "from tensorlink import endpoint", "points up"),
    "sideways": ("types", "from tensorlink.settings import Settings", "sideways"),
    "the public face from inside": ("endpoint", "import tensorlink", "points up"),
    "relative": ("endpoint", "from .types import PeerId", "relative"),
    "grpc outside control": ("endpoint", "import grpc", "only control may import grpc"),
    "grpc, a name of it": ("weights", "from grpc import aio", "only control may import grpc"),
    "torch at import": ("tensors", "import torch", "optional"),
    "torch in the wrong place": ("endpoint", "def f():\n    import torch", "may import torch"),
    "a transport and another": ("transports.shm", "from tensorlink.transports.local import X", "a plugin imports only"),
    "a transport and control": ("transports.shm", "from tensorlink.control import X", "a plugin imports only"),
    "a transport and settings": ("transports.shm", "from tensorlink.settings import X", "a plugin imports only"),
    "an import of a plugin": ("endpoint", "from tensorlink.transports.shm import X", "names a plugin"),
    "an import of a plugin as a name": ("endpoint", "from tensorlink.transports import shm", "names a plugin"),
    "the registry and a plugin": ("transports.registry", "import tensorlink.transports.shm", "names a plugin"),
    "a string that names a plugin": ("endpoint", "def f(x):\n    return x == 'shm'", "names a plugin"),
    "impure lifecycle": ("lifecycle", "import time", "pure"),
    "impure paths": ("paths", "from os import environ", "pure"),
    "pure and the core": ("paths", "from tensorlink import _core", "pure"),
    "a call at import": ("types", "import os\nHOME = os.getenv('HOME')", "calls getenv"),
    "a call in a class body": ("types", "class A:\n    x = open('f')", "calls open"),
    "a call in a default": ("types", "def f(x=open('f')): ...", "calls open"),
    "a loop at import": ("types", "for i in (1, 2):\n    pass", "for"),
    "global state": ("endpoint", "x = None\ndef f():\n    global x\n    x = 1", "rebinds global"),
    "an unknown module": ("helpers", "", "no layer"),
    "an import of an unknown module": ("endpoint", "import tensorlink.helpers", "no layer"),
}


@pytest.mark.parametrize(("module", "source", "message"), VIOLATIONS.values(), ids=list(VIOLATIONS))
def test_violation_is_caught(module: str, source: str, message: str) -> None:
    modules = {"endpoint", "types", "_core", "transports.shm", "transports.local"}
    violations = check(module, source, modules, {"shm", "local"})
    assert [message in str(violation) for violation in violations] == [True], violations


ALLOWED = {
    "down": ("endpoint", "from tensorlink.types import PeerId\nfrom tensorlink.control import client"),
    "inside a package": ("control.client", "from tensorlink.control.service import X\nimport grpc"),
    "a transport": ("transports.shm", "from tensorlink import _core\nfrom tensorlink.transports.base import Transport"),
    "a transport's own name": ("transports.shm", "class A:\n    name = 'shm'"),
    "the registry": ("transports.registry", "from tensorlink.transports.base import Transport"),
    "the endpoint and the registry": ("endpoint", "from tensorlink.transports import registry"),
    "torch where needed": ("tensors", "def f():\n    import torch"),
    "torch for types": ("tensors", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
    "declarations": ("types", "import re\nX = re.compile('x')\n\ndef f():\n    return open('f')"),
    "current endpoint": ("api", "_current = None\ndef f():\n    global _current\n    _current = 1"),
    "public names": ("", "from tensorlink.api import init\nfrom tensorlink.errors import ClosedError"),
}


@pytest.mark.parametrize(("module", "source"), ALLOWED.values(), ids=list(ALLOWED))
def test_good_module_passes(module: str, source: str) -> None:
    modules = {"endpoint", "control", "transports", "transports.registry", "transports.base", "_core", "transports.shm"}
    assert check(module, source, modules, {"shm", "local"}) == []


def test_units() -> None:
    assert unit("control.client") == "control"
    assert unit("transports.base") == "transports.base"
    assert unit("transports.shm") == "transports"
    assert unit("nowhere") is None
    assert RANKS["errors"] < RANKS["protocol"] < RANKS["types"] < RANKS["endpoint"] < RANKS["api"]


CORE = sorted(name for name in SOURCES if not name.startswith(("cli", "integrations")))
# What isn't ours is imported once, by the process that all the others are forked from: it takes most of the time.
IMPORT_EACH = """
import json, os, sys
for name in ('torch', 'ml_dtypes', 'typer', 'rich', 'matplotlib', 'ray', 'psutil', 'pynvml'): sys.modules[name] = None
import asyncio, grpc.aio, google.protobuf.message, hypothesis, numpy, pytest
failed = []
for name in sys.argv[1:]:
    if not (pid := os.fork()):
        try:
            __import__(name)
        except BaseException as error:
            print(f"{name}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        failed.append(name)
assert not [name for name in sys.modules if name.partition(".")[0] == "tensorlink"]
print(json.dumps(failed))
"""


@pytest.fixture(scope="module")
def imported() -> tuple[list[str], str]:
    """The modules that cannot be imported, and what was said."""
    names = [f"tensorlink.{module}".rstrip(".") for module in CORE]
    command = [sys.executable, "-W", "error", "-c", IMPORT_EACH, *names]
    done = subprocess.run(command, cwd=ROOT, timeout=110, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("module", CORE)
def test_imports_without_anything_optional(imported: tuple[list[str], str], module: str) -> None:
    """Each module, alone in a process that has none of the others, where importing an optional package fails."""
    failed, said = imported
    assert f"tensorlink.{module}".rstrip(".") not in failed, said
