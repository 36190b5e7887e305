#!/usr/bin/env bash
# Runs all GPU checks from a folder built by `gpu/build.sh`, and writes a JSON report: status (passed, failed, or not
# run with a reason), time and last output of each check. A check that passes without using a GPU counts as not run;
# lib/libwitness.so detects this.
#
#     ./check.sh [RESULTS]          RESULTS: folder for report.json and logs, default `results`
#
# Exit code: 0 no check failed, 1 a check failed, 2 this machine cannot run any check.
set -euo pipefail

folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "${1:-$folder/results}"
results=$(cd "${1:-$folder/results}" && pwd)
cd "$folder"
# shellcheck source=gpu/libraries.sh
source ./libraries.sh

LIMIT_S=900
OUTPUT_LINES=60
checks_json=()
declare -A count=([passed]=0 [failed]=0 ["not run"]=0)

# Environment of the tests: device, fixtures and number of test threads.
export ULYSSES_TEST_DEVICE=cuda CARGO_MANIFEST_DIR=$folder RUST_TEST_THREADS=4

run_checks() {
    check devices nvidia-smi --query-gpu=index,name,compute_cap,memory.total,driver_version --format=csv,noheader

    # Test binaries: NAME BINARY FILTER… runs the tests whose names contain a filter.
    tests kernels_and_ops kernels
    tests library ulysses
    tests comm_conformance_threads comm conformance::threads
    nccl_tests 1
    nccl_tests 2
    tests golden parity golden::
    tests mesh_invariance parity mesh_invariance::
    tests precision_16_bits parity precision::
    tests zero_parity zero stages::
    tests exchange_volume comm exchange_volume::

    check main_job bin/ulysses train configs/long_sequence.json --device cuda --data text --output "$results/main_job"

    check bench_kernels bin/bench_kernels
    check bench_train bin/ulysses bench train --device cuda
    check bench_all_to_all bin/ulysses bench all-to-all --device cuda
    check bench_attention bin/ulysses bench attention --device cuda
    pytorch_peer
}

main() {
    require_gpu
    unpack
    require_libraries
    run_checks
    write_report
    echo "${count[passed]} passed, ${count[failed]} failed, ${count["not run"]} not run: $results/report.json"
    ((count[failed] == 0))
}

cannot() {
    echo "check.sh: $*" >&2
    exit 2
}

require_gpu() {
    command -v nvidia-smi >/dev/null ||
        cannot "this machine has no NVIDIA driver (there is no nvidia-smi), so nothing was run"
    nvidia-smi -L 2>/dev/null | grep -q '^GPU ' ||
        cannot "nvidia-smi lists no GPU on this machine, so nothing was run"
}

# The binaries share most of their bytes, so they are in one archive.
unpack() {
    [[ -d bin ]] && return
    echo "unpacking bin.tar.xz …" >&2
    rm -rf unpacking
    mkdir unpacking
    tar -xJf bin.tar.xz -C unpacking 2>/dev/null || python3 -m tarfile -e bin.tar.xz unpacking ||
        cannot "bin.tar.xz could not be unpacked: that needs tar with xz, or python3"
    mv unpacking/bin bin
    rmdir unpacking
}

