"""The layers of the package as data, and a checker that holds a module's AST against them (docs/design.md, Layers)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

# Each module or package has a rank; an import goes to a smaller one. What lies inside a package named here belongs
# together, unless it is named itself. A module that isn't listed fails the test: give it a layer.
RANKS = {
    "errors": 0,
    "_core": 0,
    "recording": 1,
    "flight": 2,
    "version": 0,
    "protocol": 1,
    "network": 1,
    "types": 2,
    "settings": 2,
    "tensors": 3,
    "transfer": 3,
    "hooks": 3,
    "rendezvous": 3,
    "lifecycle": 3,
    "topology": 3,
    "measured": 3,
    "observing": 4,
    "transports.base": 3,
    "transports.engine": 4,  # what transports over the engine share
    "transports.pool": 5,  # what those of one host share beyond that
    "accelerators.base": 3,
    "control": 4,
    "paths": 4,
    "transports.registry": 5,
    "ways": 6,
    "transports": 6,  # the transports, one module each
    "accelerators": 4,
    "links": 7,
    "messages": 8,
    "objects": 8,
    "upkeep": 8,
    "scratch": 8,
    "endpoint": 9,
    "testing": 10,
    "api": 10,
    "weights": 11,
    "doctor": 11,
    "benchmark": 11,
    "integrations": 12,
    "integrations.ray.serializer": 12,
    "integrations.ray.process": 12,
    "integrations.ray.devices": 12,
    "integrations.ray.transport": 13,
    "integrations.ray": 14,
    "": 12,  # tensorlink/__init__.py: the public names
    "cli": 13,
}
SEPARATE = ("transports", "accelerators", "integrations")  # packages whose modules don't import one another
PLUGIN_MAY = {
    "errors",
    "_core",
    "types",
    "network",
    "transports.base",
    "transports.engine",
    "transports.pool",
    "accelerators.base",
}  # all that a transport imports
INFRASTRUCTURE = {
    "transports.base",
    "transports.registry",
    "transports.engine",
    "transports.pool",
    "accelerators.base",
    "accelerators.registry",
}

PURE = {"lifecycle", "paths"}  # decide from what they are given: no I/O, no clock, no threads
IMPURE_IMPORTS = {
    *("asyncio", "concurrent", "ctypes", "grpc", "io", "mmap", "multiprocessing", "os", "pathlib", "random", "select"),
    *("selectors", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time", "torch"),
}
ONLY_IMPORTERS = {  # outside modules, and the only ones of ours that may import them
    "grpc": {"control"},
    "torch": {"tensors", "weights", "integrations", "testing"},
    "ml_dtypes": {"tensors"},
    "ray": {"integrations"},
    "typer": {"cli"},
    "rich": {"cli"},
    "matplotlib": {"cli"},
    "pynvml": {"topology"},
}
OPTIONAL = {
    "torch",
    "ml_dtypes",
    "ray",
    "matplotlib",
    "pynvml",
}  # imported inside functions only: the package works without them

# Calls that a module may make while it is imported: they declare, and touch nothing outside.
DECLARATIONS = {
    *(
        "ContextVar",
        "Literal",
        "Lock",
        "MappingProxyType",
        "NewType",
        "ParamSpec",
        "Path",
        "Struct",
        "TypeVar",
        "Typer",
    ),
    *(
        "ImportError",
        "cast",
        "compile",
        "dataclass",
        "field",
        "frozenset",
        "getLogger",
        "namedtuple",
        "property",
        "tuple",
        "Option",
    ),
    *("Argument", "command", "callback", "wraps", "overload", "dict", "set", "lru_cache"),
    *(
        "parametrize",
        "settings",
        "register_assert_rewrite",
        "Plan",
    ),  # values, pytest and hypothesis, in tensorlink.testing
}
GLOBAL_STATE = {"api"}  # the one current endpoint


@dataclass(frozen=True)
class Violation:
    module: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"tensorlink/{self.module.replace('.', '/') or '__init__'}.py:{self.line}: {self.what}"


def unit(module: str) -> str | None:
    """The listed name that `module` (without `tensorlink.`) belongs to: the longest that is a prefix of it."""
    if not module:
        return ""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in RANKS), None)


def check(module: str, source: str, modules: set[str], plugins: set[str]) -> list[Violation]:
    """Everything in the source of `module` that breaks a rule; `modules` and `plugins` are the names that exist."""
    if unit(module) is None:
        return [Violation(module, 1, "is in no layer: add it to RANKS in tests/layers.py")]
    tree = ast.parse(source)
    found = [
        *_imports(module, tree, modules),
        *(_work_at_import(tree.body) if not module.endswith("__main__") else ()),
        *_globals(module, tree),
        *_plugin_names(module, tree, plugins),
    ]
    return [Violation(module, line, what) for line, what in found]


def _imported(tree: ast.Module, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that is imported, anywhere in the module; names that are modules come in full."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full.removeprefix("tensorlink.") in modules else base


def _imports(module: str, tree: ast.Module, modules: set[str]) -> Iterator[tuple[int, str]]:
    top = unit(module)
    assert top is not None
    early = {id(node) for node in _at_import(tree.body)}
    early_lines = {node.lineno for node in ast.walk(tree) if id(node) in early and isinstance(node, ast.stmt)}
    for line, name in _imported(tree, modules):
        root, _, rest = name.partition(".")
        if root == "":
            yield line, "a relative import: write the whole name"
        elif root == "tensorlink":
            yield from ((line, why) for why in _inner(module, top, rest))
        else:
            allowed = ONLY_IMPORTERS.get(root)
            if top in PURE and root in IMPURE_IMPORTS:
                yield line, f"{top} is pure and may not import {root}"
            elif allowed is not None and top.partition(".")[0] not in allowed:
                yield line, f"only {', '.join(sorted(allowed))} may import {root}"
            elif root in OPTIONAL and line in early_lines and not module.startswith(f"integrations.{root}."):
                yield line, f"{root} is optional: import it in the function that needs it"


def _inner(module: str, top: str, target: str) -> Iterator[str]:
    other = unit(target)
    package = top.partition(".")[0]
    if other is None:
        yield f"tensorlink.{target} is in no layer"
    elif module == target or (other == top and package not in SEPARATE):
        return
    elif package in ("transports", "accelerators") and module not in {package, *INFRASTRUCTURE}:
        if other not in PLUGIN_MAY:
            yield f"a plugin imports only {', '.join(sorted(PLUGIN_MAY))}, not {target}"
    elif other in ("transports", "accelerators") and target not in {other, *INFRASTRUCTURE}:
        yield f"no module names a plugin, not {target} either: the registry finds them"
    elif top in PURE and other == "_core":
        yield f"{top} is pure and may not import _core"
    elif RANKS[other] >= RANKS[top] and not (module == f"{package}.registry" and other == f"{package}.base"):
        way = "up" if RANKS[other] > RANKS[top] else "sideways"
        yield f"an import points {way}: {module or '__init__'} -> {target or '__init__'}"


def _at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes that run while the module is imported: no bodies of functions, no annotations, no TYPE_CHECKING."""
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stack += [*node.decorator_list, *node.args.defaults, *(item for item in node.args.kw_defaults if item)]
        elif isinstance(node, ast.Lambda):
            continue
        elif isinstance(node, ast.AnnAssign):
            stack += [node.value] if node.value else []
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            stack += node.orelse
        else:
            stack += ast.iter_child_nodes(node)


def _work_at_import(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for node in _at_import(body):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            if name not in DECLARATIONS:
                yield node.lineno, f"works while it is imported: calls {name}"
        elif isinstance(node, ast.For | ast.While | ast.With):
            yield node.lineno, f"works while it is imported: {type(node).__name__.lower()}"


def _globals(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if unit(module) in GLOBAL_STATE:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"rebinds global {', '.join(node.names)}: state belongs to an endpoint"


def _plugin_names(module: str, tree: ast.Module, plugins: set[str]) -> Iterator[tuple[int, str]]:
    own = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in plugins and node.value not in own:
            yield node.lineno, f"no module names a plugin, not {node.value!r} either: the registry finds them"
