// Fused attention, forward (`src/attention/fused/forward.rs`): a tile of scores stays in registers from the product
// that computes it through the softmax to the product that uses it (FlashAttention-2, Dao, arXiv 2307.08691).
//
// A block computes kRows packed rows of one KV head (`PackedRows`), so that the query heads of the KV head share its
// keys and values. A warp has kWarpRows of them. The keys that one of the rows sees are a range; it is processed in
// tiles of kKeys. Shared memory has the queries, one tile of keys and one of values: keys are copied while values are
// multiplied, and the other way around. So two blocks fit into an SM that has 164 KiB.

#include "common.cuh"
#include "mma.cuh"
#include "attention_fused.cuh"
#include "attention_softmax.cuh"

namespace {

constexpr u32 kRows = 128, kKeys = 64;
constexpr u32 kWarpRows = kRows / kFusedWarps, kM = kWarpRows / 16;

// `lse` [sequence, head, token], `ranges` [sequence, token]; the rest as in `packed_rows` and `key_rows`.
template <typename T, u32 D>
__device__ __forceinline__ void forward(T *o, float *lse, const T *q, const T *k, const T *v, const u32 *heads,
                                        const u32 *ranges, float scale, const FusedSizes &sizes) {
    DYNAMIC_SHARED(T, shared);
    const Tile<T, D> query_tile = {shared}, key_tile = {shared + kRows * D}, value_tile = {key_tile.first + kKeys * D};
    // The last rows first: they see the most keys.
    const u32 first_row = (gridDim.x - 1 - block_place().part) * kRows;
    const u32 warp_row = threadIdx.x / kWarp * kWarpRows;
    const PackedRows<const T, D> queries = packed_rows<D>(q, heads, sizes);
    const KeyRows<const T, D> keys = key_rows<D>(k, sizes), values = key_rows<D>(v, sizes);
    ranges += 2 * static_cast<u64>(blockIdx.z) * sizes.tokens;
    const BlockVisible visible = visible_to_rows(ranges, first_row, kRows, sizes);

    float output[kM][D / 8][4] = {}, factor[kM][2];
    Softmax<kM> softmax;
    u32 key = visible.any.begin / kKeys * kKeys;
    if (key < visible.any.end) {
        copy_rows<kRows>(query_tile, queries, first_row);
        copy_rows<kKeys>(key_tile, keys, key);
        cp_async_commit();
    }
#pragma unroll 1
    for (; key < visible.any.end; key += kKeys) {
        wait_for_copies();
        copy_rows<kKeys>(value_tile, values, key);
        cp_async_commit();
        float scores[kM][kKeys / 8][4] = {};
        multiply_transposed(scores, query_tile, warp_row, key_tile);
        if (!visible.sees_all(key, kKeys)) mask(scores, ranges, first_row + warp_row, key, sizes);
        update(factor, softmax, scores, scale * kLog2E);
        scale_rows(output, factor);
        u32 p[kM][kKeys / 16][4];
        round_to_a<T>(p, scores);
        wait_for_copies();
        if (key + kKeys < visible.any.end) copy_rows<kKeys>(key_tile, keys, key + kKeys);
        cp_async_commit();
        multiply(output, p, value_tile);
    }
    const PackedRows<T, D> outputs = packed_rows<D>(o, heads, sizes);
    lse += static_cast<u64>(blockIdx.z) * sizes.num_heads * sizes.tokens;
    finish(factor, lse, softmax, outputs.heads, first_row + warp_row, scale, sizes);
    store_rows(outputs, first_row + warp_row, query_tile, warp_row, output, factor);
}

}  // namespace

#define INSTANTIATE(T, suffix, D)                                                                                 \
    KERNEL(attention_fused_forward_##suffix##_##D, T *o, float *lse, const T *q, const T *k, const T *v,          \
           const u32 *heads, const u32 *ranges, float scale, u32 tokens, u32 keys, u32 num_heads,                 \
           u32 num_kv_heads, u32 first_kv_head, u32 group) {                                                      \
        const FusedSizes sizes = {tokens, keys, num_heads, num_kv_heads, first_kv_head, group};                   \
        forward<T, D>(o, lse, q, k, v, heads, ranges, scale, sizes);                                              \
    }
INSTANTIATE(bf16, bf16, 64)
INSTANTIATE(bf16, bf16, 96)
INSTANTIATE(bf16, bf16, 128)
INSTANTIATE(f16, f16, 64)
INSTANTIATE(f16, f16, 96)
INSTANTIATE(f16, f16, 128)
