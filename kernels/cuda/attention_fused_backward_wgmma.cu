// Fused attention, backward, for sm_90a (`src/attention/fused/backward.rs`): `attention_fused_backward.cu` with
// products of warpgroups.
//
// A block owns kOwn rows of two tensors in shared memory, and a warpgroup 64 of them as operand A of its first two
// products. Tiles of the two other tensors are operand B of all products. p and ds become operands A in registers.
//
// dout·vᵀ runs while lanes compute p, pᵀ·dout while they compute ds, and the last product of a tile while the next one
// begins. So there are three stages of tiles: one whose products end, one that is computed, one that arrives. Inside of
// the condition that there is a tile, ptxas sees that products of one pass of the loop end in the next, and does not
// serialize them.

#include "common.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "attention_fused.cuh"
#include "attention_fused_wgmma.cuh"
#include "attention_fused_backward.cuh"

namespace {

constexpr u32 kTile = 64, kStages = 3;

// kTile rows of two tensors by the rows that a warpgroup owns: products, and as operand A.
using Products = float[1][kTile / 8][4];
using Fragments = u32[1][kTile / 16][4];

// The block's shared memory: the rows that it owns, and tiles.
template <typename T, u32 D> struct Shared {
    using Own = Stage<Panels<T, D, kOwn>, kOwn>;
    using Tile = Stage<Panels<T, D, kTile>, kTile>;
    static_assert(Own::kBytes % 1024 == 0 && Tile::kBytes % 1024 == 0, "panels begin at multiples of 1024 bytes");
    u8 *first;

    __device__ __forceinline__ Own own() const { return {first, 0}; }
    // The `index`-th tile of the loop.
    __device__ __forceinline__ Tile tile(u32 index) const { return {first + Own::kBytes, index % kStages}; }
};

// dk and dv of kOwn keys.
template <typename T, u32 D>
__device__ __forceinline__ void keys(T *dk, T *dv, const Operands<T, D> &of, float scale) {
    DYNAMIC_SHARED(u8, bytes);
    const Shared<T, D> shared = {bytes};
    const auto own = shared.own();
    const u32 first_key = blockIdx.x * kOwn, past_key = first_key + kOwn, warp_row = threadIdx.x / kWarp * 16;
    auto [row, past_row] = rows_that_see(of, first_key, past_key);
    float of_k[1][D / 8][4] = {}, of_v[1][D / 8][4] = {};
    Products s = {}, dp = {};
    Fragments p = {}, ds = {};
    if (row < past_row) {
        copy_keys<kWgmmaThreads>(own, of, first_key);
        copy_queries<kWgmmaThreads>(shared.tile(0), of, row, past_row);
        cp_async_commit();
#pragma unroll 1
        for (u32 index = 0; row < past_row; row += kTile, ++index) {
            const auto queries = shared.tile(index);
            const OwnKeys at = {0, first_key + warp_row};
            // All warpgroups have waited for the products of the tile that the copies overwrite.
            wait_for_operands();
            const u32 next = row + kTile;
            if (next < past_row) copy_queries<kWgmmaThreads>(shared.tile(index + 1), of, next, past_row);
            cp_async_commit();
            wgmma_fence(s[0]);
            start_multiply_transposed(s, own.left, queries.left);
            // The products of the last tile end: p and ds need no registers while dp is computed.
            wgmma_wait<1>(of_k[0], of_v[0], p[0], ds[0]);
            wgmma_fence(dp[0]);
            start_multiply_transposed(dp, own.right, queries.right);
            wgmma_wait<1>(s[0]);
            const bool no_mask = all_see(*queries.terms, past_row - row, first_key, past_key);
            exponentiate(s, s, *queries.terms, at, scale * kLog2E, no_mask);
            round_to_a<T>(p, s);
            wgmma_fence(of_v[0], p[0]);
            start_multiply(of_v, p, queries.right);
            wgmma_wait<1>(dp[0]);
            differentiate(dp, s, *queries.terms, at);
            round_to_a<T>(ds, dp);
            wgmma_fence(of_k[0], ds[0]);
            start_multiply(of_k, ds, queries.left);
        }
        wgmma_wait<0>(of_k[0], of_v[0], p[0], ds[0]);
        __syncthreads();
    }
    store_rows(key_rows<D>(dk, of.sizes), first_key + warp_row, own.left, warp_row, of_k, {{scale, scale}});
    store_rows(key_rows<D>(dv, of.sizes), first_key + warp_row, own.right, warp_row, of_v, {{1.0f, 1.0f}});
}

// dq of kOwn packed rows.
template <typename T, u32 D>
__device__ __forceinline__ void queries(T *dq, const Operands<T, D> &of, float scale) {
    DYNAMIC_SHARED(u8, bytes);
    const Shared<T, D> shared = {bytes};
    const auto own = shared.own();
    // The last rows first: they see the most keys.
    const u32 first_row = (gridDim.x - 1 - blockIdx.x) * kOwn, warp_row = threadIdx.x / kWarp * 16;
    const u32 past_row = first_row + kOwn < of.sizes.rows() ? first_row + kOwn : of.sizes.rows();
    const Visible first = of.visible_to_token(first_row / of.sizes.group);
    const Visible last = of.visible_to_token((past_row - 1) / of.sizes.group);
    u32 key = first.begin / kTile * kTile;

    float of_q[1][D / 8][4] = {};
    Products s = {}, dp = {};
    Fragments ds = {};
    if (key < last.end) {
        copy_queries<kWgmmaThreads>(own, of, first_row, past_row);
        copy_keys<kWgmmaThreads>(shared.tile(0), of, key);
        cp_async_commit();
#pragma unroll 1
        for (u32 index = 0; key < last.end; key += kTile, ++index) {
            const auto keys = shared.tile(index);
            const OwnRows at = {key};
            wait_for_operands();
            if (key + kTile < last.end) copy_keys<kWgmmaThreads>(shared.tile(index + 1), of, key + kTile);
            cp_async_commit();
            wgmma_fence(s[0]);
            start_multiply_transposed(s, own.left, keys.left);
            const RowTerms<2> terms = own_terms(*own.terms);
            wgmma_wait<1>(of_q[0], ds[0]);
            wgmma_fence(dp[0]);
            start_multiply_transposed(dp, own.right, keys.right);
            wgmma_wait<1>(s[0]);
            exponentiate(s, s, terms, at, scale * kLog2E, last.begin <= key && key + kTile <= first.end);
            wgmma_wait<0>(dp[0]);
            differentiate(dp, s, terms, at);
            round_to_a<T>(ds, dp);
            wgmma_fence(of_q[0], ds[0]);
            start_multiply(of_q, ds, keys.left);
        }
        wgmma_wait<0>(of_q[0], ds[0]);
        __syncthreads();
    }
    store_rows(packed_rows<D>(dq, of.heads, of.sizes), first_row + warp_row, own.left, warp_row, of_q,
               {{scale, scale}});
}

}  // namespace

#define INSTANTIATE(T, suffix, D)                                                                                 \
    KERNEL(attention_fused_backward_wgmma_keys_##suffix##_##D, T *dk, T *dv, PARAMETERS(T)) {                     \
        keys<T, D>(dk, dv, OPERANDS, scale);                                                                      \
    }                                                                                                             \
    KERNEL(attention_fused_backward_wgmma_queries_##suffix##_##D, T *dq, PARAMETERS(T)) {                         \
        queries<T, D>(dq, OPERANDS, scale);                                                                       \
    }
INSTANTIATE(bf16, bf16, 64)
INSTANTIATE(bf16, bf16, 128)
INSTANTIATE(f16, f16, 64)
INSTANTIATE(f16, f16, 128)
