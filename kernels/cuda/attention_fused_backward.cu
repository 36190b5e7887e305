// Fused attention, backward (`src/attention/fused/backward.rs`): probabilities and the gradients of scores exist only
// in registers.
//
//     p = exp(scale · q·kᵀ − lse)      ds = p · (dout·vᵀ − delta)
//     dv = pᵀ·dout      dk = scale · dsᵀ·q      dq = scale · ds·k
//
// Two kernels compute p and ds, so that every sum belongs to one block and has one order, without atomics. A block
// owns kRows rows of two tensors and processes those rows of the other two that have visible pairs with them, in tiles:
// - `keys` owns keys and values, and sums dk and dv over packed rows (`PackedRows`)
// - `queries` owns packed rows of q and dout, and sums dq over keys
// A warp has 16 of the block's rows, as operand A in its registers from beginning to end. It processes a tile in steps
// of 16 rows. So it reads each tile from shared memory once for each of its products, and nothing else.

#include "common.cuh"
#include "mma.cuh"
#include "attention_fused.cuh"

namespace {

constexpr u32 kRows = 64, kStep = 16;
static_assert(kRows == 16 * kFusedWarps, "16 rows per warp");

// What the gradients of a packed row's scores need besides q and dout.
struct RowTerms {
    float lse, delta;
    Visible visible;
};

// kRows rows of two tensors in shared memory: of k and v, or packed rows of q and dout with their terms.
template <typename T, u32 D> struct Stage {
    static constexpr u32 kBytes = kRows * (2 * D * sizeof(T) + sizeof(RowTerms));
    Tile<T, D> left, right;
    RowTerms *terms;

    __device__ __forceinline__ explicit Stage(u8 *bytes)
        : left{reinterpret_cast<T *>(bytes)},
          right{left.first + kRows * D},
          terms(reinterpret_cast<RowTerms *>(right.first + kRows * D)) {}
};

// The operands of both kernels: `q`, `dout` [sequence, token, head, D], `k`, `v` [sequence, key, KV head, D],
// `lse`, `delta` [sequence, head, token], `ranges` [sequence, token], and `heads` as in `packed_rows`.
template <typename T> struct Operands {
    const T *q, *k, *v, *dout;
    const float *lse, *delta;
    const u32 *heads, *ranges;
};

// The keys of a KV head, and the packed rows of its queries: where a block finds them. Addresses are computed from the
// kernel's parameters each time, since registers are scarce.
template <typename T, u32 D> struct Block {
    const Operands<T> &operands;
    const FusedSizes &sizes;
    u32 sequence, kv_head, index;

    __device__ __forceinline__ const u32 *ranges() const {
        return operands.ranges + 2 * static_cast<u64>(sequence) * sizes.tokens;
    }
    __device__ __forceinline__ u64 offset_of_key(u32 key) const {
        const u64 token = static_cast<u64>(sequence) * sizes.keys + key;
        return (token * sizes.num_kv_heads + sizes.first_kv_head + kv_head) * D;
    }
    __device__ __forceinline__ u32 head_of(u32 row) const {
        return operands.heads[kv_head * sizes.group + row % sizes.group];
    }
    __device__ __forceinline__ u64 offset_of_row(u32 row) const {
        const u64 token = static_cast<u64>(sequence) * sizes.tokens + row / sizes.group;
        return (token * sizes.num_heads + head_of(row)) * D;
    }
    __device__ __forceinline__ u64 term_of_row(u32 row) const {
        const u64 head = static_cast<u64>(sequence) * sizes.num_heads + head_of(row);
        return head * sizes.tokens + row / sizes.group;
    }
};

// Starts copies of kRows rows of two tensors, from `first` on; rows that do not exist become 0. Eight threads copy a row,
// so that few offsets are computed.
template <typename T, u32 D, typename Offset>
__device__ __forceinline__ void copy_pairs(const Stage<T, D> &to, const T *left, const T *right, u32 first, u32 count,
                                           const Offset &offset_of) {
    constexpr u32 kThreads = 8;
#pragma unroll 1
    for (u32 row = threadIdx.x / kThreads; row < kRows; row += kFusedThreads / kThreads) {
        const bool exists = first + row < count;
        const u64 offset = offset_of(exists ? first + row : first);
#pragma unroll
        for (u32 chunk = threadIdx.x % kThreads; chunk < Tile<T, D>::kChunks; chunk += kThreads) {
            const u64 at = offset + chunk * Tile<T, D>::kChunk;
            cp_async<16>(to.left.at(row, chunk), left + at, exists ? 16 : 0);
            cp_async<16>(to.right.at(row, chunk), right + at, exists ? 16 : 0);
        }
    }
}

template <typename T, u32 D>
__device__ __forceinline__ void copy_keys(const Stage<T, D> &to, const Block<T, D> &block, u32 first) {
    copy_pairs(to, block.operands.k, block.operands.v, first, block.sizes.keys,
               [&](u32 key) { return block.offset_of_key(key); });
}

// Rows that do not exist become 0, and so do their contributions to all sums.
template <typename T, u32 D>
__device__ __forceinline__ void copy_queries(const Stage<T, D> &to, const Block<T, D> &block, u32 first) {
    const u32 count = block.sizes.rows();
    copy_pairs(to, block.operands.q, block.operands.dout, first, count,
               [&](u32 row) { return block.offset_of_row(row); });
    if (threadIdx.x >= kRows) return;
    const bool exists = first + threadIdx.x < count;
    const u32 row = exists ? first + threadIdx.x : first;
    const u64 at = block.term_of_row(row);
    RowTerms &terms = to.terms[threadIdx.x];
    cp_async<4>(&terms.lse, block.operands.lse + at, exists ? 4 : 0);
    cp_async<4>(&terms.delta, block.operands.delta + at, exists ? 4 : 0);
    cp_async<8>(&terms.visible, block.ranges() + 2 * (row / block.sizes.group), exists ? 8 : 0);
}

// The 16 rows of a warp of both tensors of a stage.
template <u32 D> struct Own {
    u32 left[D / 16][4], right[D / 16][4];

    template <typename T> __device__ __forceinline__ explicit Own(const Stage<T, D> &stage) {
#pragma unroll
        for (u32 step = 0; step < D / 16; ++step) {
            load_a(left[step], stage.left, threadIdx.x / kWarp * 16, step);
            load_a(right[step], stage.right, threadIdx.x / kWarp * 16, step);
        }
    }
};

using Products = float[1][kStep / 8][4];

// s = own left · tile leftᵀ and dp = own right · tile rightᵀ, for kStep rows of the tiles.
template <typename T, u32 D>
__device__ __forceinline__ void multiply_own(Products &s, Products &dp, const Own<D> &own, const Tile<T, D> &left,
                                             const Tile<T, D> &right) {
#pragma unroll
    for (u32 step = 0; step < D / 16; ++step) {
        u32 of_left[4], of_right[4];
        load_b_transposed(of_left, left, 0, step);
        mma_m16n16k16<T>(s[0][0], s[0][1], own.left[step], of_left);
        load_b_transposed(of_right, right, 0, step);
        mma_m16n16k16<T>(dp[0][0], dp[0][1], own.right[step], of_right);
    }
}

// sums += products · tile, for kStep rows of the tile; the products are rounded.
template <typename T, u32 D>
__device__ __forceinline__ void add_product(float (&sums)[1][D / 8][4], const Products &products,
                                            const Tile<T, D> &tile) {
    u32 rounded[1][1][4];
    round_to_a<T>(rounded, products);
    multiply(sums, rounded, tile);
}

// s becomes p, and dp becomes ds. Both are 0 if the row does not see the key. `scale` contains log2 e.
template <bool kMasked>
__device__ __forceinline__ void differentiate(float &s, float &dp, const RowTerms &row, u32 key, float scale) {
    const float p = fast_exp2(s * scale - row.lse * kLog2E);
    s = !kMasked || row.visible.contains(key) ? p : 0.0f;
    dp = s * (dp - row.delta);
}

// As above for products of own keys, of which `key` is the first of this lane, and the rows of `terms`.
template <bool kMasked>
__device__ __forceinline__ void differentiate_by_key(Products &s, Products &dp, const RowTerms *terms, u32 key,
                                                     float scale) {
#pragma unroll
    for (u32 n = 0; n < kStep / 8; ++n) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const RowTerms &row = terms[8 * n + threadIdx.x % 4 * 2 + i % 2];
            differentiate<kMasked>(s[0][n][i], dp[0][n][i], row, key + i / 2 * 8, scale);
        }
    }
}

