// Fused attention, backward (`src/attention/fused/backward.rs`): probabilities and the gradients of scores exist only
// in registers.
//
//     p = exp(scale · q·kᵀ − lse)      ds = p · (dout·vᵀ − delta)
//     dv = pᵀ·dout      dk = scale · dsᵀ·q      dq = scale · ds·k
//
// Two kernels compute p and ds, so that every sum belongs to one block and has one order, without atomics. A block
// owns kRows rows of two tensors, and processes the rows of the other two that they share visible pairs with, in tiles:
// - `keys` owns rows of k and v, and sums dk and dv over packed rows of q and dout (`PackedRows`)
// - `queries` owns packed rows of q and dout, and sums dq over rows of k and v
// A warp owns 16 of the rows, as operand A in its registers from beginning to end, and processes a tile in steps of 16
// rows. So tiles are read from shared memory once per product, and nothing else is.

#include "common.cuh"
#include "mma.cuh"
#include "attention_fused.cuh"

namespace {

constexpr u32 kRows = 64, kStep = 16;
static_assert(kRows == 16 * kFusedWarps, "a warp owns 16 rows");

// The operands of both kernels: `q`, `dout` [sequence, token, head, D], `k`, `v` [sequence, key, KV head, D], `lse`,
// `delta` [sequence, head, token], `ranges` [sequence, token], and `heads` as in `packed_rows`. Offsets of this block's
// rows are computed from the kernel's parameters each time, because registers are scarce.
template <typename T, u32 D> struct Operands {
    const T *q, *k, *v, *dout;
    const float *lse, *delta;
    const u32 *heads, *ranges;
    FusedSizes sizes;

    __device__ __forceinline__ Visible visible_to_token(u32 token) const {
        return visible_to(ranges + 2 * static_cast<u64>(blockIdx.z) * sizes.tokens, token);
    }
    __device__ __forceinline__ u64 head_of_row(u32 row) const {
        return heads[blockIdx.y * sizes.group + row % sizes.group];
    }
    // Of a row's elements in q and dout.
    __device__ __forceinline__ u64 offset_of_row(u32 row) const {
        const u64 token = static_cast<u64>(blockIdx.z) * sizes.tokens + row / sizes.group;
        return (token * sizes.num_heads + head_of_row(row)) * D;
    }
    // Of a row's element in lse and delta.
    __device__ __forceinline__ u64 offset_of_term(u32 row) const {
        const u64 head = static_cast<u64>(blockIdx.z) * sizes.num_heads + head_of_row(row);
        return head * sizes.tokens + row / sizes.group;
    }
    // Of a key's elements in k and v.
    __device__ __forceinline__ u64 offset_of_key(u32 key) const {
        const u64 at = static_cast<u64>(blockIdx.z) * sizes.keys + key;
        return (at * sizes.num_kv_heads + sizes.first_kv_head + blockIdx.y) * D;
    }
};

// What the gradients of a packed row's scores need besides the row of q and dout.
struct RowTerms {
    float lse, delta;
    Visible visible;
};

// kRows rows of two tensors in shared memory: of k and v, or packed ones of q and dout with their terms.
template <typename T, u32 D> struct Stage {
    static constexpr u32 kBytes = kRows * (2 * D * sizeof(T) + sizeof(RowTerms));
    Tile<T, D> left, right;
    RowTerms *terms;

    // One of the stages in the block's shared memory.
    __device__ __forceinline__ Stage(u8 *shared, u32 index)
        : left{reinterpret_cast<T *>(shared + index * kBytes)},
          right{left.first + kRows * D},
          terms(reinterpret_cast<RowTerms *>(right.first + kRows * D)) {}
};

// Starts copies of the rows of two tensors from `first` to before `past`; others become 0. Eight threads copy a row, so
// that few offsets are computed.
template <typename T, u32 D, typename Offset>
__device__ __forceinline__ void copy_pairs(const Stage<T, D> &to, const T *left, const T *right, u32 first, u32 past,
                                           const Offset &offset_of) {
    constexpr u32 kAcross = 8;
#pragma unroll 1
    for (u32 row = threadIdx.x / kAcross; row < kRows; row += kFusedThreads / kAcross) {
        const bool exists = first + row < past;
        const u64 offset = offset_of(exists ? first + row : first);
#pragma unroll
        for (u32 chunk = threadIdx.x % kAcross; chunk < Tile<T, D>::kChunks; chunk += kAcross) {
            const u64 at = offset + chunk * Tile<T, D>::kChunk;
            cp_async<16>(to.left.at(row, chunk), left + at, exists ? 16 : 0);
            cp_async<16>(to.right.at(row, chunk), right + at, exists ? 16 : 0);
        }
    }
}

template <typename T, u32 D>
__device__ __forceinline__ void copy_keys(const Stage<T, D> &to, const Operands<T, D> &of, u32 first) {
    copy_pairs(to, of.k, of.v, first, of.sizes.keys, [&](u32 key) { return of.offset_of_key(key); });
}

// Packed rows from `past` on become 0, and so do their contributions to all sums.
template <typename T, u32 D>
__device__ __forceinline__ void copy_queries(const Stage<T, D> &to, const Operands<T, D> &of, u32 first, u32 past) {
    copy_pairs(to, of.q, of.dout, first, past, [&](u32 row) { return of.offset_of_row(row); });
    if (threadIdx.x >= kRows) return;
    const bool exists = first + threadIdx.x < past;
    const u32 row = exists ? first + threadIdx.x : first;
    const u64 token = static_cast<u64>(blockIdx.z) * of.sizes.tokens + row / of.sizes.group;
    RowTerms &terms = to.terms[threadIdx.x];
    cp_async<4>(&terms.lse, of.lse + of.offset_of_term(row), exists ? 4 : 0);
    cp_async<4>(&terms.delta, of.delta + of.offset_of_term(row), exists ? 4 : 0);
    cp_async<8>(&terms.visible, of.ranges + 2 * token, exists ? 8 : 0);
}

// The 16 rows of both tensors that this warp owns.
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

// 16 own rows by kStep rows of a tile.
using Products = float[1][kStep / 8][4];

// s = own left · leftᵀ and dp = own right · rightᵀ.
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

// sums += products · tile, with products rounded to T.
template <typename T, u32 D>
__device__ __forceinline__ void add_product(float (&sums)[1][D / 8][4], const Products &products,
                                            const Tile<T, D> &tile) {
    u32 rounded[1][kStep / 16][4];
    round_to_a<T>(rounded, products);
    multiply(sums, rounded, tile);
}

// s becomes p, and dp becomes ds; both are 0 if the row does not see the key. `scale` contains log2 e.
template <bool kMasked>
__device__ __forceinline__ void differentiate(float &s, float &dp, const RowTerms &row, u32 key, float scale) {
    const float p = fast_exp2(s * scale - row.lse * kLog2E);
    s = !kMasked || row.visible.contains(key) ? p : 0.0f;
    dp = s * (dp - row.delta);
}

// As above for all products of own keys, this lane's first of which is `key`, and of the rows of `terms`.
template <bool kMasked>
__device__ __forceinline__ void differentiate_own_keys(Products &s, Products &dp, const RowTerms *terms, u32 key,
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

// As above for all products of this lane's two own rows, and of the keys from `first_key` on.
template <bool kMasked>
__device__ __forceinline__ void differentiate_own_rows(Products &s, Products &dp, const RowTerms (&rows)[2],
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

// The number of tokens for which `holds` is true of the visible keys: they come before all others.
template <typename T, u32 D, typename Holds>
__device__ __forceinline__ u32 partition_point(const Operands<T, D> &of, const Holds &holds) {
    u32 begin = 0, end = of.sizes.tokens;
    while (begin < end) {
        const u32 middle = begin + (end - begin) / 2;
        if (holds(of.visible_to_token(middle))) {
            begin = middle + 1;
        } else {
            end = middle;
        }
    }
    return begin;
}

// dk and dv of kRows keys.
template <typename T, u32 D>
__device__ __forceinline__ void keys(T *dk, T *dv, const Operands<T, D> &of, float scale) {
    DYNAMIC_SHARED(u8, shared);
    const u32 first_key = blockIdx.x * kRows, past_key = first_key + kRows;
    const u32 first_token = partition_point(of, [&](const Visible &keys) { return keys.end <= first_key; });
    const u32 past_token = partition_point(of, [&](const Visible &keys) { return keys.begin < past_key; });
    const u32 past_row = past_token * of.sizes.group;
    u32 row = first_token * of.sizes.group;

    const Stage<T, D> of_own(shared, 1);
    copy_keys(of_own, of, first_key);
    if (row < past_row) copy_queries(Stage<T, D>(shared, 0), of, row, past_row);
    cp_async_commit();
    wait_for_copies();
    const Own<D> own(of_own);
    const u32 warp_row = threadIdx.x / kWarp * 16, key = first_key + warp_row + threadIdx.x % kWarp / 4;
    float of_k[1][D / 8][4] = {}, of_v[1][D / 8][4] = {};
#pragma unroll 1
    for (u32 stage = 0; row < past_row; row += kRows, stage ^= 1) {
        wait_for_copies();
        if (row + kRows < past_row) copy_queries(Stage<T, D>(shared, stage ^ 1), of, row + kRows, past_row);
        cp_async_commit();
        const Stage<T, D> queries(shared, stage);
        const u32 last_row = row + kRows < past_row ? kRows - 1 : past_row - row - 1;
        const RowTerms &first = queries.terms[0], &last = queries.terms[last_row];
        const bool all_see = last.visible.begin <= first_key && past_key <= first.visible.end;
#pragma unroll 1
        for (u32 step = 0; step < kRows; step += kStep) {
            const Tile<T, D> q = queries.left.from(step), dout = queries.right.from(step);
            Products s = {}, dp = {};
            multiply_own(s, dp, own, q, dout);
            if (all_see) {
                differentiate_own_keys<false>(s, dp, queries.terms + step, key, scale * kLog2E);
            } else {
                differentiate_own_keys<true>(s, dp, queries.terms + step, key, scale * kLog2E);
            }
            add_product(of_v, s, dout);
            add_product(of_k, dp, q);
        }
    }
    __syncthreads();
    const Stage<T, D> unused(shared, 0);
    store_rows(key_rows<D>(dk, of.sizes), first_key + warp_row, unused.left, warp_row, of_k, {{scale, scale}});
    store_rows(key_rows<D>(dv, of.sizes), first_key + warp_row, unused.right, warp_row, of_v, {{1.0f, 1.0f}});
}

// dq of kRows packed rows.
template <typename T, u32 D>
__device__ __forceinline__ void queries(T *dq, const Operands<T, D> &of, float scale) {
    DYNAMIC_SHARED(u8, shared);
    // The last rows first: they see the most keys.
    const u32 first_row = (gridDim.x - 1 - blockIdx.x) * kRows;
    const u32 past_row = first_row + kRows < of.sizes.rows() ? first_row + kRows : of.sizes.rows();
    const Visible first = of.visible_to_token(first_row / of.sizes.group);
    const Visible last = of.visible_to_token((past_row - 1) / of.sizes.group);
    u32 key = first.begin / kRows * kRows;

    const Stage<T, D> of_own(shared, 1);
    copy_queries(of_own, of, first_row, past_row);
    if (key < last.end) copy_keys(Stage<T, D>(shared, 0), of, key);
    cp_async_commit();
    wait_for_copies();
    const Own<D> own(of_own);
    const u32 warp_row = threadIdx.x / kWarp * 16, row = warp_row + threadIdx.x % kWarp / 4;
    const RowTerms terms[2] = {of_own.terms[row], of_own.terms[row + 8]};
    float of_q[1][D / 8][4] = {};
#pragma unroll 1
    for (u32 stage = 0; key < last.end; key += kRows, stage ^= 1) {
        wait_for_copies();
        if (key + kRows < last.end) copy_keys(Stage<T, D>(shared, stage ^ 1), of, key + kRows);
        cp_async_commit();
        const Stage<T, D> keys(shared, stage);
        const bool all_see = last.begin <= key && key + kRows <= first.end;
#pragma unroll 1
        for (u32 step = 0; step < kRows; step += kStep) {
            const Tile<T, D> k = keys.left.from(step), v = keys.right.from(step);
            Products s = {}, dp = {};
            multiply_own(s, dp, own, k, v);
            if (all_see) {
                differentiate_own_rows<false>(s, dp, terms, key + step, scale * kLog2E);
            } else {
                differentiate_own_rows<true>(s, dp, terms, key + step, scale * kLog2E);
            }
            add_product(of_q, dp, k);
        }
    }
    __syncthreads();
    const Stage<T, D> unused(shared, 0);
    store_rows(packed_rows<D>(dq, of.heads, of.sizes), first_row + warp_row, unused.left, warp_row, of_q,
               {{scale, scale}});
}

}  // namespace

#define PARAMETERS(T)                                                                                             \
    const T *q, const T *k, const T *v, const T *dout, const float *lse, const float *delta, const u32 *heads,    \
        const u32 *ranges, float scale, u32 tokens, u32 num_keys, u32 num_heads, u32 num_kv_heads,                \
        u32 first_kv_head, u32 group
#define OPERANDS                                                                                                  \
    { q, k, v, dout, lse, delta, heads, ranges, {tokens, num_keys, num_heads, num_kv_heads, first_kv_head, group} }

#define INSTANTIATE(T, suffix, D)                                                                                 \
    KERNEL(attention_fused_backward_keys_##suffix##_##D, T *dk, T *dv, PARAMETERS(T)) {                           \
        keys<T, D>(dk, dv, OPERANDS, scale);                                                                      \
    }                                                                                                             \
    KERNEL(attention_fused_backward_queries_##suffix##_##D, T *dq, PARAMETERS(T)) {                               \
        queries<T, D>(dq, OPERANDS, scale);                                                                       \
    }
INSTANTIATE(bf16, bf16, 64)
INSTANTIATE(bf16, bf16, 96)
INSTANTIATE(bf16, bf16, 128)
INSTANTIATE(f16, f16, 64)
INSTANTIATE(f16, f16, 96)
INSTANTIATE(f16, f16, 128)
