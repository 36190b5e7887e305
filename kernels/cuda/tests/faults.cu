// Kernels that only tests run, each with one fault that the emulation must find.

#include "common.cuh"
#include "mma.cuh"

// A vector access at any element.
KERNEL(fault_misaligned, float *out, const float *x, u32 at) {
    const auto values = load<4>(x + at);
    out[threadIdx.x] = values.at[threadIdx.x % 4];
}

KERNEL(fault_reads_at, float *out, const float *x, u32 at) { out[threadIdx.x] = x[at]; }
KERNEL(fault_writes_at, float *out, const float *x, u32 at) { out[at] = x[threadIdx.x]; }
KERNEL(fault_writes_input, float *out, const float *x) {
    const_cast<float *>(x)[threadIdx.x] = 0.0f;
    out[threadIdx.x] = x[threadIdx.x];
}

// Indices of an array in registers and of a row in shared memory.
KERNEL(fault_array_index, float *out, const float *x, u32 at) {
    SHARED(float, rows, [2][32]);
    rows[0][threadIdx.x % 32] = rows[1][threadIdx.x % 32] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = rows[0][at];
}

// Pointers hide the bounds: the read is past the array of this kernel.
KERNEL(fault_shared_overrun, float *out, const float *x, u32 at) {
    SHARED(float, values, [32]);
    float *pointer = values;
    pointer[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = pointer[at];
}

KERNEL(fault_shared_unwritten, float *out, const float *x, u32 count) {
    SHARED(float, values, [64]);
    if (threadIdx.x < count) values[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

// Each thread reads what thread (i + 1) % n writes before, with `barrier` in between: 0 none, 1 a shuffle,
// 2 __syncwarp, 3 __syncthreads. `order` 1 lets it write after the read.
KERNEL(fault_shared_race, float *out, const float *x, u32 barrier, u32 order) {
    DYNAMIC_SHARED(float, values);
    const u32 i = threadIdx.x, next = (i + 1) % blockDim.x;
    values[i] = x[i];
    if (order == 1) {
        __syncthreads();
        out[i] = values[next];
    }
    float unused = 0.0f;
    if (barrier == 1) unused = __shfl_xor_sync(kFullWarp, x[i], 1);
    if (barrier == 2) __syncwarp();
    if (barrier == 3) __syncthreads();
    if (order == 1) {
        values[i] = 0.0f;
    } else {
        out[i] = values[next] + 0.0f * unused;
    }
}

// Right only if blocks, or threads, run in ascending order.
KERNEL(fault_order_of_blocks, float *sums, const float *x) {
    const u32 i = blockIdx.x;
    if (threadIdx.x == 0) sums[i] = x[i] + (i == 0 ? 0.0f : sums[i - 1]);
}
KERNEL(fault_order_of_threads, float *sums, const float *x) {
    const u32 i = threadIdx.x;
    sums[i] = x[i] + (i == 0 ? 0.0f : sums[i - 1]);
}

// Half of the warp waits at another instruction.
KERNEL(fault_diverged_warp, float *out, const float *x) {
    if (threadIdx.x < 16) __syncwarp();
    out[threadIdx.x] = __shfl_xor_sync(kFullWarp, x[threadIdx.x], 1);
}

// No fault: x · x − y, rounded once if the product and the difference are contracted.
KERNEL(test_contraction, float *out, const float *x, const float *y) {
    out[threadIdx.x] = x[threadIdx.x] * x[threadIdx.x] - y[threadIdx.x];
}

// Reads the target of a copy: 0 before the wait, 1 in odd lanes that of the lane before, without a barrier, 2 without
// a commit. Writes it before the wait: 3 by a store, 4 by another copy.
KERNEL(fault_cp_async_early, u32 *out, const u32 *x, u32 fault) {
    DYNAMIC_SHARED(u32, shared);
    const u32 i = threadIdx.x;
    cp_async<4>(shared + i, x + i);
    if (fault != 2) cp_async_commit();
    if (fault == 1) __syncwarp();
    if (fault == 3) shared[i] = i;
    if (fault == 4) cp_async<4>(shared + i, x + i);
    if (fault != 0) cp_async_wait<0>();
    out[i] = shared[fault == 1 ? i & ~1u : i];
}

// A source or a row at an odd multiple of 8 bytes.
KERNEL(fault_cp_async_misaligned, u32 *out, const u32 *x) {
    DYNAMIC_SHARED(u32, shared);
    cp_async<16>(shared + 4 * threadIdx.x, x + 4 * threadIdx.x + 2, 8);
    cp_async_commit();
    cp_async_wait<0>();
    out[threadIdx.x] = shared[4 * threadIdx.x];
}
KERNEL(fault_ldmatrix_misaligned, u32 *out, const u32 *x) {
    DYNAMIC_SHARED(u32, shared);
    for (u32 i = threadIdx.x; i < 64; i += kWarp) shared[i] = x[i];
    __syncwarp();
    u32 rows[1];
    ldmatrix<1, false>(rows, shared + threadIdx.x % 8 * 6);
    out[threadIdx.x] = rows[0];
}
