// Kernels that only tests run: copies of tiles by TMA, and faults in their use that the emulation must find.

#include "common.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "tma.cuh"

namespace {

constexpr u32 kRows = 16, kStages = 2;

enum Fault : u32 {
    kNone,
    kNoFence,
    kNoInit,
    kNoWait,
    kTooFewBytes,
    kTooManyBytes,
    kTooManyArrivals,
    kNoRelease,
    kReadsAfterRelease,
    kWrongPhase,
    kWithoutWaitForUse,
    kMisplaced,
    kOneLaneWaits,
    kEndsEarly,
};

// After the PTX ISA, not after `Panels`: rows of 128 bytes, whose 16-byte chunks are exchanged by the row.
__device__ __forceinline__ u32 in_panel(u32 row, u32 column) {
    return row * 64 + (column / 8 ^ row % 8) * 8 + column % 8;
}

// y [sequence, tile, kRows, 64] are tiles of a head's columns from `column` on, from row `first_row` on: copied by the last
// warp, and read by two others.
__device__ __forceinline__ void copy(bf16 *y, const TensorMap &x, u32 head, u32 column, u32 first_row, u32 tiles,
                                     u32 fault) {
    DYNAMIC_SHARED(bf16, shared);
    SHARED(u64, barriers, [2 * kStages]);
    u64 *filled = barriers, *used = barriers + kStages;
    const u32 producer = 2 * kWarp, lane = threadIdx.x % kWarp;
    if (threadIdx.x == producer) {
        for (u32 stage = 0; stage < kStages; ++stage) {
            mbarrier_init(filled + stage, 1);
            if (fault != kNoInit) mbarrier_init(used + stage, 2);
        }
        if (fault != kNoFence) fence_async_proxy();
    }
    __syncthreads();
    if (threadIdx.x >= producer) {
        if (fault == kEndsEarly) tiles = kStages;
        for (u32 tile = 0; tile < tiles && threadIdx.x == producer; ++tile) {
            const u32 stage = tile % kStages, round = tile / kStages;
            if (round > 0 && fault != kWithoutWaitForUse) mbarrier_wait(used + stage, round - (fault != kWrongPhase));
            const u32 difference = fault == kTooFewBytes ? 16u : fault == kTooManyBytes ? -16u : 0u;
            mbarrier_arrive_expect_tx(filled + stage, kRows * 128 - difference);
            bf16 *to = shared + stage * kRows * 64 + (fault == kMisplaced ? 64 : 0);
            tma_copy(to, x, column, head, first_row + tile * kRows, blockIdx.x, filled + stage);
        }
        return;
    }
    if (fault == kEndsEarly) return;
    for (u32 tile = 0; tile < tiles; ++tile) {
        const u32 stage = tile % kStages;
        const bf16 *from = shared + stage * kRows * 64;
        if (fault != kNoWait && (fault != kOneLaneWaits || lane == 0)) mbarrier_wait(filled + stage, tile / kStages);
        if (fault == kReadsAfterRelease) {
            __syncwarp();
            if (lane == 0) mbarrier_arrive(used + stage);
        }
        for (u32 i = threadIdx.x; i < kRows * 64; i += producer) {
            y[(static_cast<u64>(blockIdx.x) * tiles + tile) * kRows * 64 + i] = from[in_panel(i / 64, i % 64)];
        }
        if (fault == kReadsAfterRelease || fault == kNoRelease) continue;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(used + stage);
        if (lane == 0 && fault == kTooManyArrivals) mbarrier_arrive(used + stage);
    }
}

}  // namespace

KERNEL(test_tma_copy, bf16 *y, BY_VALUE(TensorMap) x, u32 head, u32 column, u32 first_row, u32 tiles, u32 fault) {
    copy(y, x, head, column, first_row, tiles, fault);
}
