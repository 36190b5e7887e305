#!/usr/bin/env bash
# Runs the GPU checks of a folder built by `gpu/build.sh`, cheap ones first, and writes a JSON report: status (passed,
# failed, or not run with a reason), time, last output and figures of each check. `gpu/tables.py` makes the tables of
# docs/gpu.md from it. A check that passes without using a GPU counts as not run; lib/libwitness.so detects this.
#
#     ./check.sh [--only PATTERN] [--again] [RESULTS]
#
# RESULTS: folder for report.json and logs, default `results`. Checks that passed there are not repeated, except with
# --again. PATTERN: names of the checks to run, such as 'bench_*'.
#
# Exit code: 0 no check failed, 1 a check failed, 2 this machine cannot run any check.
set -euo pipefail

folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
only='*' again=false results=$folder/results
while (($#)); do
    case $1 in
    --only) only=${2:?--only needs a pattern} && shift ;;
    --again) again=true ;;
    -*) echo "check.sh: unknown option $1" >&2 && exit 2 ;;
    *) results=$1 ;;
    esac
    shift
done
mkdir -p "$results"
results=$(cd "$results" && pwd)
cd "$folder"
# shellcheck source=gpu/libraries.sh
source ./libraries.sh

LIMIT_S=900
OUTPUT_LINES=60
SEQ_LENS=(4096 16384 32768)
# Attention of Llama 3 8B.
HEADS=(--num-heads 32 --num-kv-heads 8 --head-dim 128)
# Attention of Llama 3.2 1B.
HEADS_OF_64=(--num-heads 32 --num-kv-heads 8 --head-dim 64)
names=()

# Environment of the tests: device, fixtures and number of test threads.
export ULYSSES_TEST_DEVICE=cuda CARGO_MANIFEST_DIR=$folder RUST_TEST_THREADS=4

run_checks() {
    check devices nvidia-smi --query-gpu=index,name,compute_cap,memory.total,driver_version --format=csv,noheader
    check doctor bin/ulysses doctor
    sanitizers

    # Test binaries: NAME BINARY FILTER… runs the tests whose names contain a filter.
    tests golden parity golden::
    tests exchange_volume comm exchange_volume::
    tests comm_conformance_threads comm conformance::threads
    nccl_tests 1
    nccl_tests 2
    nccl_suite golden_nccl parity golden::
    tests zero_parity zero stages::
    tests kernels_and_ops kernels
    tests precision_16_bits parity precision::
    tests mesh_invariance parity mesh_invariance::
    tests library ulysses
    check main_job bin/ulysses train configs/long_sequence.json --device cuda --backend thread --data text \
        --output "$results/main_job"

    local seq_len
    measure bench_all_to_all bin/ulysses bench all-to-all --device cuda
    for seq_len in "${SEQ_LENS[@]}"; do
        measure "bench_attention_$seq_len" bin/ulysses bench attention --device cuda --dtype bf16 "${HEADS[@]}" \
            --seq-len "$seq_len" --repeats 5
        measure "bench_tiled_attention_$seq_len" bin/ulysses bench attention --device cuda --dtype bf16 "${HEADS[@]}" \
            --seq-len "$seq_len" --repeats 5 --kernels tiled
        measure "bench_fused_attention_$seq_len" bin/ulysses bench attention --device cuda --dtype bf16 "${HEADS[@]}" \
            --seq-len "$seq_len" --repeats 5 --kernels fused
        measure "bench_attention_of_heads_of_64_$seq_len" bin/ulysses bench attention --device cuda --dtype bf16 \
            "${HEADS_OF_64[@]}" --seq-len "$seq_len" --repeats 5
        measure "bench_layer_$seq_len" bin/ulysses bench train --device cuda --dtype bf16 --model llama3-8b \
            --num-layers 1 --vocab-size 256 --seq-len "$seq_len" --repeats 5
        pytorch_peer "$seq_len"
    done
    measure bench_train bin/ulysses bench train --device cuda --dtype bf16 --seq-len 16384
    check bench_kernels bin/bench_kernels
}

main() {
    require_gpu
    unpack
    require_libraries
    run_checks
    write_report
    echo "$(count passed) passed, $(count failed) failed, $(count "not run") not run: $results/report.json"
    (($(count failed) == 0))
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
    is_wanted "$1" || return 0
    local name=$1 log=$results/$1.log
    run_logged "$name" "$log" "${@:2}"
}

# Runs a benchmark, which prints one JSON object: name $1, command $2…
measure() {
    is_wanted "$1" || return 0
    run_logged "$1" "$results/$1.json" "${@:2}" --json
}

# Notes that there is a check $1. Returns whether to run it now.
is_wanted() {
    names+=("$1")
    # shellcheck disable=SC2053 # A pattern.
    [[ $1 == $only ]] || return 1
    if [[ $again == false ]] && grep -qs '"status": "passed"' "$results/$1.check"; then
        echo "$1 passed before" >&2
        return 1
    fi
    rm -f "$results/$1".{check,json,log,launches}
}

