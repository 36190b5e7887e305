// Kernels that only tests run: products of one warpgroup, and faults in their use that the emulation must find.

#include "common.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

namespace {

// After the PTX ISA, not after `Panels`. Rows of 128 bytes lie in groups of 8, of 1024 bytes, whose 16-byte chunks are
// exchanged by the row: the offset of an element in a panel of 64 columns.
__device__ __forceinline__ u32 in_panel(u32 row, u32 column) {
    return row * 64 + (column / 8 ^ row % 8) * 8 + column % 8;
}

// A descriptor with everything as bytes.
__device__ __forceinline__ u64 descriptor(const void *first, u32 leading, u32 stride) {
    const u64 encoded[3] = {shared_address(first) / 16, leading / 16, stride / 16};
    return encoded[0] | encoded[1] << 16 | encoded[2] << 32 | 1ull << 62;
}

enum Fault : u32 {
    kNone,
    kNoWait,
    kNoCommit,
    kWaitsForTooFew,
    kNoFence,
    kWritesAccumulatorsEarly,
    kWritesOperandEarly,
    kWritesTileEarly,
    kNoProxyFence,
    kNoBarrier,
    kDifferentDescriptors,
    kThreeWarps,
    kMisplacedTile,
};

// c [64, N] += a [64, 16] · b: either a and b [N, 16] in shared memory, or a in registers and b [16, N] in shared memory.
template <typename T, u32 N, bool kRegisters>
__device__ __forceinline__ void product(float *c, const T *a, const T *b, u32 fault) {
    DYNAMIC_SHARED(T, shared);
    const u32 thread = threadIdx.x, lane = thread % kWarp, first_row = thread / kWarp * 16 + lane / 4;
    T *of_b = shared + 64 * 64 + (fault == kMisplacedTile ? 2 * 64 : 0);
    for (u32 i = thread; i < 64 * 16; i += blockDim.x) shared[in_panel(i / 16, i % 16)] = a[i];
    for (u32 i = thread; i < N * 16; i += blockDim.x) {
        if constexpr (kRegisters) {
            // Panels of 64 columns, one behind the other, of 16 rows each.
            of_b[i % N / 64 * (16 * 64) + in_panel(i / N, i % 64)] = b[i];
        } else {
            of_b[in_panel(i / 16, i % 16)] = b[i];
        }
    }
    if (fault != kNoProxyFence) fence_async_proxy();
    if (fault != kNoBarrier) __syncthreads();
    float of_c[N / 8][4];
    u32 of_a[1][4];
    const auto c_at = [&](u32 n, u32 i) { return (first_row + i / 2 * 8) * N + 8 * n + lane % 4 * 2 + i % 2; };
    for (u32 i = 0; i < 4 * (N / 8); ++i) of_c[i / 4][i % 4] = c[c_at(i / 4, i % 4)];
    for (u32 i = 0; i < 4; ++i) {
        const T *pair = a + (first_row + i % 2 * 8) * 16 + lane % 4 * 2 + i / 2 * 8;
        of_a[0][i] = pair[0].bits | static_cast<u32>(pair[1].bits) << 16;
    }
    if (fault == kThreeWarps && thread >= 96) return;
    if constexpr (kRegisters) {
        wgmma_fence(of_c, of_a);
    } else {
        wgmma_fence(of_c);
    }
    if (fault == kNoFence && kRegisters) of_a[0][3] += 1;
    if (fault == kNoFence && !kRegisters) of_c[0][3] += 1.0f;
    if constexpr (kRegisters) {
        wgmma<T, N>(of_c, of_a[0], descriptor(of_b, 16 * 128, 1024));
    } else {
        const u32 shift = fault == kDifferentDescriptors && thread >= 64 ? 32 : 0;
        wgmma<T, N>(of_c, descriptor(shared, 16, 1024), descriptor(of_b, 16, 1024) + shift / 16, true);
    }
    if (fault != kNoCommit) wgmma_commit();
    if (fault == kWritesAccumulatorsEarly) of_c[1][2] = 0.0f;
    if (fault == kWritesOperandEarly) of_a[0][1] = 0;
    if (fault == kWritesTileEarly) of_b[thread] = shared[thread];
    if (fault == kWaitsForTooFew) {
        wgmma_wait<1>(of_c);
    } else if (fault != kNoWait) {
        wgmma_wait<0>(of_c);
    }
    for (u32 i = 0; i < 4 * (N / 8); ++i) c[c_at(i / 4, i % 4)] = of_c[i / 4][i % 4];
}

// c [128, 128] = a [128, 64] · b [128, 64]ᵀ · d [128, 128], of two warpgroups and panels as kernels use them.
template <typename T> __device__ __forceinline__ void chain(float *c, const T *a, const T *b, const T *d) {
    DYNAMIC_SHARED(T, shared);
    const Panels<T, 64, 128> of_a = {shared}, of_b = {shared + 128 * 64};
    const Panels<T, 128, 128> of_d = {shared + 2 * 128 * 64};
    for (u32 i = threadIdx.x; i < 128 * 16; i += blockDim.x) {
        const u32 row = i / 16, chunk = i % 16;
        if (chunk < 8) cp_async<16>(of_a.at(row, chunk), a + row * 64 + chunk * 8);
        if (chunk < 8) cp_async<16>(of_b.at(row, chunk), b + row * 64 + chunk * 8);
        cp_async<16>(of_d.at(row, chunk), d + row * 128 + chunk * 8);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();
    float s[16][4], sums[16][4] = {};
    for (u32 i = 0; i < 64; ++i) s[i / 4][i % 4] = -1.0f;  // overwritten
    wgmma_fence(s);
    const Panels<T, 64, 128> own = of_a.from(threadIdx.x / 128 * 64);
    for (u32 step = 0; step < 4; ++step) wgmma<T, 128>(s, own.of_columns(step), of_b.of_columns(step), step > 0);
    wgmma_commit();
    wgmma_wait<0>(s);
    u32 p[8][4];
    for (u32 n = 0; n < 16; ++n) {
        for (u32 half = 0; half < 2; ++half) {
            const T low = round_to<T>(s[n][2 * half]), high = round_to<T>(s[n][2 * half + 1]);
            p[n / 2][n % 2 * 2 + half] = low.bits | static_cast<u32>(high.bits) << 16;
        }
    }
    wgmma_fence(sums, p);
    for (u32 step = 0; step < 8; ++step) wgmma<T, 128>(sums, p[step], of_d.of_rows(step));
    wgmma_commit();
    wgmma_wait<0>(sums, p);
    const u32 lane = threadIdx.x % kWarp, first_row = threadIdx.x / kWarp * 16 + lane / 4;
    for (u32 i = 0; i < 64; ++i) {
        c[(first_row + i % 4 / 2 * 8) * 128 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i / 4][i % 4];
    }
}

}  // namespace

#define INSTANTIATE(T, suffix, N)                                                                           \
    KERNEL(test_wgmma_shared_##suffix##_##N, float *c, const T *a, const T *b, u32 fault) {                 \
        product<T, N, false>(c, a, b, fault);                                                               \
    }                                                                                                       \
    KERNEL(test_wgmma_registers_##suffix##_##N, float *c, const T *a, const T *b, u32 fault) {              \
        product<T, N, true>(c, a, b, fault);                                                                \
    }
INSTANTIATE(bf16, bf16, 64)
INSTANTIATE(bf16, bf16, 128)
INSTANTIATE(f16, f16, 64)
INSTANTIATE(f16, f16, 128)
KERNEL(test_wgmma_chain_bf16, float *c, const bf16 *a, const bf16 *b, const bf16 *d) { chain(c, a, b, d); }
KERNEL(test_wgmma_chain_f16, float *c, const f16 *a, const f16 *b, const f16 *d) { chain(c, a, b, d); }
