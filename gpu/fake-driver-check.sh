#!/usr/bin/env bash
# Builds the tests with all features, and runs them on simulated GPUs (gpu/fake-driver.sh). Every call, copy and kernel is
# checked there, so a test that uses a GPU is also a test of its order.
#
#     gpu/fake-driver-check.sh [PART…]      default: all parts
#
# Parts: libraries (they find seeded faults of small programs), kernels, threads, golden, nccl, jobs (ranks that are
# processes), errors (failed calls of the driver and the libraries; `ulysses doctor`), suites (meshes, ZeRO stages,
# 16 bits and offload over NCCL), training, seeded (the tests fail if a fault is seeded).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=gpu/fake-driver-settings.sh
source gpu/fake-driver-settings.sh

main() {
    if [[ ${1:-} == --part ]]; then
        run_part "$2"
        return
    fi
    # The longest first.
    local parts=("$@")
    ((${#parts[@]})) || parts=(kernels suites jobs errors golden threads nccl seeded training libraries)
    mkdir -p target/fake/logs
    gpu/fake-driver.sh --build-only
    # The build of CI's other tests.
    cargo test --release --all-features --no-run --message-format json | python3 gpu/binaries.py >target/fake/binaries
    # shellcheck disable=SC2046 # One argument per path.
    [[ $(uname -m) != x86_64 ]] || need_no_library $(awk '{ print $2 }' target/fake/binaries)
    # Simulated GPUs keep about one core busy, so parts run side by side. Each prints its output at its end.
    # shellcheck disable=SC2016 # The inner shell expands $0 and $log.
    printf '%s\n' "${parts[@]}" | xargs -P "$(nproc)" -I PART bash -c \
        'log=target/fake/logs/PART.log; "$0" --part PART >$log 2>&1; code=$?; cat $log; exit $((code != 0))' gpu/fake-driver-check.sh
}

run_part() {
    local started=$SECONDS
    export ULYSSES_TEST_DEVICE=cuda CARGO_MANIFEST_DIR=$PWD
    ULYSSES=$(binary ulysses)
    "check_$1"
    echo "fake-driver-check.sh: $1 passed in $((SECONDS - started)) s" >&2
}

check_libraries() {
    python3 gpu/fake_driver/test_driver.py
    python3 gpu/fake_driver/test_nccl.py
}

# Without the tests of the CPU that take long.
check_kernels() {
    local not_here=(--skip every_instruction_set --skip number_of_threads --skip gemm:: --skip attention::cpu
        --skip attention::tests::precision)
    tests 1 late test_kernels "${not_here[@]}"
    # Blocks and threads in another order: no result may depend on it. The tests of the fused kernels have several orders.
    ULYSSES_EMULATION_SEED=1 tests 1 random:1 test_kernels on_a_gpu on_every_target rank_reduce:: \
        strided_copy:: --skip fused --skip on_the_fake_driver "${not_here[@]}"
    tests 1 late test_ulysses on_a_gpu
}

check_threads() {
    tests 1 random:1 test_comm threads_on_a_gpu default_methods_on_a_gpu exchange_volume::
}

check_golden() {
    local golden=parity::golden::logits
    [[ ${ULYSSES_TEST_SEED:-} != all ]] || golden=parity::golden::
    tests 1 late test_engine "$golden"
    ULYSSES_TEST_DEVICE=nccl tests 8 late test_engine parity::golden::logits parity::mesh_invariance::a_dp_rank --test-threads 1
}

check_nccl() {
    local ranks
    # What decides before NCCL is called: these need no GPU.
    tests 1 late test_ulysses comm::nccl
    for ranks in 1 2 8; do
        ULYSSES_TEST_NCCL_RANKS=$ranks tests "$ranks" late test_comm conformance::nccl --test-threads 1
    done
    FAKE_NCCL_VERSION=2.20.5 ULYSSES_TEST_NCCL_RANKS=4 tests 4 late test_comm conformance::nccl --test-threads 1
    tests 8 random:3 test_comm on_eight_gpus --test-threads 1
}

check_jobs() {
    ULYSSES=$ULYSSES gpu/fake-driver.sh --gpus 4 python3 gpu/fake_driver/test_nccl_jobs.py
}

check_errors() {
    ULYSSES=$ULYSSES ULYSSES_TEST_SEED=$(sample_seed) gpu/fake-driver.sh python3 gpu/fake_driver/test_errors.py
    gpu/fake-driver.sh --gpus 2 "$ULYSSES" doctor | tee target/fake/doctor.log
    (($(grep -c "head dimension 64: fused kernels with wgmma (.* 96: fused kernels (.* 128: fused kernels with wgmma (" target/fake/doctor.log) == 2))
}

# Of these suites what covers most in the least time: every stage on meshes with dp and sp, uneven shards of packed documents,
# rings, pipelines, accumulation, 16 bits with fused attention, partitions over sp and replicas of them, offload, overlap. Then the engine's
# calls and errors. A third of them by the seed of the samples, all with ULYSSES_TEST_SEED=all. Three tests are skipped because their
# layers use candle's kernels, which such a build lacks.
check_suites() {
    local -x ULYSSES_TEST_DEVICE=nccl
    local index seed
    seed=$(sample_seed)
    local suites=(
        "late test_engine parity::mesh_invariance::a_tied_head parity::precision::stages_are_bit_equal"
        "late test_engine zero::engine_protocol:: zero::engine_state:: --skip a_layer_may_keep_its_own_output --skip layers_of_one_name --skip recycled_storage_does_not_grow"
        "random:5 test_engine memory::features::offloaded_gradients memory::features::the_offloaded_gradient memory::features::overlapping_the_exchange"
        "random:6 test_engine parity::ring::few_heads parity::ring::recomputation parity::tensor_parallel::a_ring parity::pipeline::a_ring parity::pipeline::schedules"
        "random:4 test_engine zero::stages::the_same_run_twice zero::frozen::a_tied parity::linear_attention::the_gradients parity::mamba2::a_ring"
        "late test_engine zero::partitions::without_accumulation"
    )
    for index in "${!suites[@]}"; do
        [[ $seed == all ]] || ((index % 3 == seed % 3)) || continue
        # shellcheck disable=SC2086 # Words.
        tests 8 ${suites[index]} --test-threads 1
    done
    tests 2 late test_engine memory::plan::the_planned_peak_is_that_of_the_pool --test-threads 1
    # The fused kernels of GPUs without wgmma; doctor's self-check above runs those with wgmma.
    FAKE_DRIVER_CAPABILITY=8.0 tests 8 late test_engine parity::precision::bf16_gradients_of_wide_heads --test-threads 1
}

check_training() {
    train 1 random:2 main-job --seq-len 128 --steps 3
    train 8 late nccl --seq-len 128 --steps 2 --set 'mesh_param=[2,4]' --zero-stage 3
    train 1 late offload --seq-len 64 --steps 2 --zero-stage 3 --set bf16.enabled=true \
        --set zero_optimization.offload_optimizer.device=cpu --set zero_optimization.offload_param.device=cpu
}

# The same tests pass without a seeded fault.
check_seeded() {
    local fault
    for fault in none forgotten_event freed_early wrong_device; do
        seed "$fault" test_comm threads_on_a_gpu::a_ring
    done
    seed host_too_early test_comm exchange_volume::a_step
    seed swapped_operands test_kernels linear::tests
}

# kernels/src/device/cuda/libraries loads CUDA's libraries, so that the binaries $@ start without them.
need_no_library() {
    local binary
    for binary in "$@"; do
        if readelf -d "$binary" | grep -E 'NEEDED.*\[lib(cuda|cudart|cublas|cublasLt|curand|nvrtc|nccl)\.'; then
            echo "fake-driver-check.sh: $binary needs these to start. The functions that libraries/functions.rs lacks:" >&2
            nm -D -u "$binary" | grep -E ' (cu|nvrtc|nccl|__cuda)' >&2
            return 1
        fi
    done
}

# The seed of samples: a hash of the Rust sources, unless it is set.
sample_seed() { echo "${ULYSSES_TEST_SEED:-$(git ls-files -z '*.rs' | xargs -0 cat | cksum | cut -d' ' -f1)}"; }

# The path of the binary with the name $1, which gpu/binaries.py gives.
binary() { awk -v name="$1" '$1 == name { print $2 }' target/fake/binaries; }

tests() { # with $1 GPUs, in order $2, of binary $3 with the filters $4…
    gpu/fake-driver.sh --gpus "$1" --order "$2" "$(binary "$3")" "${@:4}"
}

train() { # with $1 GPUs, in order $2, the main job with output $3 and the flags $4…
    rm -rf "target/fake/$3"
    gpu/fake-driver.sh --gpus "$1" --order "$2" "$ULYSSES" train configs/long_sequence.json --data src \
        --output "target/fake/$3" "${@:4}"
}

# A seeded fault $1 must fail the tests of binary $2 with the filter $3.
seed() {
    local failed=""
    FAKE_DRIVER_SEED_FAULT=$1 tests 2 late "$2" "$3" >target/fake/seeded.log 2>&1 || failed=yes
    if [[ $1 == none && -n $failed ]] || [[ $1 != none && -z $failed ]]; then
        tail -n 40 target/fake/seeded.log
        echo "fake-driver-check.sh: the tests have the wrong outcome with the seeded fault '$1'" >&2
        return 1
    fi
}

main "$@"
