#!/usr/bin/env bash
# Creates stub libraries to link `--features cuda,nccl` on a machine without a driver, cuBLAS, cuRAND and NCCL. They
# are in CUDA_HOME/lib/stubs, as in NVIDIA's toolkit, where cudarc's build script looks. Their functions do nothing,
# so binaries must not run with them.
#
#     gpu/link-stubs.sh CUDA_HOME
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
stubs=${1:?the CUDA folder, as gpu/toolchain.sh prints it}/lib/stubs

cudarc_sources() {
    cargo metadata --manifest-path "$repository/Cargo.toml" --locked --format-version 1 --features cuda |
        python3 -c '
import json, os, sys
[manifest] = [package["manifest_path"] for package in json.load(sys.stdin)["packages"] if package["name"] == "cudarc"]
print(os.path.join(os.path.dirname(manifest), "src"))'
}

# Lists the functions that a module of cudarc declares: all that binaries can reference.
bound_functions() { # of the module in folder $1
    grep -oE '^ +fn [A-Za-z0-9_]+\(' "$1/sys/mod.rs" | grep -oE '[A-Za-z0-9_]+\($' | tr -d '(' | sort -u
}

make_stub() { # library $1 with soname $2, of the module in folder $3
    bound_functions "$3" | sed 's/.*/int &(void) { return 1; }/' |
        cc -shared -fPIC -x c -Wl,-soname,"$2" -o "$stubs/lib$1.so" -
}

sources=$(cudarc_sources)
mkdir -p "$stubs"
make_stub cuda libcuda.so.1 "$sources/driver"
make_stub cublas libcublas.so.13 "$sources/cublas"
make_stub cublasLt libcublasLt.so.13 "$sources/cublaslt"
make_stub curand libcurand.so.10 "$sources/curand"
make_stub nccl libnccl.so.2 "$sources/nccl"
