// Kernels that only tests run: the instructions of `mma.cuh` one by one, a small matmul of them, places of blocks and rows.

#include "common.cuh"
#include "mma.cuh"
#include "attention_fused.cuh"
#include "attention_fused_backward.cuh"

namespace {

// Fragments after the formulas of the PTX ISA for the fragments of mma.m16n8k16 with 16-bit elements: element i of a
// lane's A, B and C.
__device__ __forceinline__ u32 a_row(u32 lane, u32 i) {
    return i < 2 || (i >= 4 && i < 6) ? lane >> 2 : (lane >> 2) + 8;
}
__device__ __forceinline__ u32 a_column(u32 lane, u32 i) { return (lane & 3) * 2 + (i & 1) + (i < 4 ? 0 : 8); }
__device__ __forceinline__ u32 b_row(u32 lane, u32 i) { return (lane & 3) * 2 + (i & 1) + (i < 2 ? 0 : 8); }
__device__ __forceinline__ u32 c_row(u32 lane, u32 i) { return i < 2 ? lane >> 2 : (lane >> 2) + 8; }
__device__ __forceinline__ u32 c_column(u32 lane, u32 i) { return (lane & 3) * 2 + (i & 1); }

template <typename T> __device__ __forceinline__ u32 pair_of(T low, T high) {
    return low.bits | static_cast<u32>(high.bits) << 16;
}

// c [16, 8] += a [16, 16] · b [16, 8]
template <typename T> __device__ __forceinline__ void product(float *c, const T *a, const T *b) {
    const u32 lane = threadIdx.x;
    u32 of_a[4], of_b[2];
    float of_c[4];
    for (u32 i = 0; i < 8; i += 2) {
        const T *low = a + a_row(lane, i) * 16 + a_column(lane, i);
        of_a[i / 2] = pair_of(low[0], low[1]);
    }
    for (u32 i = 0; i < 4; i += 2) {
        const T *low = b + b_row(lane, i) * 8 + lane / 4;
        of_b[i / 2] = pair_of(low[0], low[8]);
    }
    for (u32 i = 0; i < 4; ++i) of_c[i] = c[c_row(lane, i) * 8 + c_column(lane, i)];
    mma_m16n8k16<T>(of_c, of_a, of_b);
    for (u32 i = 0; i < 4; ++i) c[c_row(lane, i) * 8 + c_column(lane, i)] = of_c[i];
}

// registers[lane][i] of ldmatrix on N matrices [8, 8].
template <u32 N, bool kTransposed> __device__ __forceinline__ void fragments(u32 *registers, const f16 *matrices) {
    DYNAMIC_SHARED(f16, shared);
    const u32 lane = threadIdx.x;
    for (u32 i = lane; i < 64 * N; i += kWarp) shared[i] = matrices[i];
    __syncwarp();
    u32 loaded[N];
    ldmatrix<N, kTransposed>(loaded, shared + lane % (8 * N) * 8);
    for (u32 i = 0; i < N; ++i) registers[lane * N + i] = loaded[i];
}

// Rows of a tile of a, rows and columns of a tile of b, and elements of a chunk.
constexpr u32 kRows = 16, kDepth = 64, kChunk = 8;
constexpr u32 kStage = (kRows + kDepth) * kDepth;

// Element (row, first of a chunk) of a tile with 64 columns.
template <bool kSwizzle> __device__ __forceinline__ u32 at(u32 row, u32 chunk) {
    return row * kDepth + (kSwizzle ? swizzled(row, chunk) : chunk) * kChunk;
}

// Starts copies of a [16, 64] from column k and of b [64, 64] from row k; 0 beyond the matrices.
template <typename T, bool kSwizzle>
__device__ __forceinline__ void load_stage(T *stage, const T *a, const T *b, u32 k, u32 depth, u32 columns) {
    for (u32 i = threadIdx.x; i < (kRows + kDepth) * kChunk; i += blockDim.x) {
        const u32 row = i / kChunk, chunk = i % kChunk;
        const bool is_a = row < kRows;
        const u32 at_k = is_a ? k + chunk * kChunk : k + row - kRows, column = chunk * kChunk;
        const bool exists = at_k < depth && (is_a || column < columns);
        const T *from = is_a ? a + row * depth + at_k : b + at_k * columns + column;
        cp_async<16>(stage + at<kSwizzle>(row, chunk), exists ? from : a, exists ? 16 : 0);
    }
}

// c [16, columns] = a [16, depth] · b [depth, columns] by two warps, each of 32 columns; depth and columns are
// multiples of 8, columns at most 64.
template <typename T, bool kSwizzle>
__device__ __forceinline__ void matmul(float *c, const T *a, const T *b, u32 depth, u32 columns) {
    DYNAMIC_SHARED(T, shared);
    const u32 lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp * 32;
    float sums[4][4] = {};
    load_stage<T, kSwizzle>(shared, a, b, 0, depth, columns);
    cp_async_commit();
#pragma unroll 1
    for (u32 k = 0, stage = 0; k < depth; k += kDepth, stage ^= 1) {
        if (k + kDepth < depth) {
            load_stage<T, kSwizzle>(shared + (stage ^ 1) * kStage, a, b, k + kDepth, depth, columns);
        }
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        const T *tile = shared + stage * kStage;
#pragma unroll
        for (u32 step = 0; step < kDepth; step += 16) {
            u32 of_a[4];
            ldmatrix<4, false>(of_a, tile + at<kSwizzle>(lane % 16, step / kChunk + lane / 16));
#pragma unroll
            for (u32 n = 0; n < 4; ++n) {
                u32 of_b[2];
                const u32 row = kRows + step + lane % 16;
                ldmatrix<2, true>(of_b, tile + at<kSwizzle>(row, first / kChunk + n));
                mma_m16n8k16<T>(sums[n], of_a, of_b);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 n = 0; n < 4; ++n) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 column = first + n * 8 + c_column(lane, i);
            if (column < columns) c[c_row(lane, i) * columns + column] = sums[n][i];
        }
    }
}

}  // namespace

