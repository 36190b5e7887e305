// Parts of the fused attention kernels (`src/attention/fused`): tiles of rows in shared memory, their products on
// tensor cores, and the rows of queries, keys and values in tensors. A kernel includes this file after `common.cuh`
// and `mma.cuh`.
//
// A block has kFusedThreads threads. Products are spread over the lanes of a warp as the C operand of `mma.cuh`:
// c[m][n] has the 16 rows from 16 · m and the 8 columns from 8 · n on. With g = lane / 4 and t = lane % 4, c[m][n][i]
// is row g + 8 · (i / 2), column 2 · t + i % 2.

#ifndef ULYSSES_ATTENTION_FUSED_CUH
#define ULYSSES_ATTENTION_FUSED_CUH

inline constexpr u32 kFusedThreads = 128;
inline constexpr u32 kFusedWarps = kFusedThreads / kWarp;
inline constexpr float kLog2E = 1.4426950408889634f;

#ifndef ULYSSES_EMULATION
// 2^x in one instruction, with a relative error of at most 2^-22; subnormal results are 0.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two elements in a register, the first one low.
template <typename T> __device__ __forceinline__ u32 round_pair(float low, float high);
template <> __device__ __forceinline__ u32 round_pair<bf16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
template <> __device__ __forceinline__ u32 round_pair<f16>(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#else
inline float fast_exp2(float x) { return std::exp2(x); }
template <typename T> u32 round_pair(float low, float high) {
    return round_to<T>(low).bits | static_cast<u32>(round_to<T>(high).bits) << 16;
}
#endif

// The keys that a token sees: from `begin` to before `end`. Neither ever decreases from a token to the next.
struct Visible {
    u32 begin, end;
    __device__ __forceinline__ bool contains(u32 key) const { return begin <= key && key < end; }
};

__device__ __forceinline__ Visible visible_to(const u32 *ranges, u32 token) {
    const Pack<u32, 2> range = *reinterpret_cast<const Pack<u32, 2> *>(ranges + 2 * static_cast<u64>(token));
    return {range.at[0], range.at[1]};
}

// What a block computes: a part of the rows or keys of a KV head, one of the launch's.
struct BlockPlace {
    u32 part, kv_head;
};

// The place of the block `index` of a grid. Blocks start in the order of their index, and the first parts of a head see
// the most under a causal mask. Started when little else is left, those of the last head would run alone in the end. So
// blocks of so many heads alternate that two for each of 132 multiprocessors (an H100) come before the next heads.
__device__ __forceinline__ BlockPlace block_place(u32 parts, u32 kv_heads, u32 index) {
    constexpr u32 kTogether = 2 * 132;
    const u32 heads = parts < kTogether ? (kTogether + parts - 1) / parts : 1;
    const u32 first = index / (parts * heads) * heads, in_group = index % (parts * heads);
    const u32 in_part = kv_heads - first < heads ? kv_heads - first : heads;
    return {in_group / in_part, first + in_group % in_part};
}
__device__ __forceinline__ BlockPlace block_place() {
    return block_place(gridDim.x, gridDim.y, blockIdx.y * gridDim.x + blockIdx.x);
}

// The sizes of a launch, for the KV heads from `first_kv_head` on, of `group` query heads each. The grid is [parts of a
// KV head's rows or keys, KV heads, sequences].
struct FusedSizes {
    u32 tokens, keys, num_heads, num_kv_heads, first_kv_head, group;
    // Packed rows of a KV head.
    __device__ __forceinline__ u32 rows() const { return tokens * group; }
};

// The queries of a KV head, packed: row = token · group + member, for a tensor [token, head, D].
template <typename T, u32 D> struct PackedRows {
    T *x;
    const u32 *heads;  // of the members
    u32 count, group, num_heads;

    __device__ __forceinline__ T *at(u64 row) const {
        const u32 at = static_cast<u32>(row);
        return x + (static_cast<u64>(at / group) * num_heads + heads[at % group]) * D;
    }
};

// This block's rows of a tensor [sequence, token, head, D]; `heads` has the launch's query heads, sorted by KV head.
template <u32 D, typename T>
__device__ __forceinline__ PackedRows<T, D> packed_rows(T *x, const u32 *heads, const FusedSizes &sizes) {
    const u64 token = static_cast<u64>(blockIdx.z) * sizes.tokens;
    return {x + token * sizes.num_heads * D, heads + block_place().kv_head * sizes.group, sizes.rows(), sizes.group,
            sizes.num_heads};
}

// The keys or values of a KV head in a tensor [key, head, D].
template <typename T, u32 D> struct KeyRows {
    T *x;
    u32 count;
    u64 stride;

    __device__ __forceinline__ T *at(u64 key) const { return x + key * stride; }
};

// This block's keys or values in a tensor [sequence, key, head, D].
template <u32 D, typename T> __device__ __forceinline__ KeyRows<T, D> key_rows(T *x, const FusedSizes &sizes) {
    const u64 first = static_cast<u64>(blockIdx.z) * sizes.keys * sizes.num_kv_heads;
    const u64 head = first + sizes.first_kv_head + block_place().kv_head;
    return {x + head * D, sizes.keys, static_cast<u64>(sizes.num_kv_heads) * D};
}

// Rows of D elements in shared memory. The chunks of 16 bytes of a row are permuted in groups of 8, or of 4 for an odd
// multiple of 64 bytes, so that neither 8 rows of a matrix nor the chunks of a group share banks.
template <typename T, u32 D> struct Tile {
    using Element = T;
    static constexpr u32 kChunk = 16 / sizeof(T), kChunks = D / kChunk, kGroup = kChunks % 8 == 0 ? 8 : 4;
    static_assert(kChunks % kGroup == 0, "rows are a multiple of 64 bytes");
    T *first;

    // Chunk `chunk + right` of a row; `right` is 0, or 1 for an even `chunk`. If only `chunk` and multiples of 8 rows are
    // constants, all addresses of a lane follow from one register.
    __device__ __forceinline__ T *at(u32 row, u32 chunk, u32 right = 0) const {
        const u32 permuted = right ^ (kGroup == 8 ? row & 7 : row / 2 & 3);
        const u32 in_group = (row * D + permuted * kChunk) ^ chunk % kGroup * kChunk;
        return first + in_group + chunk / kGroup * kGroup * kChunk;
    }

    // The rows from `row` on, a multiple of 8.
    __device__ __forceinline__ Tile from(u32 row) const { return {first + row * D}; }
};

// Starts copies of kRows rows from `first` on to a tile, by all threads of the block; rows that do not exist become 0.
template <u32 kRows, u32 kThreads = kFusedThreads, typename AnyTile, typename Rows>
__device__ __forceinline__ void copy_rows(const AnyTile &tile, const Rows &rows, u32 first) {
    constexpr u32 kChunk = AnyTile::kChunk, kChunks = AnyTile::kChunks;
    // Threads per row: a power of two, so that a thread's rows and chunks are swizzled alike.
    constexpr u32 kAcross = kChunks & ~(kChunks - 1), kDown = kThreads / kAcross;
    static_assert(kRows % kDown == 0, "all threads copy equally much");
    const int existing = static_cast<int>(rows.count - first) - static_cast<int>(threadIdx.x / kAcross);
#pragma unroll
    for (u32 i = 0; i < kRows; i += kDown) {
        const u32 row = i + threadIdx.x / kAcross;
        const auto *from = rows.at(static_cast<u64>(first) + row);
        const u32 bytes = static_cast<int>(i) < existing ? 16 : 0;
#pragma unroll
        for (u32 j = 0; j < kChunks; j += kAcross) {
            const u32 chunk = j + threadIdx.x % kAcross;
            cp_async<16>(tile.at(row, chunk), from + chunk * kChunk, bytes);
        }
    }
}

// Waits for all copies of the block. All threads are also past their reads of what was copied before.
__device__ __forceinline__ void wait_for_copies() {
    cp_async_wait<0>();
    __syncthreads();
}

// Operand A: a[r][k] = tile[row + r][16 · step + k].
template <typename T, u32 D>
__device__ __forceinline__ void load_a(u32 (&a)[4], const Tile<T, D> &tile, u32 row, u32 step) {
    const u32 lane = threadIdx.x % kWarp;
    ldmatrix<4, false>(a, tile.from(row).at(lane % 16, 2 * step, lane / 16));
}

// Operand B of 16 columns: b[k][n] = tile[row + k][16 · step + n].
template <typename T, u32 D>
__device__ __forceinline__ void load_b(u32 (&b)[4], const Tile<T, D> &tile, u32 row, u32 step) {
    const u32 lane = threadIdx.x % kWarp;
    ldmatrix<4, true>(b, tile.from(row).at(lane % 16, 2 * step, lane / 16));
}

// Operand B of 16 columns that are rows of the tile: b[k][n] = tile[row + n][16 · step + k].
template <typename T, u32 D>
__device__ __forceinline__ void load_b_transposed(u32 (&b)[4], const Tile<T, D> &tile, u32 row, u32 step) {
    const u32 lane = threadIdx.x % kWarp;
    ldmatrix<4, false>(b, tile.from(row).at(lane / 16 * 8 + lane % 8, 2 * step, lane / 8 % 2));
}

// `mma` with 16 columns: those of `left`, then those of `right`.
template <typename T>
__device__ __forceinline__ void mma_m16n16k16(float (&left)[4], float (&right)[4], const u32 (&a)[4],
                                              const u32 (&b)[4]) {
    const u32 of_left[2] = {b[0], b[1]}, of_right[2] = {b[2], b[3]};
    mma_m16n8k16<T>(left, a, of_left);
    mma_m16n8k16<T>(right, a, of_right);
}

// c += a · bᵀ for 16 · kM rows of `a` from `row` on, and the first 8 · kN rows of b.
template <typename T, u32 D, u32 kM, u32 kN>
__device__ __forceinline__ void multiply_transposed(float (&c)[kM][kN][4], const Tile<T, D> &a, u32 row,
                                                    const Tile<T, D> &b) {
    // Not unrolled completely: ptxas would load so far ahead that it spills registers.
#pragma unroll 4
    for (u32 step = 0; step < D / 16; ++step) {
        u32 of_a[kM][4];
#pragma unroll
        for (u32 m = 0; m < kM; ++m) load_a(of_a[m], a, row + 16 * m, step);
#pragma unroll
        for (u32 n = 0; n < kN; n += 2) {
            u32 of_b[4];
            load_b_transposed(of_b, b, 8 * n, step);
#pragma unroll
            for (u32 m = 0; m < kM; ++m) mma_m16n16k16<T>(c[m][n], c[m][n + 1], of_a[m], of_b);
        }
    }
}

// c += a · b for `a` in registers, and the first 16 · kK rows of b.
template <typename T, u32 D, u32 kM, u32 kK>
__device__ __forceinline__ void multiply(float (&c)[kM][D / 8][4], const u32 (&a)[kM][kK][4], const Tile<T, D> &b) {
#pragma unroll
    for (u32 k = 0; k < kK; ++k) {
#pragma unroll
        for (u32 n = 0; n < D / 8; n += 2) {
            u32 of_b[4];
            load_b(of_b, b, 16 * k, n / 2);
#pragma unroll
            for (u32 m = 0; m < kM; ++m) mma_m16n16k16<T>(c[m][n], c[m][n + 1], a[m][k], of_b);
        }
    }
}

// Rounds products to operand A. No lane needs an element of another one.
template <typename T, u32 kM, u32 kN>
__device__ __forceinline__ void round_to_a(u32 (&a)[kM][kN / 2][4], const float (&c)[kM][kN][4]) {
#pragma unroll
    for (u32 m = 0; m < kM; ++m) {
#pragma unroll
        for (u32 n = 0; n < kN; ++n) {
            a[m][n / 2][n % 2 * 2] = round_pair<T>(c[m][n][0], c[m][n][1]);
            a[m][n / 2][n % 2 * 2 + 1] = round_pair<T>(c[m][n][2], c[m][n][3]);
        }
    }
}

// Combines the values of the 4 lanes that share a row.
template <typename Op> __device__ __forceinline__ float row_reduce(float value) {
    const Op combine;
    value = combine(value, __shfl_xor_sync(kFullWarp, value, 1));
    return combine(value, __shfl_xor_sync(kFullWarp, value, 2));
}

// Writes products, times the factor of each row, to the rows from `first` on that exist. They pass through the rows
// from `row` on of a tile, which no other warp may use: so whole chunks are written.
template <typename AnyTile, u32 kM, u32 kN, typename Rows>
__device__ __forceinline__ void store_rows(const Rows &rows, u32 first, const AnyTile &tile, u32 row,
                                           const float (&c)[kM][kN][4], const float (&factor)[kM][2]) {
    constexpr u32 kChunk = AnyTile::kChunk, kChunks = AnyTile::kChunks;
    static_assert(kN == kChunks, "all columns of the rows");
    using T = typename AnyTile::Element;
    using Chunk = Pack<T, kChunk>;
    const u32 lane = threadIdx.x % kWarp;
    __syncwarp();
#pragma unroll
    for (u32 m = 0; m < kM; ++m) {
#pragma unroll
        for (u32 n = 0; n < kN; ++n) {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const float low = c[m][n][2 * half] * factor[m][half], high = c[m][n][2 * half + 1] * factor[m][half];
                T *to = tile.from(row + 16 * m + 8 * half).at(lane / 4, n) + lane % 4 * 2;
                *reinterpret_cast<u32 *>(to) = round_pair<T>(low, high);
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (u32 i = lane; i < 16 * kM * kChunks; i += kWarp) {
        const u32 at = i / kChunks, chunk = i % kChunks;
        if (first + at >= rows.count) continue;
        *reinterpret_cast<Chunk *>(rows.at(first + at) + chunk * kChunk) =
            *reinterpret_cast<const Chunk *>(tile.at(row + at, chunk));
    }
}

#endif
