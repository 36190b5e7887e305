#!/usr/bin/env bash
# Builds a self-contained folder to test on a GPU machine without cargo and this repository: binaries, fixtures,
# configs, kernels and check.py. The build needs no GPU; see docs/gpu.md.
#
#     gpu/build.sh [FOLDER]         FOLDER: default target/gpu-folder
#
# Uses the toolkit in $CUDA_HOME (12.4 or newer, with NCCL), else the compilers of CUDA 13.0 from PyPI.
# candle's kernels are compiled to PTX for $CUDA_COMPUTE_CAP (default 80); the driver compiles PTX for newer GPUs.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-target/gpu-folder}
TESTS=(comm engine)
MAX_MIB=60
MAX_GLIBC=2.34

main() {
    prepare_toolchain
    local scratch
    scratch=$(mktemp -d "${TMPDIR:-/tmp}/gpu-folder-XXXXXX")
    # shellcheck disable=SC2064 # Expand the folder's name now.
    trap "rm -rf '$scratch'" EXIT
    collect_binaries "$scratch/bin"
    check_glibc "$scratch/bin"
    rm -rf "$folder"
    mkdir -p "$folder"
    pack "$scratch" "$folder/bin.tar.xz"
    add_files
    check_size
}

fail() {
    echo "build.sh: $*" >&2
    exit 1
}

prepare_toolchain() {
    if [[ -z ${CUDA_HOME:-} ]]; then
        CUDA_HOME=$(gpu/toolchain.sh)
        gpu/link-stubs.sh "$CUDA_HOME"
        # Older compilers lack it.
        export NVCC_APPEND_FLAGS="--compress-mode=size"
    fi
    export CUDA_HOME PATH=$CUDA_HOME/bin:$PATH CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-80}
    export NVCC=$CUDA_HOME/bin/nvcc
    export CUDAFORGE_THREADS=${CUDAFORGE_THREADS:-$(nproc)} CARGO_TARGET_DIR=target/cuda
    # What takes long to build and brings little.
    export CARGO_PROFILE_RELEASE_DEBUG=false
}

# Builds the program, the test binaries and all benches, with the names that check.py uses.
collect_binaries() { # in folder $1
    local wanted=(--lib --benches) test
    for test in "${TESTS[@]}"; do
        wanted+=(--test "$test")
    done
    mkdir -p "$1"
    {
        cargo build --release --locked --features cuda,nccl --message-format json
        cargo test --no-run --release --locked --features cuda,nccl "${wanted[@]}" --message-format json
    } |
        python3 gpu/binaries.py |
        while read -r name path; do
            strip -o "$1/$name" "$path"
        done
    # Its tests read files of the machine that built them.
    rm "$1/test_ulysses"
    for test in ulysses test_kernels "${TESTS[@]/#/test_}"; do
        [[ -x $1/$test ]] || fail "cargo built no $test"
    done
}

# The newest glibc symbol of the binaries determines the oldest supported system.
check_glibc() { # of the binaries in folder $1
    local newest
    newest=$(objdump -T "$1"/* | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
    if [[ $(printf '%s\n' "GLIBC_$MAX_GLIBC" "$newest" | sort -V | tail -n 1) != "GLIBC_$MAX_GLIBC" ]]; then
        fail "the binaries need $newest, which systems with glibc $MAX_GLIBC lack"
    fi
}

# One archive with a large window, which deduplicates candle and its kernels across binaries.
pack() { # folder bin of $1 as archive $2
    tar -C "$1" --sort=name --owner=0 --group=0 -c bin | xz --threads=1 --lzma2=preset=3,dict=256MiB >"$2"
}

add_files() {
    mkdir -p "$folder/tests" "$folder/lib"
    cp -r configs kernels "$folder/"
    cp -r tests/fixtures "$folder/tests/"
    cp -r src "$folder/text" # what the main job trains on
    cp "$CUDA_HOME"/lib64/libcudart.so.1[23] "$folder/lib/"
    cc -shared -fPIC -Wall -Werror -Wl,-soname,libcurand.so.10 -o "$folder/lib/libcurand.so.10" gpu/curand_standin.c
    cp gpu/check.py gpu/libraries.sh gpu/pytorch_peer.py docs/gpu.md "$folder/"
    describe_build >"$folder/BUILD"
}

describe_build() {
    echo "commit $(git describe --always --dirty 2>/dev/null || echo unknown), $(date -u +%Y-%m-%d)"
    echo "features cuda,nccl; candle's kernels for compute capability $CUDA_COMPUTE_CAP"
    "$CUDA_HOME/bin/nvcc" --version | grep -o 'release.*'
    rustc --version
}

check_size() {
    local mib
    mib=$(du --apparent-size -sm "$folder" | cut -f1)
    ((mib < MAX_MIB)) || fail "$folder has $mib MiB, which should be less than $MAX_MIB"
    echo "build.sh: $folder is ready, $mib MiB" >&2
}

main