require_libraries() {
    local missing
    missing=$({ ldd bin/* 2>/dev/null || true; } | sed -n 's/^[[:space:]]*\([^ ]*\) => not found$/\1/p' | sort -u | paste -sd' ')
    [[ -z $missing ]] || cannot "these libraries are missing, so nothing was run: $missing. They come with a" \
        "driver (libcuda), and with the toolkit or PyTorch of the CUDA release in BUILD; add their folders to LD_LIBRARY_PATH"
}

# Runs a command of this folder or the system: name $1, command $2…
check() {
    local name=$1 command=${*:2} log=$results/$1.log started=$SECONDS code=0
    export ULYSSES_GPU_WITNESS=$results/$1.launches
    rm -f "$log" "$ULYSSES_GPU_WITNESS"
    if [[ $2 == bin/* && ! -x $2 ]]; then
        record "$name" "not run" "not built: the folder has no $2" 0 "$command"
        return
    fi
    echo "$name …" >&2
    LD_PRELOAD=$folder/lib/libwitness.so timeout "$LIMIT_S" "${@:2}" >"$log" 2>&1 </dev/null || code=$?
    judge "$name" "$code" $((SECONDS - started)) "$command"
}

# Records the result of check $1 from its exit code $2, seconds $3 and command $4.
judge() {
    local log=$results/$1.log
    if (($2 == 124)); then
        record "$1" failed "not done after $LIMIT_S s" "$3" "$4"
    elif (($2 != 0)); then
        record "$1" failed "exit code $2" "$3" "$4"
    elif grep -q '^running 0 tests' "$log" && ! grep -q '^running [1-9]' "$log"; then
        record "$1" "not run" "the folder's build has no such tests" "$3" "$4"
    elif [[ $4 == *bin/* && ! -f $ULYSSES_GPU_WITNESS ]]; then
        record "$1" "not run" "it passed without using a GPU" "$3" "$4"
    else
        record "$1" passed "" "$3" "$4"
    fi
}

# Runs the tests of a binary: name $1, binary $2, filters $3…
tests() {
    check "$1" "bin/test_$2" "${@:3}"
}

# Runs the backend's conformance suite with $1 ranks, if the machine and its NCCL support it.
nccl_tests() {
    local name=comm_conformance_nccl_$1_ranks version gpus
    version=$(nccl_version) gpus=$(nvidia-smi -L | grep -c '^GPU ')
    if [[ -z $version ]]; then
        record "$name" "not run" "libnccl.so.2 was not found" 0 ""
    elif (($1 > gpus)) && ! at_least 2.30 "$version"; then
        record "$name" "not run" "$1 ranks on $gpus GPU need NCCL 2.30, here is $version" 0 ""
    else
        check "$name" env ULYSSES_TEST_NCCL_RANKS="$1" NCCL_MULTI_RANK_GPU_ENABLE=1 bin/test_comm conformance::nccl
    fi
}

nccl_version() {
    local file
    file=$({ ldd bin/test_comm 2>/dev/null || true; } | sed -n 's/.*libnccl\.so\.2 => \([^ ]*\) .*/\1/p')
    [[ ! -f $file ]] || grep -ao 'NCCL version [0-9][0-9.]*' "$file" | head -n 1 | grep -o '[0-9.]*$' || true
}

at_least() { # version $1 <= version $2
    [[ $(printf '%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]
}

pytorch_peer() {
    if ! command -v python3 >/dev/null; then
        record pytorch_peer "not run" "there is no python3" 0 ""
    elif ! python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        record pytorch_peer "not run" "python3 has no PyTorch that sees a GPU" 0 ""
    else
        check pytorch_peer python3 pytorch_peer.py
    fi
}

# Records a result: name $1, status $2, reason $3, seconds $4, command $5.
record() {
    local log=$results/$1.log output="" launches=null
    [[ ! -f $log ]] || output=$(tail -n "$OUTPUT_LINES" "$log")
    [[ ! -s $results/$1.launches ]] || launches=$(<"$results/$1.launches")
    count[$2]=$((count[$2] + 1))
    checks_json+=("$(printf '{"name": %s, "status": %s, "reason": %s, "seconds": %d, "kernel_launches": %s, "command": %s, "output": %s}' \
        "$(json "$1")" "$(json "$2")" "$(json "$3")" "$4" "$launches" "$(json "$5")" "$(json "$output")")")
    printf '%-9s %s%s\n' "$2" "$1" "${3:+ ($3)}" >&2
}

json() { # text $1 as a JSON string
    local text=${1//\\/\\\\}
    text=${text//\"/\\\"} text=${text//$'\n'/\\n} text=${text//$'\t'/\\t}
    printf '"%s"' "$(printf '%s' "$text" | tr -d '\000-\037')"
}

write_report() {
    local i
    {
        printf '{\n  "date": %s,\n  "build": %s,\n' "$(json "$(date -u +%Y-%m-%dT%H:%M:%SZ)")" "$(json "$(<BUILD)")"
        printf '  "devices": %s,\n  "nccl": %s,\n' "$(json "$(nvidia-smi -L)")" "$(json "$(nccl_version)")"
        printf '  "passed": %d,\n  "failed": %d,\n  "not_run": %d,\n  "checks": [\n' \
            "${count[passed]}" "${count[failed]}" "${count["not run"]}"
        for i in "${!checks_json[@]}"; do
            printf '    %s%s\n' "${checks_json[i]}" "$( ((i + 1 < ${#checks_json[@]})) && echo ,)"
        done
        printf '  ]\n}\n'
    } >"$results/report.json"
}

main
