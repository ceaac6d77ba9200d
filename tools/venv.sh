#!/usr/bin/env bash
# Makes .venv with the package (editable) and one of its extras at the versions of constraints.txt, and rebuilds the core
# where a source changed; does nothing, quickly, when all is so already.
# Usage: tools/venv.sh EXTRA (demo, test, bench, dev). PYTHON names the interpreter to use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=$1
venv=.venv

usable() { # a CPython in our range that can make environments and compile extensions
    command -v "$1" >/dev/null && "$1" - >/dev/null 2>&1 <<'PY'
import ensurepip, os, sys, sysconfig, venv
assert sys.version_info >= (3, 11)
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
PY
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 /usr/bin/python3.11 python3 python3.12 python3.13; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "tools/venv.sh: no Python >= 3.11 with its venv module and headers (Debian: python3 python3-venv python3-dev)." >&2
    echo "Name another with PYTHON=..." >&2
    return 1
}

# An environment holds absolute paths, so a moved checkout needs a new one. The interpreter may have gone as well.
if [ "$(cat $venv/.root 2>/dev/null)" != "$PWD" ] || ! $venv/bin/python -c '' 2>/dev/null; then
    rm -rf $venv
    python=$(find_python)
    echo "making $venv with $("$python" -V)"
    "$python" -m venv $venv
    pwd >$venv/.root
fi

# One line for each extra that is installed; all of them go when what they were made from changes.
wanted=$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)
if ! grep -qsxE "($extra|dev) $wanted" $venv/.installed; then # dev has all
    command -v "${CXX:-c++}" >/dev/null || { echo "tools/venv.sh: no C++ compiler (Debian: g++)" >&2; exit 1; }
    echo "installing tensorlink[$extra] and building its core (minutes the first time)"
    pip() { $venv/bin/python -m pip --no-input --disable-pip-version-check install --quiet --constraint constraints.txt "$@"; }
    pip setuptools nanobind # what builds the core, pinned too: hence no build isolation below
    pip --no-build-isolation --editable ".[$extra]"
    grep -qsF "$wanted" $venv/.installed || : >$venv/.installed
    echo "$extra $wanted" >>$venv/.installed
fi

if ! compgen -G "tensorlink/_core*.so" >/dev/null || [ -n "$(find csrc setup.py -newer $venv/.core -print -quit 2>&1)" ]; then
    $venv/bin/python setup.py --quiet build_ext --inplace
    touch $venv/.core
fi
