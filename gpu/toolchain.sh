#!/usr/bin/env bash
# Fetches the CUDA 13.0 compilers and a disassembler as pinned PyPI wheels, unpacks them into one folder with the layout of NVIDIA's
# installer (`bin/nvcc`, `include/`, `lib/`, `nvvm/`), and prints its path. NVRTC of CUDA 12.4 is in `nvrtc-12.4/`.
#
#     CUDA_HOME=$(gpu/toolchain.sh)
#
# The folder is $ULYSSES_CUDA_HOME or target/cuda-13.0. It is created atomically, and again
# only if the pinned versions change. Needs python3 with pip, but no GPU and no driver.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
requirements=$repository/gpu/requirements.txt
cuda_home=${ULYSSES_CUDA_HOME:-$repository/target/cuda-13.0}

say() { echo "toolchain: $*" >&2; }

fail() {
    say "$*"
    exit 1
}

is_current() { cmp --silent "$requirements" "$cuda_home/requirements.txt"; }

download_wheels() { # into folder $1
    python3 -m pip --version >/dev/null 2>&1 || fail "python3 with pip is needed to download the CUDA wheels"
    say "downloading the CUDA compilers (220 MB) from PyPI"
    python3 -m pip download --quiet --no-deps --only-binary :all: --require-hashes \
        --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2010_x86_64 --platform manylinux_2_12_x86_64 \
        --requirement "$requirements" --dest "$1" >&2 ||
        fail "the CUDA wheels could not be downloaded. This step needs PyPI, or a mirror of it in pip's configuration"
}

unpack_wheels() { # from folder $1 into folder $2
    local wheel
    for wheel in "$1"/*.whl; do
        python3 -m zipfile -e "$wheel" "$2"
    done
    rm -f "$2"/nvidia/cu13/lib/lib*.alt.so*
    mv "$2"/nvidia/cuda_nvrtc/lib "$2"/nvidia/cu13/nvrtc-12.4
    chmod +x "$2"/nvidia/cu13/bin/* "$2"/nvidia/cu13/nvvm/bin/*
}

# Links the unversioned names that compilers and linkers look for; the wheels have only versioned names.
add_development_names() { # in folder $1
    ln -s lib "$1/lib64"
    ln -s libcudart.so.13 "$1/lib/libcudart.so"
    ln -s libnvrtc.so.13 "$1/lib/libnvrtc.so"
}

install() {
    local parent scratch
    parent=$(dirname "$cuda_home")
    mkdir -p "$parent"
    scratch=$(mktemp -d "$parent/.cuda-XXXXXX")
    # shellcheck disable=SC2064 # Expand the folder's name now.
    trap "rm -rf '$scratch'" EXIT
    download_wheels "$scratch/wheels"
    unpack_wheels "$scratch/wheels" "$scratch/unpacked"
    add_development_names "$scratch/unpacked/nvidia/cu13"
    cp "$requirements" "$scratch/unpacked/nvidia/cu13/requirements.txt"
    rm -rf "$cuda_home"
    mv -T "$scratch/unpacked/nvidia/cu13" "$cuda_home"
    "$cuda_home/bin/nvcc" --version >/dev/null || fail "$cuda_home/bin/nvcc does not run on this machine"
    say "$cuda_home is ready"
}

is_current || install
echo "$cuda_home"
