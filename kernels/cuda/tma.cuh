// Tiles of a tensor, copied to shared memory by the TMA unit of sm_90, and barriers in shared memory that know when the
// copies are complete.
//
// One thread starts a copy of a whole tile, and no other thread takes part. On a GPU these functions are single
// instructions; the emulation models them (`emulation/tma.h`). A kernel includes this file after `wgmma.cuh`.

#ifndef ULYSSES_TMA_CUH
#define ULYSSES_TMA_CUH

#ifndef ULYSSES_EMULATION
// A tensor [sequence, row, head, D] and the size of its tiles: a CUtensorMap, made by the host (`src/device/tensor_map.rs`).
// A kernel's parameter by BY_VALUE.
struct alignas(64) TensorMap {
    u64 content[16];
};

// Initializes a barrier for phases of `count` arrivals each. Other threads may use it after a barrier of the block, and
// TMA if `fence_async_proxy` comes before that.
__device__ __forceinline__ void mbarrier_init(u64 *barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// Arrives at the current phase. What this warp has read and written up to its last `__syncwarp` comes before what others
// do after the phase.
__device__ __forceinline__ void mbarrier_arrive(u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and lets the phase also wait for so many bytes of copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Nanoseconds of a clock that all multiprocessors share.
__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Waits until phase `phase` is complete, the current one or the one before it. A phase that is never completed would
// hang the GPU: after two seconds it ends the launch with an error.
__device__ __forceinline__ void mbarrier_wait(u64 *barrier, u32 phase) {
    constexpr u64 kLimit = 2'000'000'000;
    const u32 address = shared_address(barrier);
    for (u64 start = 0;;) {
        u32 is_complete;
        // It suspends the thread for a while.
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(is_complete)
                     : "r"(address), "r"(phase % 2)
                     : "memory");
        if (is_complete) return;
        const u64 now = nanoseconds();
        if (start == 0) start = now;
        // An access to no memory. Next to a `trap`, ptxas 13.0 gives a warpgroup fewer registers than
        // `raise_registers` says.
        if (now - start > kLimit) asm volatile("st.global.u32 [%0], %1;" ::"l"(u64{0}), "r"(0) : "memory");
    }
}

// Starts a copy of the tile of a tensor that begins at these indices to panels (`wgmma.cuh`) at `to`, a multiple of 1024
// bytes. Elements that do not exist become 0. All bytes of the tile count for the barrier's phase.
__device__ __forceinline__ void tma_copy(void *to, const TensorMap &tensor, u32 column, u32 head, u32 row, u32 sequence,
                                          u64 *barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
                 "%5}], [%6];" ::"r"(shared_address(to)),
                 "l"(&tensor), "r"(column), "r"(head), "r"(row), "r"(sequence), "r"(shared_address(barrier))
                 : "memory");
}
#else
#include "emulation/tma.h"

struct TensorMap {
    u64 content[16];
};
inline void mbarrier_init(u64 *barrier, u32 count) { ::emulation::mbarrier_init(barrier, count); }
inline void mbarrier_arrive(u64 *barrier) { ::emulation::mbarrier_arrive(barrier, 0); }
inline void mbarrier_arrive_expect_tx(u64 *barrier, u32 bytes) { ::emulation::mbarrier_arrive(barrier, bytes); }
inline void mbarrier_wait(u64 *barrier, u32 phase) { ::emulation::mbarrier_wait(barrier, phase); }
inline void tma_copy(void *to, const TensorMap &tensor, u32 column, u32 head, u32 row, u32 sequence, u64 *barrier) {
    ::emulation::tma_copy(to, tensor.content, {column, head, row, sequence}, barrier);
}
#endif

#endif
