// Parts of the fused attention kernels with products of warpgroups. A block has two of them, which own 64 of its kOwn
// rows each. A kernel includes this file after `wgmma.cuh`.

#ifndef ULYSSES_ATTENTION_FUSED_WGMMA_CUH
#define ULYSSES_ATTENTION_FUSED_WGMMA_CUH

inline constexpr u32 kWgmmaThreads = 256, kOwn = 128;
static_assert(kOwn == kWgmmaThreads / kWarp * 16, "a warp has 16 rows");

// `wait_for_copies`, after which products may read what was copied.
__device__ __forceinline__ void wait_for_operands() {
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();
}

// Starts c = a · bᵀ for the rows of `a` that this warpgroup owns.
template <typename T, u32 D, u32 kRows>
__device__ __forceinline__ void start_multiply_transposed(float (&c)[1][kRows / 8][4], const Panels<T, D, kOwn> &a,
                                                          const Panels<T, D, kRows> &b) {
    const Panels<T, D, kOwn> own = a.from(threadIdx.x / 128 * 64);
#pragma unroll
    for (u32 step = 0; step < D / 16; ++step) {
        wgmma<T, kRows>(c[0], own.of_columns(step), b.of_columns(step), step > 0);
    }
    wgmma_commit();
}

// Starts c += a · b for `a` in registers.
template <typename T, u32 D, u32 kRows>
__device__ __forceinline__ void start_multiply(float (&c)[1][D / 8][4], const u32 (&a)[1][kRows / 16][4],
                                               const Panels<T, D, kRows> &b) {
#pragma unroll
    for (u32 step = 0; step < kRows / 16; ++step) wgmma<T, D>(c[0], a[0][step], b.of_rows(step));
    wgmma_commit();
}

#endif