#define INSTANTIATE(T, suffix)                                                                              \
    KERNEL(test_mma_##suffix, float *c, const T *a, const T *b) { product(c, a, b); }                       \
    KERNEL(test_matmul_##suffix, float *c, const T *a, const T *b, u32 depth, u32 columns) {                \
        matmul<T, true>(c, a, b, depth, columns);                                                           \
    }                                                                                                       \
    KERNEL(test_matmul_unswizzled_##suffix, float *c, const T *a, const T *b, u32 depth, u32 columns) {     \
        matmul<T, false>(c, a, b, depth, columns);                                                          \
    }
INSTANTIATE(bf16, bf16)
INSTANTIATE(f16, f16)

#define LDMATRIX(N)                                                                                         \
    KERNEL(test_ldmatrix_x##N, u32 *registers, const f16 *matrices) { fragments<N, false>(registers, matrices); } \
    KERNEL(test_ldmatrix_x##N##_trans, u32 *registers, const f16 *matrices) { fragments<N, true>(registers, matrices); }
LDMATRIX(1)
LDMATRIX(2)
LDMATRIX(4)

// out[lane] = the kBytes at from[lane], of which `source_bytes` are copied, in u32 words.
#define CP_ASYNC(bytes)                                                                                     \
    KERNEL(test_cp_async_##bytes, u32 *out, const u32 *from, u32 source_bytes) {                            \
        constexpr u32 kWords = bytes / 4;                                                                   \
        DYNAMIC_SHARED(u32, shared);                                                                        \
        const u32 first = threadIdx.x * kWords;                                                             \
        cp_async<bytes>(shared + first, from + first, source_bytes);                                        \
        cp_async_commit();                                                                                  \
        cp_async_wait<0>();                                                                                 \
        for (u32 i = first; i < first + kWords; ++i) out[i] = shared[i];                                    \
    }
CP_ASYNC(4)
CP_ASYNC(8)
CP_ASYNC(16)

// places [kv_heads · parts, 2] of a grid, by one thread.
KERNEL(test_block_place, u32 *places, u32 parts, u32 kv_heads) {
    for (u32 index = 0; index < parts * kv_heads; ++index) {
        const BlockPlace place = block_place(parts, kv_heads, index);
        places[2 * index] = place.part;
        places[2 * index + 1] = place.kv_head;
    }
}

// Element offsets of tensors with `tokens` · 8 heads (4 KV heads), which nothing reads: of a packed row of the first KV head as a
// pointer and as an offset, of its term, and of a key as a pointer and as an offset. offsets [5, 2] has their low and high words.
KERNEL(test_offsets, u32 *offsets, const u32 *heads, u32 tokens, u32 row, u32 key) {
    constexpr u32 kDim = 128;
    u8 *x = reinterpret_cast<u8 *>(offsets);
    const FusedSizes sizes{tokens, tokens, 8, 4, 0, 2};
    const Operands<u8, kDim> operands{x, x, x, x, nullptr, nullptr, heads, nullptr, sizes, 0};
    const u64 found[] = {static_cast<u64>(packed_rows<kDim>(x, heads, sizes).at(row) - x), operands.offset_of_row(row),
                         operands.offset_of_term(row), static_cast<u64>(key_rows<kDim>(x, sizes).at(key) - x),
                         operands.offset_of_key(key)};
    for (u32 i = 0; i < 5; ++i) {
        offsets[2 * i] = static_cast<u32>(found[i]);
        offsets[2 * i + 1] = static_cast<u32>(found[i] >> 32);
    }
}
