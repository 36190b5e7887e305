// Fused attention, forward, for sm_90a (`src/attention/fused/forward_wgmma.rs`): `attention_fused_forward.cu` with
// products of warpgroups.
//
// A warpgroup has 64 of the block's packed rows. While tensor cores multiply probabilities of a tile with its values,
// they also multiply queries with the keys of the next tile, and other lanes compute exponentials: the products of a
// tile with values are waited for after the softmax of the next one (FlashAttention-3, Shah et al., arXiv 2407.08608).
// So a stage of shared memory has a tile of keys, and the values of the tile before. Copies run one stage ahead.

#include "common.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "attention_fused.cuh"
#include "attention_fused_wgmma.cuh"
#include "attention_softmax.cuh"

namespace {

constexpr u32 kKeys = 128;

// The block's shared memory: queries, and two stages.
template <typename T, u32 D> struct Tiles {
    Panels<T, D, kOwn> queries;

    __device__ __forceinline__ Panels<T, D, kKeys> keys(u32 stage) const {
        return {queries.first + (kOwn + 2 * stage * kKeys) * D};
    }
    __device__ __forceinline__ Panels<T, D, kKeys> values(u32 stage) const { return {keys(stage).first + kKeys * D}; }
};

// Parameters as in `attention_fused_forward.cu`.
template <typename T, u32 D>
__device__ __forceinline__ void forward(T *o, float *lse, const T *q, const T *k, const T *v, const u32 *heads,
                                        const u32 *ranges, float scale, const FusedSizes &sizes) {
    DYNAMIC_SHARED(T, shared);
    const Tiles<T, D> tiles = {{shared}};
    // The last rows first: they see the most keys.
    const u32 first_row = (gridDim.x - 1 - blockIdx.x) * kOwn, warp_row = threadIdx.x / kWarp * 16;
    const PackedRows<const T, D> queries = packed_rows<D>(q, heads, sizes);
    const KeyRows<const T, D> keys = key_rows<D>(k, sizes), values = key_rows<D>(v, sizes);
    ranges += 2 * static_cast<u64>(blockIdx.z) * sizes.tokens;
    const BlockVisible visible = visible_to_rows(ranges, first_row, kOwn, sizes);

    float output[1][D / 8][4] = {}, scores[1][kKeys / 8][4] = {}, factor[1][2];
    u32 p[1][kKeys / 16][4] = {};
    Softmax<1> softmax;
    const auto become_p = [&](u32 key) {
        if (!visible.sees_all(key, kKeys)) mask(scores, ranges, first_row + warp_row, key, sizes);
        update(factor, softmax, scores, scale * kLog2E);
    };
    // Waits for the product with the last values, and for the copies. At the start of an iteration, because ptxas would
    // move a wait at the end of one to before the softmax. All warpgroups are then past their reads of the other stage.
    const auto finish_values = [&] {
        wgmma_wait<0>(output[0], p[0]);
        wait_for_operands();
    };
    // The keys from `key` on, if a row sees one of them, and the values of the tile before.
    const auto copy_stage = [&](u32 stage, u32 key) {
        if (key < visible.any.end) copy_rows<kKeys, kWgmmaThreads>(tiles.keys(stage), keys, key);
        copy_rows<kKeys, kWgmmaThreads>(tiles.values(stage), values, key - kKeys);
        cp_async_commit();
    };
    u32 key = visible.any.begin / kKeys * kKeys, stage = 1;
    if (key < visible.any.end) {
        copy_rows<kOwn, kWgmmaThreads>(tiles.queries, queries, first_row);
        copy_rows<kKeys, kWgmmaThreads>(tiles.keys(0), keys, key);
        cp_async_commit();
        wait_for_operands();
        copy_stage(1, key + kKeys);
        wgmma_fence(scores[0]);
        start_multiply_transposed(scores, tiles.queries, tiles.keys(0));
        wgmma_wait<0>(scores[0]);
        become_p(key);
#pragma unroll 1
        for (key += kKeys; key < visible.any.end; key += kKeys, stage ^= 1) {
            finish_values();
            round_to_a<T>(p, scores);
            wgmma_fence(scores[0]);
            start_multiply_transposed(scores, tiles.queries, tiles.keys(stage));
            scale_rows(output, factor);
            wgmma_fence(output[0], p[0]);
            start_multiply(output, p, tiles.values(stage));
            copy_stage(stage ^ 1, key + kKeys);
            wgmma_wait<1>(scores[0]);
            become_p(key);
        }
        finish_values();
        round_to_a<T>(p, scores);
        scale_rows(output, factor);
        wgmma_fence(output[0], p[0]);
        start_multiply(output, p, tiles.values(stage));
        wgmma_wait<0>(output[0], p[0]);
    }
    const PackedRows<T, D> outputs = packed_rows<D>(o, heads, sizes);
    lse += static_cast<u64>(blockIdx.z) * sizes.num_heads * sizes.tokens;
    finish(factor, lse, softmax, outputs.heads, first_row + warp_row, scale, sizes);
    // No product reads the queries any more.
    store_rows(outputs, first_row + warp_row, tiles.queries, warp_row, output, factor);
}

}  // namespace

#define INSTANTIATE(T, suffix, D)                                                                                 \
    KERNEL(attention_fused_forward_wgmma_##suffix##_##D, T *o, float *lse, const T *q, const T *k, const T *v,    \
           const u32 *heads, const u32 *ranges, float scale, u32 tokens, u32 keys, u32 num_heads,                 \
           u32 num_kv_heads, u32 first_kv_head, u32 group) {                                                      \
        const FusedSizes sizes = {tokens, keys, num_heads, num_kv_heads, first_kv_head, group};                   \
        forward<T, D>(o, lse, q, k, v, heads, ranges, scale, sizes);                                              \
    }
INSTANTIATE(bf16, bf16, 64)
INSTANTIATE(bf16, bf16, 128)
INSTANTIATE(f16, f16, 64)
INSTANTIATE(f16, f16, 128)
