#!/usr/bin/env bash
# Runs the most valuable GPU checks first, within a time limit, on a machine that is borrowed for minutes: docs/gpu.md.
#
#     gpu/lease.sh MINUTES OUTPUT [STEP…]
#
# Needs the folder of gpu/build.sh. After each step OUTPUT/results.tar.gz has all results so far, so that a machine
# that is taken away leaves them. STEP: only steps of these names, as patterns.
set -u

cd "$(dirname "${BASH_SOURCE[0]}")/../target/gpu-folder" || exit 2
minutes=${1:?minutes} output=$(mkdir -p "${2:?an output folder}" && cd "$2" && pwd)
shift 2
wanted=("$@")
((${#wanted[@]})) || wanted=('*')
end=$((SECONDS + minutes * 60 - 20))
results=$(mktemp -d)
export XDG_CACHE_HOME=${XDG_CACHE_HOME:-/tmp/ulysses-cache} CARGO_MANIFEST_DIR=$PWD RUST_TEST_THREADS=8 PYTHONUNBUFFERED=1
LLAMA=(--num-heads 32 --num-kv-heads 8)

unpack() {
    [[ -d bin ]] || tar -xJf bin.tar.xz 2>/dev/null || python3 -m tarfile -e bin.tar.xz .
}

# Runs a command for at most a number of seconds: name $1, limit $2, command $3…
step() {
    local name=$1 limit=$2 start=$SECONDS code=0 pattern found=""
    for pattern in "${wanted[@]}"; do
        # shellcheck disable=SC2053 # A pattern.
        [[ $name == $pattern ]] && found=yes
    done
    [[ -n $found ]] || return 0
    ((limit <= end - SECONDS)) || limit=$((end - SECONDS))
    if ((limit < 5)); then
        echo "$name: no time" | tee -a "$results/summary"
        return
    fi
    timeout --kill-after 3 "$limit" "${@:3}" >"$results/$name.out" 2>"$results/$name.err" </dev/null || code=$?
    echo "$name: $code, $((SECONDS - start)) s" | tee -a "$results/summary"
    ((code == 0)) || tail -n 6 "$results/$name.err" "$results/$name.out"
    tar -czf "$output/new" -C "$results" . && mv "$output/new" "$output/results.tar.gz"
}

tests() { # name, limit, binary, filters…
    step "$1" "$2" env ULYSSES_TEST_DEVICE=cuda "bin/test_$3" "${@:4}"
}

attention() { # name, limit, head_dim, tokens, kernels
    step "$1" "$2" bin/ulysses bench attention --device cuda --dtype bf16 --no-f32 "${LLAMA[@]}" --head-dim "$3" \
        --seq-len "$4" --kernels "$5" --repeats 5 --json
}

steps_of() { # name, limit, model, tokens, flags…
    step "$1" "$2" bin/ulysses bench train --device cuda --dtype bf16 --model "$3" --seq-len "$4" --repeats 5 --json "${@:5}"
}

layer() { # tokens
    steps_of "layer_$1" 60 llama3-8b "$1" --num-layers 1 --vocab-size 256
}

train() { # name, limit, config, flags…
    step "$1" "$2" bin/ulysses train "$3" --device cuda --data text --output "$results/$1-run" "${@:4}"
}

unpack
source ./libraries.sh
step machine 20 bash -c 'nvidia-smi; nvcc --version | tail -n 2; ldd --version | head -n 1; ls -d /usr/local/cuda*; nproc; ldconfig -p | grep -E "libcuda|nccl"; echo "$LD_LIBRARY_PATH"'
step doctor 90 bin/ulysses doctor
attention attention_wgmma_128_16384 40 128 16384 wgmma
attention attention_fused_128_16384 40 128 16384 fused
attention attention_wgmma_128_4096 30 128 4096 wgmma
attention attention_wgmma_64_16384 30 64 16384 wgmma
tests golden 60 parity golden::
train train_main_job 60 configs/long_sequence.json --backend thread --steps 10
layer 16384
step pytorch 90 python3 pytorch_peer.py "${LLAMA[@]}" --head-dim 128 --seq-len 4096 16384 32768
attention attention_tiled_128_16384 40 128 16384 tiled
attention attention_fused_64_16384 30 64 16384 fused
step nccl_1 40 env ULYSSES_TEST_DEVICE=cuda ULYSSES_TEST_NCCL_RANKS=1 bin/test_comm conformance::nccl
tests precision 60 parity precision::bf16_gradients_of_wide_heads
tests kernels 150 kernels --skip on_the_fake_driver
attention attention_wgmma_128_32768 40 128 32768 wgmma
attention attention_wgmma_128_131072 60 128 131072 wgmma
layer 4096
layer 32768
step pytorch_64 60 python3 pytorch_peer.py "${LLAMA[@]}" --head-dim 64 --seq-len 16384
steps_of model_1b_32768 60 llama-3.2-1b 32768 --set ulysses.activation_checkpointing=true
steps_of model_1b_131072 90 llama-3.2-1b 131072 --set ulysses.activation_checkpointing=true
step profile 60 bin/ulysses bench profile --device cuda --ranks 1 --model llama3-8b --tokens 16384 --mib 1024 --repeats 5
step bandwidth 40 bin/bench_kernels --device cuda --dtype bf16 --mib 1024 --json
step memcheck 90 compute-sanitizer --kernel-regex kns=attention_fused bin/ulysses bench attention --device cuda --dtype bf16 \
    --no-f32 --seq-len 300 --repeats 1
step ncu 90 ncu --clock-control none --kernel-name regex:wgmma --launch-count 3 --set full -f -o "$output/wgmma" bin/ulysses bench \
    attention --device cuda --dtype bf16 --no-f32 "${LLAMA[@]}" --head-dim 128 --seq-len 8192 --kernels wgmma --repeats 1
layer 131072
train train_offload 60 configs/long_sequence.json --backend thread --steps 3 --zero-stage 3 --set bf16.enabled=true \
    --set zero_optimization.offload_optimizer.device=cpu --set zero_optimization.offload_param.device=cpu
tests threads 60 comm conformance::threads
tests zero 90 zero stages::
tests meshes 120 parity mesh_invariance::
step racecheck 60 compute-sanitizer --tool racecheck --kernel-regex kns=attention_fused bin/ulysses bench attention \
    --device cuda --dtype bf16 --no-f32 --seq-len 300 --repeats 1
cat "$results/summary"
