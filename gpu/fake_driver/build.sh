#!/usr/bin/env bash
# Builds the fake libraries into FOLDER/lib, each object only if a source of it changed. FOLDER is a CUDA_HOME to link
# against, too. Needs g++, python3 and cargo.
#
#     gpu/fake_driver/build.sh FOLDER
set -euo pipefail

folder=$(mkdir -p "${1:?the folder to build in}/lib" "$1/objects" && cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")"
repository=$(cd ../.. && pwd)
FLAGS=(-std=c++17 -O2 -g1 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-missing-field-initializers)
# The fibers of the emulation jump between stacks, which a fortified longjmp refuses.
# Its kernels read thread-local variables all the time, which `initial-exec` makes twice as fast in a library.
EMULATION_FLAGS=(-std=c++17 -O2 -fPIC -fvisibility=hidden -ftls-model=initial-exec -U_FORTIFY_SOURCE -Wno-unknown-pragmas "-I$repository/kernels/cuda")
# Else a call of libgcc converts each f16.
! grep --quiet --word-regexp f16c /proc/cpuinfo || EMULATION_FLAGS+=(-mf16c)
# The calls that these insert are the functions of kernels/cuda/emulation/sanitizer.cpp. Products and sums are contracted to
# one rounding, as CUDA's compilers do, if this CPU can.
KERNEL_FLAGS=(-fsanitize=thread -fno-sanitize-recover=all
    -fsanitize=alignment,null,bounds,shift,signed-integer-overflow,integer-divide-by-zero)
[[ $(uname -m) == x86_64 ]] || KERNEL_FLAGS+=(-ffp-contract=fast)
! grep --quiet --word-regexp fma /proc/cpuinfo || KERNEL_FLAGS+=(-mfma -ffp-contract=fast)

main() {
    exec 9>"$folder/lock"
    flock 9
    local sources kernel name kernels=() emulation=("$repository"/kernels/cuda/emulation/*.cpp)
    for kernel in "$repository"/kernels/cuda/{,tests/}*.cu; do
        name=kernels_$(basename "$kernel" .cu)
        printf '#include "%s"\n' "$repository/kernels/cuda/emulation/emulation.h" "$kernel" >"$folder/objects/$name.new"
        keep_if_equal "$folder/objects/$name".{new,cpp}
        kernels+=("$folder/objects/$name.cpp")
    done
    # shellcheck disable=SC2207 # One path per word.
    kernels+=($(python3 faulty_kernels.py "$folder/objects"))
    # Where cudarc binds the functions that binaries can reference.
    sources=$(cargo metadata --manifest-path "$repository/Cargo.toml" --locked --format-version 1 --features cuda |
        python3 -c '
import json, os, sys
[manifest] = [package["manifest_path"] for package in json.load(sys.stdin)["packages"] if package["name"] == "cudarc"]
print(os.path.join(os.path.dirname(manifest), "src"))')
    compile_all
    link cuda libcuda.so.1 "$sources/driver" report calls failures memory page_locked races queue api_device api_stream api_memory \
        api_module controls kernel_arguments project_kernels candle_kernels "${emulation[@]}" "${kernels[@]}"
    link cublas libcublas.so.13 "$sources/cublas" cublas gemm
    link curand libcurand.so.10 "$sources/curand" curand
    link nvrtc libnvrtc.so.13 "$sources/nvrtc" nvrtc
    link cublasLt libcublasLt.so.13 "$sources/cublaslt"
    link cudart libcudart.so.13 "$sources/runtime"
    # shellcheck disable=SC2046 # One argument per file.
    link nccl libnccl.so.2 "$sources/nccl" $(find . -name 'nccl*.cpp' -printf '%f\n' | sed 's/\.cpp$//' | sort)
}

keep_if_equal() { # new file $1 as $2
    cmp --silent "$1" "$2" && rm "$1" || mv "$1" "$2"
}

object_of() { echo "$folder/objects/$(basename "${1%.cpp}").o"; }

# Compiles the files of this folder, the emulation and the kernels, several at a time.
compile_all() {
    local source flags
    {
        for source in *.cpp; do
            [[ $source == test_* ]] || is_current "$(object_of "$source")" "$source" ./*.h build.sh ||
                printf '%s\0' g++ "${FLAGS[*]} $(optimization "$source")" "$source" "$(object_of "$source")"
        done
        for source in "${kernels[@]}" "${emulation[@]}"; do
            flags=${EMULATION_FLAGS[*]}
            [[ $source != "$folder"/* ]] || flags+=" ${KERNEL_FLAGS[*]}"
            is_current "$(object_of "$source")" "$source" build.sh "$repository"/kernels/cuda/{,tests/}*.cu* \
                "$repository"/kernels/cuda/emulation/*.h || printf '%s\0' g++ "$flags" "$source" "$(object_of "$source")"
        done
    } | xargs -0 --no-run-if-empty -n 4 -P "$(nproc)" bash -c '$0 $1 -c "$2" -o "$3"'
}

# The one file whose speed matters.
optimization() { [[ $1 != gemm.cpp ]] || echo "-O3 -mavx2 -mfma -mf16c"; }

is_current() { # object $1 of the files $2…
    local source
    [[ -f $1 ]] || return 1
    for source in "${@:2}"; do
        [[ ! $source -nt $1 ]] || return 1
    done
}

link() { # library $1 with soname $2, for cudarc's module in folder $3, of the sources $4…
    local name=$1 soname=$2 module=$3 objects=() source stubs=$folder/objects/not_implemented_$1 with_cuda=()
    for source in "${@:4}"; do
        objects+=("$(object_of "$source")")
    done
    [[ $name == cuda ]] || with_cuda=("-L$folder/lib" -lcuda)
    if [[ ! -f $folder/lib/lib$name.so ]] || ! is_current "$folder/lib/lib$name.so" "${objects[@]}" build.sh; then
        python3 not_implemented.py "$module" "${objects[@]}" >"$stubs.c"
        gcc -fPIC -c "$stubs.c" -o "$stubs.o"
        g++ -shared "-Wl,-soname,$soname" -Wl,-z,defs -o "$folder/lib/$soname" "${objects[@]}" "$stubs.o" \
            "${with_cuda[@]}" -lpthread
        ln -sf "$soname" "$folder/lib/lib$name.so"
    fi
}

main
