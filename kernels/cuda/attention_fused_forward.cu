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

namespace {

constexpr u32 kRows = 128, kKeys = 64;
constexpr u32 kWarpRows = kRows / kFusedWarps, kM = kWarpRows / 16, kN = kKeys / 8;

using Scores = float[kM][kN][4];

// The rows of a lane are 16 · m + 8 · half + lane / 4, counted from the first one of its warp.
struct Softmax {
    // Maximum of the scores so far, and this lane's part of the sum of exp(score − maximum), both per [m][half].
    float maximum[kM][2], sum[kM][2];
};

// The keys that at least one of the block's rows sees, and those that all see.
struct BlockVisible {
    Visible any, all;
    __device__ __forceinline__ bool sees_all(u32 first_key) const {
        return all.begin <= first_key && first_key + kKeys <= all.end;
    }
};

__device__ __forceinline__ BlockVisible visible_to_rows(const u32 *ranges, u32 first_row, const FusedSizes &sizes) {
    const u32 past = first_row + kRows < sizes.rows() ? first_row + kRows : sizes.rows();
    const Visible first = visible_to(ranges, first_row / sizes.group), last = visible_to(ranges, (past - 1) / sizes.group);
    return {{first.begin, last.end}, {last.begin, first.end}};
}

// Scores of keys that a row does not see become −∞; `row` is the warp's first one.
__device__ __forceinline__ void mask(Scores &scores, const u32 *ranges, u32 row, u32 first_key,
                                     const FusedSizes &sizes) {
    const u32 lane = threadIdx.x % kWarp, last_row = sizes.rows() - 1, first_column = first_key + lane % 4 * 2;
#pragma unroll
    for (u32 m = 0; m < kM; ++m) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 at = row + 16 * m + 8 * half + lane / 4;
            const Visible visible = visible_to(ranges, (at < last_row ? at : last_row) / sizes.group);
            const int begin = static_cast<int>(visible.begin - first_column);
            const int end = static_cast<int>(visible.end - first_column);
#pragma unroll
            for (u32 n = 0; n < kN; ++n) {
#pragma unroll
                for (u32 j = 0; j < 2; ++j) {
                    const int column = static_cast<int>(8 * n + j);
                    if (column < begin || column >= end) scores[m][n][2 * half + j] = kNegativeInfinity;
                }
            }
        }
    }
}

// Replaces a row's scores by p = exp(score − maximum), and adds them to its sum. Returns exp(old − new maximum), the
// factor on all that was summed before. `scale` contains log2 e.
__device__ __forceinline__ float exponentials(float (&scores)[kN][4], u32 half, float &maximum, float &sum,
                                              float scale) {
    const float old = maximum;
#pragma unroll
    for (u32 n = 0; n < kN; ++n) {
        maximum = fmaxf(maximum, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    }
    maximum = row_reduce<Max>(maximum);
    // A row that has seen no key yet: all its scores are −∞, and so must be the exponents.
    const float shift = maximum == kNegativeInfinity ? 0.0f : maximum * scale;
    const float factor = fast_exp2(old * scale - shift);
    sum *= factor;
#pragma unroll
    for (u32 n = 0; n < kN; ++n) {
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            float &score = scores[n][2 * half + j];
            score = fast_exp2(score * scale - shift);
            sum += score;
        }
    }
    return factor;
}

// The softmax's step for a tile: scores become p, and the output so far is rescaled.
template <u32 kColumns>
__device__ __forceinline__ void update(Softmax &softmax, Scores &scores, float (&o)[kM][kColumns][4], float scale) {
#pragma unroll
    for (u32 m = 0; m < kM; ++m) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const float factor =
                exponentials(scores[m], half, softmax.maximum[m][half], softmax.sum[m][half], scale);
#pragma unroll
            for (u32 n = 0; n < kColumns; ++n) {
                o[m][n][2 * half] *= factor;
                o[m][n][2 * half + 1] *= factor;
            }
        }
    }
}

// Writes lse = ln Σ exp(score), and computes the factor on each row of the output. A row that sees nothing has a sum
// of 0: its output is 0, its lse −∞.
__device__ __forceinline__ void finish(float (&factor)[kM][2], float *lse, const Softmax &softmax, const u32 *heads,
                                       u32 row, float scale, const FusedSizes &sizes) {
    const u32 lane = threadIdx.x % kWarp;
#pragma unroll
    for (u32 m = 0; m < kM; ++m) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const float sum = row_reduce<Sum>(softmax.sum[m][half]);
            factor[m][half] = sum == 0.0f ? 0.0f : 1.0f / sum;
            const u32 at = row + 16 * m + 8 * half + lane / 4;
            if (lane % 4 != 0 || at >= sizes.rows()) continue;
            const u64 head = heads[at % sizes.group];
            lse[head * sizes.tokens + at / sizes.group] = softmax.maximum[m][half] * scale + logf(sum);
        }
    }
}

// `lse` [sequence, head, token], `ranges` [sequence, token]; the rest as in `packed_rows` and `key_rows`.
template <typename T, u32 D>
__device__ __forceinline__ void forward(T *o, float *lse, const T *q, const T *k, const T *v, const u32 *heads,
                                        const u32 *ranges, float scale, const FusedSizes &sizes) {
    DYNAMIC_SHARED(T, shared);
    const Tile<T, D> query_tile = {shared}, key_tile = {shared + kRows * D}, value_tile = {key_tile.first + kKeys * D};
    // The last rows first: they see the most keys.
    const u32 first_row = (gridDim.x - 1 - blockIdx.x) * kRows;
    const u32 warp_row = threadIdx.x / kWarp * kWarpRows;
    const PackedRows<const T, D> queries = packed_rows<D>(q, heads, sizes);
    const KeyRows<const T, D> keys = key_rows<D>(k, sizes), values = key_rows<D>(v, sizes);
    ranges += 2 * static_cast<u64>(blockIdx.z) * sizes.tokens;
    const BlockVisible visible = visible_to_rows(ranges, first_row, sizes);

    float output[kM][D / 8][4] = {};
    Softmax softmax = {};
#pragma unroll
    for (u32 i = 0; i < 2 * kM; ++i) softmax.maximum[i / 2][i % 2] = kNegativeInfinity;
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
        Scores scores = {};
        multiply_transposed(scores, query_tile, warp_row, key_tile);
        if (!visible.sees_all(key)) mask(scores, ranges, first_row + warp_row, key, sizes);
        update(softmax, scores, output, scale * kLog2E);
        u32 p[kM][kN / 2][4];
        round_to_a<T>(p, scores);
        wait_for_copies();
        if (key + kKeys < visible.any.end) copy_rows<kKeys>(key_tile, keys, key + kKeys);
        cp_async_commit();
        multiply(output, p, value_tile);
    }
    float factor[kM][2];
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
