#!/usr/bin/env bash
# Runs Python tests on a core built under a sanitizer. Usage: tools/sanitize.sh address|thread [pytest arguments]
#
# `address` is ASan with UBSan. The build lies in a copy of the sources under build/, so the usual core stays as it is.
# Reports go to files, since child processes' output is often swallowed; any report is a failure. GCC's UBSan knows no such
# file beside ASan: it prints to stderr, which pytest therefore doesn't capture, and ends the process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
kind=$1
shift
python=${PYTHON:-$root/.venv/bin/python}
case $python in */*) python=$(realpath -s "$python") ;; esac
copy=$root/build/sanitize-$kind
reports=$copy/reports

mkdir -p "$copy"
for part in *; do
    case $part in build | dist | *.egg-info) continue ;; esac
    rm -rf "${copy:?}/$part"
    cp -a "$part" "$copy/" # -a: old dates, so that only what changed is compiled again
done
find "$copy/tensorlink" -name '*.so' -delete
rm -rf "$reports"
mkdir "$reports"
cd "$copy"

case $kind in
address) flags=address,undefined runtime=libasan.so ;;
thread) flags=thread runtime=libtsan.so ;;
*) echo "unknown sanitizer: $kind" >&2 && exit 2 ;;
esac
TENSORLINK_SANITIZE=$flags "$python" setup.py --quiet build_ext --build-lib lib --build-temp objects
cp lib/tensorlink/_core*.so tensorlink/

# The runtime must come first in a process whose executable was built without it; libstdc++ with it, or ASan finds no
# __cxa_throw to wrap. CPython frees little at exit, so leaks of memory are left to the tests.
library() { realpath "$("${CXX:-c++}" -print-file-name="$1")"; }
export LD_PRELOAD="$(library $runtime) $(library libstdc++.so)"
export ASAN_OPTIONS="detect_leaks=0:abort_on_error=1:log_path='$reports/asan'"
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS="history_size=7:halt_on_error=0:suppressions='$copy/tools/tsan.supp':log_path='$reports/tsan'"
export PYTHONPATH=$copy PYTHONMALLOC=malloc TENSORLINK_SANITIZED=$kind

# TSan of older compilers can't place its shadow memory where address space is randomized much: switch that off.
fixed=
if setarch -R true 2>/dev/null; then fixed="setarch -R"; fi
status=0
$fixed "$python" -m pytest -p no:cacheprovider --capture=sys -o timeout=600 "$@" || status=$?
unset LD_PRELOAD
if [ -n "$(ls -A "$reports")" ]; then
    head -n 100 "$reports"/*
    echo "$kind sanitizer: reports in $reports" >&2
    exit 1
fi
exit $status