// As above for products of this lane's own two rows, and the keys from `first_key` on.
template <bool kMasked>
__device__ __forceinline__ void differentiate_by_row(Products &s, Products &dp, const RowTerms (&rows)[2],
                                                     u32 first_key, float scale) {
#pragma unroll
    for (u32 n = 0; n < kStep / 8; ++n) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 key = first_key + 8 * n + threadIdx.x % 4 * 2 + i % 2;
            differentiate<kMasked>(s[0][n][i], dp[0][n][i], rows[i / 2], key, scale);
        }
    }
}

// The number of tokens for which `holds` is true: all of them come before all others.
template <typename Holds>
__device__ __forceinline__ u32 partition_point(const u32 *ranges, u32 tokens, const Holds &holds) {
    u32 begin = 0, end = tokens;
    while (begin < end) {
        const u32 middle = begin + (end - begin) / 2;
        if (holds(visible_to(ranges, middle))) {
            begin = middle + 1;
        } else {
            end = middle;
        }
    }
    return begin;
}

// The gradients of kRows keys.
template <typename T, u32 D>
__device__ __forceinline__ void keys(T *dk, T *dv, const Block<T, D> &block, float scale) {
    DYNAMIC_SHARED(u8, shared);
    const FusedSizes &sizes = block.sizes;
    const u32 first_key = block.index * kRows, past_key = first_key + kRows;
    const auto sees_only_earlier = [&](const Visible &visible) { return visible.end <= first_key; };
    const auto begins_before_the_end = [&](const Visible &visible) { return visible.begin < past_key; };
    u32 row = partition_point(block.ranges(), sizes.tokens, sees_only_earlier) * sizes.group;
    const u32 past_row = partition_point(block.ranges(), sizes.tokens, begins_before_the_end) * sizes.group;

    copy_keys(Stage<T, D>(shared + Stage<T, D>::kBytes), block, first_key);
    if (row < past_row) copy_queries(Stage<T, D>(shared), block, row);
    cp_async_commit();
    wait_for_copies();
    const Own<D> own(Stage<T, D>(shared + Stage<T, D>::kBytes));
    const u32 warp_row = threadIdx.x / kWarp * 16, key = first_key + warp_row + threadIdx.x % kWarp / 4;
    float of_k[1][D / 8][4] = {}, of_v[1][D / 8][4] = {};
#pragma unroll 1
    for (u32 stage = 0; row < past_row; row += kRows, stage ^= 1) {
        wait_for_copies();
        if (row + kRows < past_row) copy_queries(Stage<T, D>(shared + (stage ^ 1) * Stage<T, D>::kBytes), block, row + kRows);
        cp_async_commit();
        const Stage<T, D> tile(shared + stage * Stage<T, D>::kBytes);
        const u32 last = past_row - row < kRows ? past_row - row - 1 : kRows - 1;
        const bool all_see =
            tile.terms[last].visible.begin <= first_key && past_key <= tile.terms[0].visible.end;
#pragma unroll 1
        for (u32 step = 0; step < kRows; step += kStep) {
            const Tile<T, D> q = {tile.left.first + step * D}, dout = {tile.right.first + step * D};
            Products s = {}, dp = {};
            multiply_own(s, dp, own, q, dout);
            if (all_see) {
                differentiate_by_key<false>(s, dp, tile.terms + step, key, scale * kLog2E);
            } else {
                differentiate_by_key<true>(s, dp, tile.terms + step, key, scale * kLog2E);
            }
            add_product(of_v, s, dout);
            add_product(of_k, dp, q);
        }
    }
    __syncthreads();
    const Stage<T, D> free(shared);
    store_rows(key_rows<D>(dk, sizes), first_key + warp_row, free.left, warp_row, of_k, {{scale, scale}});
    store_rows(key_rows<D>(dv, sizes), first_key + warp_row, free.right, warp_row, of_v, {{1.0f, 1.0f}});
}

