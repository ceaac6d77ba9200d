"""Builds the C++ core. Everything else about the package is in pyproject.toml."""

import os
import platform
from pathlib import Path

import nanobind
from setuptools import Extension, setup

NANOBIND = Path(nanobind.__file__).parent
SANITIZE = os.environ.get("TENSORLINK_SANITIZE", "")  # "address,undefined" or "thread", for `make sanitize`

flags = ["-std=c++17", "-fvisibility=hidden", "-fno-strict-aliasing", "-Wall", "-Wextra", "-g1"]
link = []
if SANITIZE:
    flags += ["-O1", f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    link += [f"-fsanitize={SANITIZE}"]
else:
    flags += ["-O3", "-DNDEBUG"]
if platform.system() == "Linux":
    link += ["-pthread", "-ldl"]  # dlopen is in a library of its own until glibc 2.34

setup(
    ext_modules=[
        Extension(
            "tensorlink._core",
            sources=sorted(str(path) for path in Path("csrc").rglob("*.cpp") if not {"fuzz", "test"} & {*path.parts}),
            include_dirs=[
                "csrc",
                str(NANOBIND / "include"),
                str(NANOBIND / "src"),
                str(NANOBIND / "ext" / "robin_map" / "include"),
            ],
            depends=sorted(str(path) for path in Path("csrc").rglob("*.h")),
            extra_compile_args=flags,
            extra_link_args=link,
            define_macros=[("NB_COMPACT_ASSERTIONS", "1")],
            language="c++",
        )
    ],
)
