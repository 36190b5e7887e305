// Fused attention, forward, for sm_90a (`src/attention/fused/forward_wgmma.rs`): `attention_fused_forward.cu` with
// products of warpgroups and copies by TMA.
//
// One thread of a third warpgroup starts all copies of keys and values. The other two have 64 of the block's packed rows
// each. While tensor cores multiply probabilities of a tile with its values, they also multiply queries with the keys of
// the next tile, and other lanes compute exponentials: the products of a tile with values are waited for after the softmax
// of the next one (FlashAttention-3, Shah et al., arXiv 2407.08608). Nothing in the loop stops both warpgroups, so that
// one computes exponentials during products of the other.

#include "common.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "tma.cuh"
#include "attention_fused.cuh"
#include "attention_fused_wgmma.cuh"
#include "attention_softmax.cuh"

namespace {

constexpr u32 kKeys = 128, kStages = 2;

// The block's shared memory.
template <typename T, u32 D> struct Shared {
    using Tiles = Ring<T, D, kKeys, kStages>;
    Panels<T, D, kOwn> queries;
    Tiles keys, values;

    __device__ __forceinline__ explicit Shared(T *first)
        : queries{first}, keys(Tiles::first_of_two(first + kOwn * D)), values(keys.second()) {}
};

// Parameters as in `attention_fused_forward.cu`.
template <typename T, u32 D>
__device__ __forceinline__ void forward(T *o, float *lse, const T *q, const TensorMap &k, const TensorMap &v,
                                        const u32 *heads, const u32 *ranges, float scale, const FusedSizes &sizes) {
    DYNAMIC_SHARED(T, first);
    const Shared<T, D> shared(first);
    // The last rows first: they see the most keys.
    const u32 first_row = (gridDim.x - 1 - block_place().part) * kOwn, warp_row = threadIdx.x / kWarp * 16;
    ranges += 2 * static_cast<u64>(blockIdx.z) * sizes.tokens;
    const BlockVisible visible = visible_to_rows(ranges, first_row, kOwn, sizes);
    const u32 first_key = visible.any.begin / kKeys * kKeys;
    const u32 tiles = first_key < visible.any.end ? (visible.any.end - first_key + kKeys - 1) / kKeys : 0;

    // Fills the tiles of these indices. They are used in this order: keys before the values of the tile before.
    const auto fill = [&](u32 begin, u32 end) {
#pragma unroll 1
        for (u32 index = begin; index < end; ++index) {
            if (index < tiles) shared.keys.fill(index, k, first_key + index * kKeys, sizes);
            if (index > 0) shared.values.fill(index - 1, v, first_key + (index - 1) * kKeys, sizes);
        }
    };
    if (threadIdx.x == kProducer) {
        shared.keys.init();
        shared.values.init();
        fence_async_proxy();
        fill(0, tiles > 0 ? kStages : 0);
    }
    const bool is_producer = is_in_warpgroup_of_producer();
    const PackedRows<const T, D> queries = packed_rows<D>(q, heads, sizes);
    if (!is_producer) copy_rows<kOwn, kWgmmaThreads>(shared.queries, queries, first_row);
    cp_async_commit();
    wait_for_operands();
    if (is_producer) {
        lower_registers<kProducerRegisters>();
        if (threadIdx.x == kProducer && tiles > 0) fill(kStages, tiles + 1);
        return;
    }
    raise_registers<kConsumerRegisters>();

    float output[1][D / 8][4] = {}, scores[1][kKeys / 8][4] = {}, factor[1][2];
    u32 p[1][kKeys / 16][4] = {};
    Softmax<1> softmax;
    const auto become_p = [&](u32 index) {
        const u32 key = first_key + index * kKeys;
        if (!visible.sees_all(key, kKeys)) mask(scores, ranges, first_row + warp_row, key, sizes);
        update(factor, softmax, scores, scale * kLog2E);
    };
    if (tiles > 0) {
        const auto first_keys = shared.keys.filled_tile(0);
        wgmma_fence(scores[0]);
        start_multiply_transposed(scores, shared.queries, first_keys);
        wgmma_wait<0>(scores[0]);
        shared.keys.release(0);
        become_p(0);
#pragma unroll 1
        for (u32 index = 1; index < tiles; ++index) {
            // At the start of an iteration, because ptxas would move a wait at the end of one to before the softmax.
            wgmma_wait<0>(output[0], p[0]);
            if (index > 1) shared.values.release(index - 2);
            round_to_a<T>(p, scores);
            const auto keys = shared.keys.filled_tile(index);
            wgmma_fence(scores[0]);
            start_multiply_transposed(scores, shared.queries, keys);
            scale_rows(output, factor);
            const auto values = shared.values.filled_tile(index - 1);
            wgmma_fence(output[0], p[0]);
            start_multiply(output, p, values);
            wgmma_wait<1>(scores[0]);
            shared.keys.release(index);
            become_p(index);
        }
        wgmma_wait<0>(output[0], p[0]);
        round_to_a<T>(p, scores);
        scale_rows(output, factor);
        const auto values = shared.values.filled_tile(tiles - 1);
        wgmma_fence(output[0], p[0]);
        start_multiply(output, p, values);
        wgmma_wait<0>(output[0], p[0]);
    }
    const PackedRows<T, D> outputs = packed_rows<D>(o, heads, sizes);
    lse += static_cast<u64>(blockIdx.z) * sizes.num_heads * sizes.tokens;
    finish(factor, lse, softmax, outputs.heads, first_row + warp_row, scale, sizes);
    // All warps of the warpgroup have waited for their products with its queries.
    sync_warpgroup();
    store_rows(outputs, first_row + warp_row, shared.queries, warp_row, output, factor);
}

}  // namespace

#define INSTANTIATE(T, suffix, D)                                                                                 \
    KERNEL_OF_THREADS(attention_fused_forward_wgmma_##suffix##_##D, kThreadsWithProducer, T *o, float *lse,       \
                      const T *q, BY_VALUE(TensorMap) k, BY_VALUE(TensorMap) v, const u32 *heads,                 \
                      const u32 *ranges, float scale, u32 tokens, u32 keys, u32 num_heads, u32 num_kv_heads,      \
                      u32 first_kv_head, u32 group) {                                                             \
        const FusedSizes sizes = {tokens, keys, num_heads, num_kv_heads, first_kv_head, group};                   \
        forward<T, D>(o, lse, q, k, v, heads, ranges, scale, sizes);                                              \
    }
INSTANTIATE(bf16, bf16, 64)
INSTANTIATE(bf16, bf16, 128)
INSTANTIATE(f16, f16, 64)
INSTANTIATE(f16, f16, 128)