// The gradients of kRows packed rows.
template <typename T, u32 D>
__device__ __forceinline__ void queries(T *dq, const Block<T, D> &block, float scale) {
    DYNAMIC_SHARED(u8, shared);
    const FusedSizes &sizes = block.sizes;
    // The last rows first: they see the most keys.
    const u32 first_row = ((sizes.rows() - 1) / kRows - block.index) * kRows;
    const u32 last_row = first_row + kRows <= sizes.rows() ? first_row + kRows - 1 : sizes.rows() - 1;
    const Visible first = visible_to(block.ranges(), first_row / sizes.group);
    const Visible last = visible_to(block.ranges(), last_row / sizes.group);

    const Stage<T, D> of_own(shared + Stage<T, D>::kBytes);
    copy_queries(of_own, block, first_row);
    u32 key = first.begin / kRows * kRows;
    if (key < last.end) copy_keys(Stage<T, D>(shared), block, key);
    cp_async_commit();
    wait_for_copies();
    const Own<D> own(of_own);
    const u32 warp_row = threadIdx.x / kWarp * 16, row = warp_row + threadIdx.x % kWarp / 4;
    const RowTerms terms[2] = {of_own.terms[row], of_own.terms[row + 8]};
    float of_q[1][D / 8][4] = {};
#pragma unroll 1
    for (u32 stage = 0; key < last.end; key += kRows, stage ^= 1) {
        wait_for_copies();
        if (key + kRows < last.end) copy_keys(Stage<T, D>(shared + (stage ^ 1) * Stage<T, D>::kBytes), block, key + kRows);
        cp_async_commit();
        const Stage<T, D> tile(shared + stage * Stage<T, D>::kBytes);
        const bool all_see = last.begin <= key && key + kRows <= first.end;
#pragma unroll 1
        for (u32 step = 0; step < kRows; step += kStep) {
            const Tile<T, D> k = {tile.left.first + step * D}, v = {tile.right.first + step * D};
            Products s = {}, dp = {};
            multiply_own(s, dp, own, k, v);
            if (all_see) {
                differentiate_by_row<false>(s, dp, terms, key + step, scale * kLog2E);
            } else {
                differentiate_by_row<true>(s, dp, terms, key + step, scale * kLog2E);
            }
            add_product(of_q, dp, k);
        }
    }
    __syncthreads();
    const Stage<T, D> free(shared);
    store_rows(packed_rows<D>(dq, block.operands.heads, sizes), first_row + warp_row, free.left, warp_row, of_q,
               {{scale, scale}});
}

}  // namespace

