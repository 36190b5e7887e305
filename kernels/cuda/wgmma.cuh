// Matrix products of a warpgroup: tensor-core instructions of sm_90a alone. A warpgroup is four adjacent warps, the
// first of which has an index divisible by four. All of its 128 threads must reach each function together.
//
// Products are asynchronous. Between `wgmma` and the `wgmma_wait` that covers it, nobody may access its registers, nor
// write its operands in shared memory. On a GPU these functions are single instructions; the emulation models them
// (`emulation/warpgroup.h`). A kernel includes this file after `mma.cuh`.
//
// The warps of a warpgroup have 16 rows each of the operands A and C of 64 rows, as fragments of `mma.cuh`: c[n] are
// the columns from 8 · n on.

#ifndef ULYSSES_WGMMA_CUH
#define ULYSSES_WGMMA_CUH

// Elements of 16 bits in a row of a panel: 128 bytes, whose chunks of 16 bytes are permuted as by `swizzled`.
inline constexpr u32 kPanel = 64;

// Bytes between groups of 8 rows in a panel.
inline constexpr u32 kPanelGroup = 8 * kPanel * 2;

#ifndef ULYSSES_EMULATION
// Keeps the compiler from moving accesses of registers across this point.
template <u32 N> __device__ __forceinline__ void pin(float (&c)[N][4]) {
#pragma unroll
    for (u32 i = 0; i < 4 * N; ++i) asm volatile("" : "+f"(c[i / 4][i % 4])::"memory");
}
template <u32 N> __device__ __forceinline__ void pin(u32 (&a)[N][4]) {
#pragma unroll
    for (u32 i = 0; i < 4 * N; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// Orders accesses of these registers before later products. Needed before each batch of products, for all registers
// that it reads or writes.
template <typename... R> __device__ __forceinline__ void wgmma_fence(R &...registers) {
    (pin(registers), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Makes a group of the products since the last call.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most the last kPending groups are in flight. The registers are those of the others.
template <u32 kPending, typename... R> __device__ __forceinline__ void wgmma_wait(R &...registers) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
    (pin(registers), ...);
}

// Makes this thread's completed writes to shared memory visible to products and to TMA that come after a barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits for all threads of this warpgroup: orders their accesses of shared memory.
__device__ __forceinline__ void sync_warpgroup() {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
}

// Gives registers of this warpgroup's threads to others, or takes some: afterwards a thread has kCount. The kernel is one
// of KERNEL_OF_THREADS.
template <u32 kCount> __device__ __forceinline__ void lower_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <u32 kCount> __device__ __forceinline__ void raise_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// c = a · bᵀ, or added to c: 64 rows of `a` by N rows of `b`, 16 elements of each, both in panels.
template <typename T, u32 N>
__device__ __forceinline__ void wgmma(float (&c)[N / 8][4], u64 a, u64 b, bool accumulate);

// c += a · b for fragments of `a` in registers, and 16 rows of `b` with N elements in panels.
template <typename T, u32 N>
__device__ __forceinline__ void wgmma(float (&c)[N / 8][4], const u32 (&a)[4], u64 b);

#define REGISTERS_32                                                                                              \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "  \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define REGISTERS_64                                                                                              \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "  \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "   \
    "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define OUTPUTS_32 FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
#define OUTPUTS_64                                                                                                \
    OUTPUTS_32, FOUR(8), FOUR(9), FOUR(10), FOUR(11), FOUR(12), FOUR(13), FOUR(14), FOUR(15)

// The last two operands of the instruction say whether A and B are transposed: whether columns are adjacent.
#define DEFINE_WGMMA(T, type, N, count, i, j, k, l, m)                                                            \
    template <>                                                                                                   \
    __device__ __forceinline__ void wgmma<T, N>(float (&c)[N / 8][4], u64 a, u64 b, bool accumulate) {            \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #k ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N         \
                     "k16.f32." #type "." #type " " REGISTERS_##count "%" #i ", %" #j ", p, 1, 1, 0, 0;\n}"       \
                     : OUTPUTS_##count                                                                            \
                     : "l"(a), "l"(b), "r"(static_cast<u32>(accumulate)));                                        \
    }                                                                                                             \
    template <>                                                                                                   \
    __device__ __forceinline__ void wgmma<T, N>(float (&c)[N / 8][4], const u32 (&a)[4], u64 b) {                 \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #type "." #type " " REGISTERS_##count      \
                     "{%" #i ", %" #j ", %" #k ", %" #l "}, %" #m ", 1, 1, 1, 1;"                                 \
                     : OUTPUTS_##count                                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                       \
    }
DEFINE_WGMMA(bf16, bf16, 64, 32, 32, 33, 34, 35, 36)
DEFINE_WGMMA(bf16, bf16, 128, 64, 64, 65, 66, 67, 68)
DEFINE_WGMMA(f16, f16, 64, 32, 32, 33, 34, 35, 36)
DEFINE_WGMMA(f16, f16, 128, 64, 64, 65, 66, 67, 68)
#else
#include "emulation/warpgroup.h"

template <typename... R> void wgmma_fence(R &...registers) {
    ::emulation::fence_registers({{&registers, sizeof registers}...});
}
inline void wgmma_commit() { ::emulation::commit_products(); }
template <u32 kPending, typename... R> void wgmma_wait(R &...) { ::emulation::wait_for_products(kPending); }
inline void fence_async_proxy() { ::emulation::fence_async_proxy(); }
inline void sync_warpgroup() { ::emulation::sync_warpgroup(); }
template <u32 kCount> void lower_registers() { ::emulation::set_registers(kCount); }
template <u32 kCount> void raise_registers() { ::emulation::set_registers(kCount); }
template <typename T, u32 N> void wgmma(float (&c)[N / 8][4], u64 a, u64 b, bool accumulate) {
    ::emulation::multiply_shared<T>(c[0], N, a, b, accumulate);
}
template <typename T, u32 N> void wgmma(float (&c)[N / 8][4], const u32 (&a)[4], u64 b) {
    ::emulation::multiply_registers<T>(c[0], N, a, b);
}
inline u32 shared_address(const void *address) { return ::emulation::shared_offset(address); }
#endif

// Rows of D elements in shared memory, in panels of 64 columns, from a multiple of 1024 bytes on.
template <typename T, u32 D, u32 kRows> struct Panels {
    using Element = T;
    static constexpr u32 kChunk = 16 / sizeof(T), kChunks = D / kChunk;
    static_assert(D % kPanel == 0 && kRows % 8 == 0 && sizeof(T) == 2, "whole panels of whole groups of rows");
    T *first;

    __device__ __forceinline__ T *at(u32 row, u32 chunk) const {
        return first + (chunk / 8 * kRows + row) * kPanel + swizzled(row, chunk % 8) * kChunk;
    }

    // The rows from `row` on, a multiple of 8.
    __device__ __forceinline__ Panels from(u32 row) const { return {first + row * kPanel}; }

    // Descriptor of the rows from the first one on and the columns from 16 · step on, as an operand whose rows are
    // multiplied with each other.
    __device__ __forceinline__ u64 of_columns(u32 step) const {
        return descriptor(16) + (step / 4 * kRows * kPanel * 2 + step % 4 * 32) / 16;
    }

    // Descriptor of the 16 rows from 16 · step on and all columns, as operand B.
    __device__ __forceinline__ u64 of_rows(u32 step) const {
        return descriptor(kRows * kPanel * 2) + step * 2 * kPanelGroup / 16;
    }

  private:
    // In units of 16 bytes, 14 bits each: the address, the distance of panels ("leading dimension"; without meaning along
    // columns), and the distance of groups of 8 rows ("stride dimension"). Bit 62: panels are swizzled by 128 bytes.
    __device__ __forceinline__ u64 descriptor(u32 between_panels) const {
        return (shared_address(first) / 16 & 0x3fff) | static_cast<u64>(between_panels / 16) << 16 |
               static_cast<u64>(kPanelGroup / 16) << 32 | u64{1} << 62;
    }
};

#endif
