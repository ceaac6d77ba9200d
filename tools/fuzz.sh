#!/usr/bin/env bash
# Fuzzes the native parsers of what peers send, each for a while. Usage: tools/fuzz.sh SECONDS [HARNESS...]
#
# With libFuzzer where clang++ has it, and else with the driver in csrc/fuzz/main.cpp, which knows nothing of coverage; both under
# ASan and UBSan. What is made lies under build/fuzz: there a corpus grows, and inputs that ended a program stay as *crash-*. Such an
# input goes to tests/fuzz/corpus/HARNESS/found-WHAT with the mending. Others may drive csrc/fuzz/*_fuzz.cpp with core.cpp, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
seconds=${1:?seconds}
shift
harnesses=("$@")
if [ $# = 0 ]; then
    for file in csrc/fuzz/*_fuzz.cpp; do harnesses+=("$(basename "$file" _fuzz.cpp)"); done
fi
made=$PWD/build/fuzz
mkdir -p "$made"
flags="-std=c++17 -O1 -g1 -fno-strict-aliasing -pthread -fsanitize=address,undefined -fno-sanitize-recover=all"

find_clang() { # one that has the runtime of libFuzzer, too
    local candidate
    for candidate in ${CLANG:-clang++} clang++-{22..14}; do
        if echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
            "$candidate" -x c++ -fsanitize=fuzzer,address - -o "$made/probe" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

with_libfuzzer() {
    "$clang" $flags -fsanitize=fuzzer-no-link -c csrc/fuzz/core.cpp -o "$made/core.o"
    local name
    for name in "${harnesses[@]}"; do
        "$clang" $flags -fsanitize=fuzzer "csrc/fuzz/${name}_fuzz.cpp" "$made/core.o" -o "$made/$name"
    done
    for name in "${harnesses[@]}"; do
        mkdir -p "$made/corpus/$name"
        echo "== $name"
        "$made/$name" -max_total_time="$seconds" -timeout=20 -malloc_limit_mb=64 -rss_limit_mb=1024 -max_len=4096 -print_final_stats=1 \
            -verbosity=${VERBOSITY:-0} -artifact_prefix="$made/$name-" "$made/corpus/$name" "tests/fuzz/corpus/$name" || status=1
    done
}

with_our_driver() {
    "${CXX:-g++}" $flags csrc/fuzz/main.cpp -o "$made/fuzz"
    local name
    for name in "${harnesses[@]}"; do
        (cd "$made" && ./fuzz "$name" "$seconds" "${SEED:-$RANDOM}" "$OLDPWD/tests/fuzz/corpus/$name"/*) || status=1
    done
}

status=0
clang=$(find_clang)
if [ -n "$clang" ]; then with_libfuzzer; else with_our_driver; fi
[ $status = 0 ] || echo "inputs that ended a program: $(echo "$made"/*crash* "$made"/*-{leak,oom,timeout}-*)" >&2
exit $status
