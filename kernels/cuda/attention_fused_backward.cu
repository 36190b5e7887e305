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
#include "attention_fused_backward.cuh"

namespace {

constexpr u32 kRows = 64, kStep = 16;
static_assert(kRows == 16 * kFusedWarps, "a warp owns 16 rows");

template <typename T, u32 D> using Rows = Stage<Tile<T, D>, kRows>;

// The 16 rows of both tensors that this warp owns.
template <u32 D> struct Own {
    u32 left[D / 16][4], right[D / 16][4];

    template <typename T> __device__ __forceinline__ explicit Own(const Rows<T, D> &stage) {
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

// dk and dv of kRows keys.
template <typename T, u32 D>
__device__ __forceinline__ void keys(T *dk, T *dv, const Operands<T, D> &of, float scale) {
    DYNAMIC_SHARED(u8, shared);
    const u32 first_key = block_place().part * kRows, past_key = first_key + kRows;
    auto [row, past_row] = rows_that_see(of, first_key, past_key);

    const Rows<T, D> of_own(shared, 1);
    copy_keys<kFusedThreads>(of_own, of, first_key);
    if (row < past_row) copy_queries<kFusedThreads>(Rows<T, D>(shared, 0), of, row, past_row);
    cp_async_commit();
    wait_for_copies();
    const Own<D> own(of_own);
    const u32 warp_row = threadIdx.x / kWarp * 16;
    float of_k[1][D / 8][4] = {}, of_v[1][D / 8][4] = {};
#pragma unroll 1
    for (u32 stage = 0; row < past_row; row += kRows, stage ^= 1) {
        wait_for_copies();
        const u32 next = row + kRows;
        if (next < past_row) copy_queries<kFusedThreads>(Rows<T, D>(shared, stage ^ 1), of, next, past_row);
        cp_async_commit();
        const Rows<T, D> queries(shared, stage);
        const bool no_mask = all_see(*queries.terms, past_row - row, first_key, past_key);
#pragma unroll 1
        for (u32 step = 0; step < kRows; step += kStep) {
            const Tile<T, D> q = queries.left.from(step), dout = queries.right.from(step);
            Products s = {}, dp = {};
            multiply_own(s, dp, own, q, dout);
            const OwnKeys at = {step, first_key + warp_row};
            exponentiate(s, s, *queries.terms, at, scale * kLog2E, no_mask);
            differentiate(dp, s, *queries.terms, at);
            add_product(of_v, s, dout);
            add_product(of_k, dp, q);
        }
    }
    __syncthreads();
    const Rows<T, D> unused(shared, 0);
    store_rows(key_rows<D>(dk, of.sizes), first_key + warp_row, unused.left, warp_row, of_k, {{scale, scale}});
    store_rows(key_rows<D>(dv, of.sizes), first_key + warp_row, unused.right, warp_row, of_v, {{1.0f, 1.0f}});
}

// dq of kRows packed rows.
template <typename T, u32 D>
__device__ __forceinline__ void queries(T *dq, const Operands<T, D> &of, float scale) {
    DYNAMIC_SHARED(u8, shared);
    // The last rows first: they see the most keys.
    const u32 first_row = (gridDim.x - 1 - block_place().part) * kRows;
    const u32 past_row = first_row + kRows < of.sizes.rows() ? first_row + kRows : of.sizes.rows();
    const Visible first = of.visible_to_token(first_row / of.sizes.group);
    const Visible last = of.visible_to_token((past_row - 1) / of.sizes.group);
    u32 key = first.begin / kRows * kRows;

    const Rows<T, D> of_own(shared, 1);
    copy_queries<kFusedThreads>(of_own, of, first_row, past_row);
    if (key < last.end) copy_keys<kFusedThreads>(Rows<T, D>(shared, 0), of, key);
    cp_async_commit();
    wait_for_copies();
    const Own<D> own(of_own);
    const u32 warp_row = threadIdx.x / kWarp * 16;
    const RowTerms<2> terms = own_terms(*of_own.terms);
    float of_q[1][D / 8][4] = {};
#pragma unroll 1
    for (u32 stage = 0; key < last.end; key += kRows, stage ^= 1) {
        wait_for_copies();
        if (key + kRows < last.end) copy_keys<kFusedThreads>(Rows<T, D>(shared, stage ^ 1), of, key + kRows);
        cp_async_commit();
        const Rows<T, D> keys(shared, stage);
        const bool no_mask = last.begin <= key && key + kRows <= first.end;
#pragma unroll 1
        for (u32 step = 0; step < kRows; step += kStep) {
            const Tile<T, D> k = keys.left.from(step), v = keys.right.from(step);
            Products s = {}, dp = {};
            multiply_own(s, dp, own, k, v);
            const OwnRows at = {key + step};
            exponentiate(s, s, terms, at, scale * kLog2E, no_mask);
            differentiate(dp, s, terms, at);
            add_product(of_q, dp, k);
        }
    }
    __syncthreads();
    const Rows<T, D> unused(shared, 0);
    store_rows(packed_rows<D>(dq, of.heads, of.sizes), first_row + warp_row, unused.left, warp_row, of_q,
               {{scale, scale}});
}

}  // namespace

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
