#!/usr/bin/env bash
# Runs a command on simulated GPUs: libraries of this repository stand in for libcuda, NVRTC, cuBLAS, cuRAND and NCCL
# (gpu/fake_driver). Fails if the command fails or if the libraries report a fault.
#
#     gpu/fake-driver.sh [--gpus N] [--order late|eager|random:SEED] COMMAND ARGUMENT…
#     gpu/fake-driver.sh --build-only
#
# --gpus    how many GPUs there are, default 1
# --order   when operations of streams run: as late as CUDA allows (the default), at once, or in a random legal order
#
# The command must be built with CUDA_HOME=$PWD/target/fake-driver and NVCC=$PWD/gpu/nvcc-for-check, see docs/gpu.md.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$repository/target/fake-driver
FAULTS_FOUND=97

main() {
    export FAKE_DRIVER_GPUS=1 FAKE_DRIVER_ORDER=late
    local build_only=""
    while (($#)); do
        case $1 in
        --gpus) FAKE_DRIVER_GPUS=${2:?--gpus needs a number} && shift ;;
        --order) FAKE_DRIVER_ORDER=${2:?--order needs late, eager or random:SEED} && shift ;;
        --build-only) build_only=yes ;;
        --*) usage "there is no option $1" ;;
        *) break ;;
        esac
        shift
    done
    [[ $FAKE_DRIVER_GPUS =~ ^[0-9]+$ ]] || usage "--gpus takes a number, not $FAKE_DRIVER_GPUS"
    [[ $FAKE_DRIVER_ORDER =~ ^(late|eager|random:[0-9]+)$ ]] ||
        usage "--order takes late, eager or random:SEED, not $FAKE_DRIVER_ORDER"
    "$repository/gpu/fake_driver/build.sh" "$folder"
    [[ -z $build_only ]] || exit 0
    (($#)) || usage "a command is missing"
    run "$@"
}

usage() {
    echo "fake-driver.sh: $*" >&2
    exit 2
}

run() {
    local code=0
    # In memory if there is 1 GiB of it: ranks exchange all data through files.
    local parent=${TMPDIR:-/tmp} free_kib
    free_kib=$(df --output=avail /dev/shm 2>/dev/null | tail -n 1)
    ((${free_kib:-0} < 1 << 20)) || parent=/dev/shm
    FAKE_NCCL_FOLDER=$(mktemp -d -p "$parent")
    export FAKE_NCCL_FOLDER FAKE_DRIVER_REPORTS=$FAKE_NCCL_FOLDER/reports
    # shellcheck disable=SC2064 # Expand the name now.
    trap "rm -rf '$FAKE_NCCL_FOLDER'" EXIT
    export LD_LIBRARY_PATH=$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    # The emulation's thread-local variables (`initial-exec`) must fit although the program loads the library late.
    export GLIBC_TUNABLES=glibc.rtld.optional_static_tls=65536
    export PATH=$repository/gpu/fake_driver/bin:$PATH XDG_CACHE_HOME=$folder/cache
    "$@" || code=$?
    if [[ -s $FAKE_DRIVER_REPORTS ]]; then
        echo "fake-driver.sh: $(wc -l <"$FAKE_DRIVER_REPORTS") reports; the kinds of them:" >&2
        sed -E 's/^fake driver: process [0-9]+: //; s/[0-9]+ bytes/N bytes/g; s/0x[0-9a-f]+/ADDRESS/g' \
            "$FAKE_DRIVER_REPORTS" | sort | uniq -c | sort -rn | head -n 30 >&2
        ((code != 0)) || code=$FAULTS_FOUND
    fi
    exit "$code"
}

main "$@"