# Runs check $1 with its standard output in file $2 and everything else in its log: command $3…
run_logged() {
    local name=$1 command=${*:3} log=$results/$1.log started=$SECONDS code=0
    export ULYSSES_GPU_WITNESS=$results/$1.launches
    if [[ $3 == bin/* && ! -x $3 ]]; then
        record "$name" "not run" "not built: the folder has no $3" 0 "$command"
        return
    fi
    echo "$name …" >&2
    LD_PRELOAD=$folder/lib/libwitness.so timeout "$LIMIT_S" "${@:3}" >>"$2" 2>>"$log" </dev/null || code=$?
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

# Runs the comparison of the fused with the tiled attention kernels under each tool of compute-sanitizer, if the machine has
# it. In an empty cache, since an earlier result would save the comparison.
sanitizers() {
    local tool
    for tool in memcheck racecheck synccheck; do
        if command -v compute-sanitizer >/dev/null; then
            rm -rf "$results/cache_$tool"
            check "sanitizer_$tool" env XDG_CACHE_HOME="$results/cache_$tool" compute-sanitizer --tool "$tool" \
                --error-exitcode 9 bin/ulysses bench attention --device cuda --dtype bf16 --seq-len 300 --repeats 1
        else
            record_unless_skipped "sanitizer_$tool" "compute-sanitizer was not found; the CUDA toolkit has it"
        fi
    done
}

# Runs the backend's conformance suite with $1 ranks, if the machine and its NCCL support it.
nccl_tests() {
    local name=comm_conformance_nccl_$1_ranks version gpus
    version=$(nccl_version) gpus=$(nvidia-smi -L | grep -c '^GPU ')
    if [[ -z $version ]]; then
        record_unless_skipped "$name" "libnccl.so.2 was not found"
    elif (($1 > gpus)) && ! at_least 2.30 "$version"; then
        record_unless_skipped "$name" "$1 ranks on $gpus GPU need NCCL 2.30, here is $version"
    else
        check "$name" env ULYSSES_TEST_NCCL_RANKS="$1" NCCL_MULTI_RANK_GPU_ENABLE=1 bin/test_comm conformance::nccl
    fi
}

# Runs a suite over NCCL, with a GPU per rank: name $1, binary $2, filters $3…
nccl_suite() {
    if (($(nvidia-smi -L | grep -c '^GPU ') < 8)); then
        record_unless_skipped "$1" "its meshes have up to 8 ranks, with a GPU each"
    else
        check "$1" env ULYSSES_TEST_DEVICE=nccl "bin/test_$2" "${@:3}"
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

# PyTorch on the same shapes, at length $1.
pytorch_peer() {
    local name=pytorch_$1
    if ! command -v python3 >/dev/null; then
        record_unless_skipped "$name" "there is no python3"
    elif ! python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        record_unless_skipped "$name" "python3 has no PyTorch that sees a GPU"
    else
        measure "$name" python3 pytorch_peer.py "${HEADS[@]}" --seq-len "$1"
    fi
}

record_unless_skipped() { # name $1, reason $2
    if is_wanted "$1"; then record "$1" "not run" "$2" 0 ""; fi
}

# Records a result: name $1, status $2, reason $3, seconds $4, command $5.
record() {
    local log=$results/$1.log output="" launches=null figures=null
    [[ ! -f $log ]] || output=$(tail -n "$OUTPUT_LINES" "$log")
    [[ ! -s $results/$1.launches ]] || launches=$(<"$results/$1.launches")
    [[ $2 != passed || ! -s $results/$1.json ]] || figures=$(<"$results/$1.json")
    printf '{"name": %s, "status": "%s", "reason": %s, "seconds": %d, "kernel_launches": %s, "command": %s, "output": %s, "figures": %s}\n' \
        "$(json "$1")" "$2" "$(json "$3")" "$4" "$launches" "$(json "$5")" "$(json "$output")" "$figures" >"$results/$1.check"
    printf '%-9s %s%s\n' "$2" "$1" "${3:+ ($3)}" >&2
}

# Prints how many checks have status $1.
count() {
    local name number=0
    for name in "${names[@]}"; do
        if grep -qs "\"status\": \"$1\"" "$results/$name.check"; then number=$((number + 1)); fi
    done
    echo "$number"
}

json() { # text $1 as a JSON string
    local text=${1//\\/\\\\}
    text=${text//\"/\\\"} text=${text//$'\n'/\\n} text=${text//$'\t'/\\t}
    printf '"%s"' "$(printf '%s' "$text" | tr -d '\000-\037')"
}

write_report() {
    local name separator=""
    {
        printf '{\n  "date": %s,\n  "build": %s,\n' "$(json "$(date -u +%Y-%m-%dT%H:%M:%SZ)")" "$(json "$(<BUILD)")"
        printf '  "devices": %s,\n  "nccl": %s,\n' "$(json "$(nvidia-smi -L)")" "$(json "$(nccl_version)")"
        printf '  "passed": %d,\n  "failed": %d,\n  "not_run": %d,\n  "checks": [' \
            "$(count passed)" "$(count failed)" "$(count "not run")"
        for name in "${names[@]}"; do
            [[ -f $results/$name.check ]] || continue
            printf '%s\n' "$separator"
            cat "$results/$name.check"
            separator=,
        done
        printf '  ]\n}\n'
    } >"$results/report.json"
}

main
