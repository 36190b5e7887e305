#!/usr/bin/env bash
# Prints how many lines of the code for GPUs the tests on simulated GPUs execute, and the lines that they do not.
#
#     gpu/coverage.sh [PART…]      default: all parts of gpu/fake-driver-check.sh
#
# Needs the component llvm-tools of the toolchain (`rustup component add llvm-tools`), or LLVM of the toolchain's major
# version in $LLVM_TOOLS.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$PWD/target/fake/coverage
tools=${LLVM_TOOLS:-$(echo "$(rustc --print sysroot)"/lib/rustlib/*/bin)}
"$tools/llvm-profdata" --version >/dev/null # before the tests, which take long
rm -rf "$folder" && mkdir -p "$folder"
# Only the crates of this workspace are instrumented. Cargo stores them next to the others.
printf '#!/bin/sh\nexec "$@" -C instrument-coverage\n' >"$folder/instrument" && chmod +x "$folder/instrument"
export RUSTC_WORKSPACE_WRAPPER=$folder/instrument LLVM_PROFILE_FILE=$folder/%8m.profraw

gpu/fake-driver-check.sh "$@"

"$tools/llvm-profdata" merge --sparse "$folder"/*.profraw -o "$folder/merged"
mapfile -t objects < <(awk '{ print "--object=" $2 }' target/fake/binaries)
for code in kernels/src/device/cuda src/comm/nccl; do
    "$tools/llvm-cov" export --format=lcov --instr-profile="$folder/merged" "${objects[0]#--object=}" "${objects[@]:1}" \
        --ignore-filename-regex='(tests|fake_driver)\.rs$|/tests/' --sources "$PWD/$code" | awk -F '[:,]' -v code="$code" '
        function begin(path) {
            file = path; tests = 1e9
            for (line = 1; (getline text < file) > 0; ++line) {
                if (before ~ /^#\[cfg\(test\)\]/ && text ~ /\{$/) tests = line
                before = text
            }
        }
        /^SF/ { begin($2) }
        /^DA/ && $2 < tests { ++lines; if ($3 > 0) ++executed; else missed[file] = missed[file] " " $2 }
        END {
            for (file in missed) print file ":" missed[file]
            printf "%s: %d of %d lines executed, %.1f %%\n", code, executed, lines, 100 * executed / lines
        }'
done
