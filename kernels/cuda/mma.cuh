// Tensor-core instructions of sm_80 and newer: matrix products of a warp, and how their operands get into registers.
//
// All 32 lanes of a warp must reach `mma` and `ldmatrix` together. On a GPU these functions are single instructions;
// the emulation models them (`emulation/tensor_core.h`). A kernel includes this file after `common.cuh`.
//
// The fragments of a lane, with g = lane / 4 and t = lane % 4; a register has two elements, the first one low:
// - A, 16 × 16: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), each with its right neighbor
// - B, 16 × 8: (2t, g), (2t + 8, g), each with its lower neighbor
// - C, 16 × 8: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)

#ifndef ULYSSES_MMA_CUH
#define ULYSSES_MMA_CUH

#ifndef ULYSSES_EMULATION
// c += a · b, for elements of T: bf16 or f16.
template <typename T> __device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]);

#define DEFINE_MMA(T, type)                                                                                       \
    template <>                                                                                                   \
    __device__ __forceinline__ void mma_m16n8k16<T>(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {        \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." #type "." #type ".f32 {%0, %1, %2, %3}, "           \
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                              \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                         \
    }
DEFINE_MMA(bf16, bf16)
DEFINE_MMA(f16, f16)

// An address in shared memory, as instructions expect it.
__device__ __forceinline__ u32 shared_address(const void *address) {
    return static_cast<u32>(__cvta_generic_to_shared(address));
}

// Reads N = 1, 2 or 4 matrices of 8 × 8 elements of 16 bits from shared memory. Lane 8 · i + r has the address of
// row r of matrix i, a multiple of 16 bytes. Register i gets (g, 2t) and (g, 2t + 1) of matrix i; if transposed,
// (2t, g) and (2t + 1, g).
template <u32 N, bool kTransposed> __device__ __forceinline__ void ldmatrix(u32 (&to)[N], const void *row) {
    static_assert(N == 1 || N == 2 || N == 4, "ldmatrix reads 1, 2 or 4 matrices");
    const u32 from = shared_address(row);
    if constexpr (N == 1 && !kTransposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(to[0]) : "r"(from) : "memory");
    } else if constexpr (N == 1) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(to[0]) : "r"(from) : "memory");
    } else if constexpr (N == 2 && !kTransposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(to[0]), "=r"(to[1])
                     : "r"(from)
                     : "memory");
    } else if constexpr (N == 2) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(to[0]), "=r"(to[1])
                     : "r"(from)
                     : "memory");
    } else if constexpr (!kTransposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(from)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(from)
                     : "memory");
    }
}

// Starts a copy of kBytes = 4, 8 or 16 from global to shared memory. Only `source_bytes` are read, the rest is
// filled with 0. Both addresses are multiples of kBytes. The target must not be read before `cp_async_wait`, and by
// other threads not before a barrier after it.
template <u32 kBytes> __device__ __forceinline__ void cp_async(void *to, const void *from, u32 source_bytes = kBytes) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
    if constexpr (kBytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                     "r"(source_bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes),
                     "r"(source_bytes)
                     : "memory");
    }
}

// Makes a group of this thread's copies since the last call.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the last kPending groups of this thread are in flight.
template <u32 kPending> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
#else
#include "emulation/tensor_core.h"

template <typename T> void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    ::emulation::mma<T>(c, a, b);
}
template <u32 N, bool kTransposed> void ldmatrix(u32 (&to)[N], const void *row) {
    static_assert(N == 1 || N == 2 || N == 4, "ldmatrix reads 1, 2 or 4 matrices");
    ::emulation::load_matrices<N, kTransposed>(to, row);
}
template <u32 kBytes> void cp_async(void *to, const void *from, u32 source_bytes = kBytes) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
    ::emulation::copy_async(to, from, kBytes, source_bytes);
}
inline void cp_async_commit() { ::emulation::commit_copies(); }
template <u32 kPending> void cp_async_wait() { ::emulation::wait_for_copies(kPending); }
#endif

// The chunk of 16 bytes in which to store `chunk` of a row, for rows of a multiple of 128 bytes: then neither 8
// rows of a matrix nor the 8 chunks of a row share banks.
__device__ __forceinline__ u32 swizzled(u32 row, u32 chunk) { return chunk ^ (row & 7); }

#endif