#define PARAMETERS(T)                                                                                             \
    const T *q, const T *k, const T *v, const T *dout, const float *lse, const float *delta, const u32 *heads,    \
        const u32 *ranges, float scale, u32 tokens, u32 keys, u32 num_heads, u32 num_kv_heads, u32 first_kv_head, \
        u32 group
#define BLOCK(T, D)                                                                                               \
    const FusedSizes sizes = {tokens, keys, num_heads, num_kv_heads, first_kv_head, group};                       \
    const Operands<T> operands = {q, k, v, dout, lse, delta, heads, ranges};                                      \
    const Block<T, D> block = {operands, sizes, blockIdx.z, blockIdx.y, blockIdx.x};

#define INSTANTIATE(T, suffix, D)                                                                                 \
    KERNEL(attention_fused_backward_keys_##suffix##_##D, T *dk, T *dv, PARAMETERS(T)) {                           \
        BLOCK(T, D)                                                                                               \
        ::keys<T, D>(dk, dv, block, scale);                                                                       \
    }                                                                                                             \
    KERNEL(attention_fused_backward_queries_##suffix##_##D, T *dq, PARAMETERS(T)) {                               \
        BLOCK(T, D)                                                                                               \
        queries<T, D>(dq, block, scale);                                                                          \
    }
INSTANTIATE(bf16, bf16, 64)
INSTANTIATE(bf16, bf16, 96)
INSTANTIATE(bf16, bf16, 128)
INSTANTIATE(f16, f16, 64)
INSTANTIATE(f16, f16, 96)
INSTANTIATE(f16, f16, 128)
