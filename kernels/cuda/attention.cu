// Attention, forward and backward (`src/attention`): everything except the matmuls, which cuBLAS computes.
//
// Queries are processed in packed form: rows [kv head, token, member], where the members of a KV head are the
// query heads that use it, so that one matmul serves all of them. `heads` has the query head of each (kv
// head, member); null means the identity.
//
// A tile is a rectangle of packed rows and keys: `rows` of each KV head (along the grid's y) beginning at
// some token, and `keys` beginning at `first_key`. Its scores are stored row by row, `stride` apart, a
// multiple of 4. `ranges` has a pair for every token: the first visible key and the one past the last.
// Pointers to per-query data begin at the tile's first row.
// tile's first row.

#include "common.cuh"

namespace {

// Maximum number of keys of a tile: a warp holds a row of scores in its registers.
constexpr u32 kMaxKeys = 1024;
// Adjacent scores that a lane processes at a time.
constexpr u32 kColumns = 4;
constexpr u32 kSteps = kMaxKeys / (kWarp * kColumns);

using Scores = Pack<float, kColumns>;

// The position of a packed row's elements in a tensor [token, head, d].
struct Place {
    u32 token, head;
};

__device__ __forceinline__ Place place_of(u32 row, const u32 *heads, u32 tokens, u32 group) {
    const u32 member = row % group, at = row / group;
    const u32 slot = at / tokens * group + member;
    return {at % tokens, heads != nullptr ? heads[slot] : slot};
}

template <typename T, int N>
__device__ __forceinline__ void gather(T *packed, const T *x, const u32 *heads, u32 rows, u32 tokens, u32 group,
                                       u32 num_heads, u32 d) {
    using Elements = Pack<T, N>;
    const u32 packs = d / N;
    for (u64 i = global_thread(); i < rows * packs; i += global_threads()) {
        const u32 row = static_cast<u32>(i) / packs, column = static_cast<u32>(i) % packs * N;
        const Place place = place_of(row, heads, tokens, group);
        const T *from = x + (static_cast<u64>(place.token) * num_heads + place.head) * d + column;
        *reinterpret_cast<Elements *>(packed + i * N) = *reinterpret_cast<const Elements *>(from);
    }
}

// The factor on each row of a finished sum: none.
struct One {
    __device__ __forceinline__ float operator()(u32) const { return 1.0f; }
};

// The reciprocal of the softmax's denominator, 0 for a query without visible keys.
struct Normalize {
    const float *maxima, *sums;
    __device__ __forceinline__ float operator()(u32 row) const {
        return maxima[row] == kNegativeInfinity ? 0.0f : 1.0f / sums[row];
    }
};

template <typename T, int N, typename Factor>
__device__ __forceinline__ void scatter(T *x, const float *packed, const u32 *heads, u32 rows, u32 tokens, u32 group,
                                        u32 num_heads, u32 d, u32 accumulate, Factor factor) {
    using Elements = Pack<T, N>;
    using Floats = Pack<float, N < 4 ? N : 4>;
    constexpr int kFloats = sizeof(Floats) / sizeof(float);
    const u32 packs = d / N;
    for (u64 i = global_thread(); i < rows * packs; i += global_threads()) {
        const u32 row = static_cast<u32>(i) / packs, column = static_cast<u32>(i) % packs * N;
        const Place place = place_of(row, heads, tokens, group);
        Elements *to =
            reinterpret_cast<Elements *>(x + (static_cast<u64>(place.token) * num_heads + place.head) * d + column);
        const float scale = factor(row);
        Elements elements;
        if (accumulate) elements = *to;
#pragma unroll
        for (int j = 0; j < N; j += kFloats) {
            const Floats sums = *reinterpret_cast<const Floats *>(packed + i * N + j);
#pragma unroll
            for (int l = 0; l < kFloats; ++l) {
                const float old = accumulate ? widen(elements.at[j + l]) : 0.0f;
                elements.at[j + l] = round_to<T>(old + sums.at[l] * scale);
            }
        }
        *to = elements;
    }
}

template <typename T> __device__ __forceinline__ bool is_packable(const T *x, u32 d) {
    return is_aligned(x) && d % kPack<T> == 0;
}

// The columns of a tile that a row sees.
struct Seen {
    u32 begin, end;
    __device__ __forceinline__ bool is_empty() const { return begin >= end; }
    __device__ __forceinline__ bool contains(u32 column) const { return begin <= column && column < end; }
};

__device__ __forceinline__ Seen seen_of(const u32 *ranges, u32 token, u32 first_key, u32 keys) {
    const u32 begin = ranges[2 * static_cast<u64>(token)], end = ranges[2 * static_cast<u64>(token) + 1];
    const u32 past = end > first_key ? end - first_key : 0;
    return {begin > first_key ? begin - first_key : 0, past < keys ? past : keys};
}

// This warp's row of the tile, and whether it exists.
struct TileRow {
    u32 row, lane;
    bool exists;
};

__device__ __forceinline__ TileRow tile_row(u32 rows) {
    const u32 row = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    return {row, threadIdx.x % kWarp, row < rows};
}

template <typename T> __device__ __forceinline__ void write_columns(T *to, const Scores &values) {
    Pack<T, kColumns> elements;
#pragma unroll
    for (u32 j = 0; j < kColumns; ++j) elements.at[j] = round_to<T>(values.at[j]);
    *reinterpret_cast<Pack<T, kColumns> *>(to) = elements;
}

// One warp per row: p = exp(score − m) of the scores with soft cap `cap` (0: none), where m is the maximum score of the row so far. The row's sum of p,
// and the sum of p · v in `acc`, are first rescaled to the new m.
template <typename T>
__device__ void softmax(T *p, float *maxima, float *sums, float *acc, const float *scores, const u32 *ranges,
                        u32 rows, u32 acc_rows, u32 group, u32 first_key, u32 keys, u32 stride, u32 d, float cap) {
    const TileRow at = tile_row(rows);
    if (!at.exists) return;
    const u64 offset = (static_cast<u64>(blockIdx.y) * rows + at.row) * stride;
    const u64 state = static_cast<u64>(blockIdx.y) * acc_rows + at.row;
    const Seen seen = seen_of(ranges, at.row / group, first_key, keys);
    if (seen.is_empty()) {
        for (u32 column = at.lane * kColumns; column < keys; column += kWarp * kColumns) {
            write_columns(p + offset + column, Scores{});
        }
        return;
    }
    const float old_max = maxima[state], old_sum = sums[state];
    Scores values[kSteps];
    float max = old_max;
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step) {
        const u32 column = (step * kWarp + at.lane) * kColumns;
        if (column < keys) values[step] = *reinterpret_cast<const Scores *>(scores + offset + column);
#pragma unroll
        for (u32 j = 0; j < kColumns; ++j) {
            const bool is_seen = seen.contains(column + j);
            values[step].at[j] = is_seen ? softcap(values[step].at[j], cap) : kNegativeInfinity;
            max = Max()(values[step].at[j], max);
        }
    }
    max = warp_reduce<Max>(max);
    float sum = 0.0f;
#pragma unroll
    for (u32 step = 0; step < kSteps; ++step) {
        const u32 column = (step * kWarp + at.lane) * kColumns;
#pragma unroll
        for (u32 j = 0; j < kColumns; ++j) {
            values[step].at[j] = expf(values[step].at[j] - max);
            sum += values[step].at[j];
        }
        if (column < keys) write_columns(p + offset + column, values[step]);
    }
    sum = warp_reduce<Sum>(sum);
    const float factor = expf(old_max - max);
    if (at.lane == 0) {
        maxima[state] = max;
        sums[state] = old_sum * factor + sum;
    }
    if (factor != 1.0f) {
        for (u32 column = at.lane; column < d; column += kWarp) acc[state * d + column] *= factor;
    }
}

// One warp per row: p = exp(score − lse) and ds = p · (dp − delta), times the derivative of the soft cap (0: none).
template <typename T>
__device__ void softmax_backward(T *p, T *ds, const float *scores, const float *dp, const float *lse,
                                 const float *delta, const u32 *heads, const u32 *ranges, u32 rows, u32 group,
                                 u32 num_tokens, u32 first_key, u32 keys, u32 stride, float cap) {
    const TileRow at = tile_row(rows);
    if (!at.exists) return;
    const u64 offset = (static_cast<u64>(blockIdx.y) * rows + at.row) * stride;
    const u32 token = at.row / group;
    const Seen seen = seen_of(ranges, token, first_key, keys);
    const u64 query = static_cast<u64>(heads[blockIdx.y * group + at.row % group]) * num_tokens + token;
    const float row_lse = lse[query], row_delta = delta[query];
    for (u32 column = at.lane * kColumns; column < keys; column += kWarp * kColumns) {
        Scores probabilities = *reinterpret_cast<const Scores *>(scores + offset + column);
        Scores gradients = *reinterpret_cast<const Scores *>(dp + offset + column);
#pragma unroll
        for (u32 j = 0; j < kColumns; ++j) {
            const bool is_seen = seen.contains(column + j);
            const float score = softcap(probabilities.at[j], cap);
            const float probability = is_seen ? expf(score - row_lse) : 0.0f;
            probabilities.at[j] = probability;
            gradients.at[j] =
                is_seen ? probability * (gradients.at[j] - row_delta) * softcap_slope(score, cap) : 0.0f;
        }
        write_columns(p + offset + column, probabilities);
        write_columns(ds + offset + column, gradients);
    }
}

// A lane's part of a · b: kPack adjacent products at a time, so that the order does not depend on `packable`.
template <typename T>
__device__ __forceinline__ float dot(const T *a, const T *b, u32 d, u32 lane, u32 width, bool packable) {
    constexpr u32 N = kPack<T>;
    float sum = 0.0f;
    for (u32 column = lane * N; column < d; column += width * N) {
        if (packable) {
            const Pack<T, N> left = *reinterpret_cast<const Pack<T, N> *>(a + column);
            const Pack<T, N> right = *reinterpret_cast<const Pack<T, N> *>(b + column);
#pragma unroll
            for (u32 j = 0; j < N; ++j) sum += widen(left.at[j]) * widen(right.at[j]);
        } else {
            for (u32 j = column; j < d && j < column + N; ++j) sum += widen(a[j]) * widen(b[j]);
        }
    }
    return sum;
}

// `width` adjacent lanes per row [token, head] of o and dout: delta[sequence, head, token] = Σ o · dout.
template <typename T>
__device__ void delta(float *sums, const T *o, const T *dout, u64 rows, u32 tokens, u32 num_heads, u32 d, u32 width) {
    const u64 row = static_cast<u64>(blockIdx.x) * (blockDim.x / width) + threadIdx.x / width;
    const u32 lane = threadIdx.x % width;
    float sum = 0.0f;
    const bool packable = is_packable(o, d) && is_packable(dout, d);
    if (row < rows) sum = dot(o + row * d, dout + row * d, d, lane, width, packable);
    for (u32 distance = width / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(kFullWarp, sum, distance);
    }
    if (row >= rows || lane != 0) return;
    const u64 head = row % num_heads, token = row / num_heads % tokens, batch = row / num_heads / tokens;
    sums[(batch * num_heads + head) * tokens + token] = sum;
}

// Attention over some keys and over others: ln Σ over both, and the factors on the two outputs.
struct Merged {
    float lse, kept, added;
};

__device__ __forceinline__ Merged merged(float lse, float part) {
    const float maximum = fmaxf(lse, part);
    if (maximum == kNegativeInfinity) return {kNegativeInfinity, 0.0f, 0.0f};
    const float kept = expf(lse - maximum), added = expf(part - maximum), sum = kept + added;
    return {maximum + logf(sum), kept / sum, added / sum};
}

// `width` adjacent lanes per row [token, head] of o and part: o = kept · o + added · part, and its lse.
template <typename T>
__device__ void merge(float *o, float *lse, const T *part, const float *part_lse, u64 rows, u32 tokens, u32 num_heads,
                      u32 d, u32 width) {
    constexpr u32 N = kPack<float>;
    const u64 row = static_cast<u64>(blockIdx.x) * (blockDim.x / width) + threadIdx.x / width;
    const u32 lane = threadIdx.x % width;
    const u64 head = row % num_heads, token = row / num_heads % tokens, batch = row / num_heads / tokens;
    const u64 at = (batch * num_heads + head) * tokens + token;
    const Merged factors = row < rows ? merged(lse[at], part_lse[at]) : Merged{};
    __syncwarp();  // All lanes of the row have read its lse.
    if (row >= rows) return;
    if (lane == 0) lse[at] = factors.lse;
    o += row * d;
    part += row * d;
    const bool aligned = d % N == 0 && is_aligned(o, part);
    for (u32 column = lane * N; column < d; column += width * N) {
        Pack<float, N> values = load_in_row<N>(o, column, d, aligned);
        const Pack<float, N> other = load_in_row<N>(part, column, d, aligned);
#pragma unroll
        for (u32 j = 0; j < N; ++j) values.at[j] = factors.kept * values.at[j] + factors.added * other.at[j];
        store_in_row<N>(o, column, d, aligned, values);
    }
}

}  // namespace

// Empty sums: acc [rows, d], with its maxima and sums.
KERNEL(attention_begin, float *acc, float *maxima, float *sums, u32 rows, u32 d) {
    for (u64 i = global_thread(); i < static_cast<u64>(rows) * d; i += global_threads()) acc[i] = 0.0f;
    for (u64 row = global_thread(); row < rows; row += global_threads()) {
        maxima[row] = kNegativeInfinity;
        sums[row] = 0.0f;
    }
}

KERNEL(attention_zero, float *x, u64 count) {
    for (u64 i = global_thread(); i < count; i += global_threads()) x[i] = 0.0f;
}

#define INSTANTIATE(T, suffix)                                                                                    \
    KERNEL(attention_gather_##suffix, T *packed, const T *x, const u32 *heads, u32 rows, u32 tokens, u32 group,   \
           u32 num_heads, u32 d) {                                                                                \
        if (is_packable(x, d)) {                                                                                  \
            gather<T, kPack<T>>(packed, x, heads, rows, tokens, group, num_heads, d);                             \
        } else {                                                                                                  \
            gather<T, 1>(packed, x, heads, rows, tokens, group, num_heads, d);                                    \
        }                                                                                                         \
    }                                                                                                             \
    KERNEL(attention_scatter_##suffix, T *x, const float *packed, const u32 *heads, u32 rows, u32 tokens,         \
           u32 group, u32 num_heads, u32 d, u32 accumulate) {                                                     \
        if (is_packable(x, d)) {                                                                                  \
            scatter<T, kPack<T>>(x, packed, heads, rows, tokens, group, num_heads, d, accumulate, One());         \
        } else {                                                                                                  \
            scatter<T, 1>(x, packed, heads, rows, tokens, group, num_heads, d, accumulate, One());                \
        }                                                                                                         \
    }                                                                                                             \
    KERNEL(attention_finish_##suffix, T *o, float *lse, const float *acc, const float *maxima, const float *sums, \
           const u32 *heads, u32 rows, u32 tokens, u32 group, u32 num_heads, u32 num_tokens, u32 d) {             \
        const Normalize factor = {maxima, sums};                                                                  \
        if (is_packable(o, d)) {                                                                                  \
            scatter<T, kPack<T>>(o, acc, heads, rows, tokens, group, num_heads, d, 0, factor);                    \
        } else {                                                                                                  \
            scatter<T, 1>(o, acc, heads, rows, tokens, group, num_heads, d, 0, factor);                           \
        }                                                                                                         \
        for (u64 row = global_thread(); row < rows; row += global_threads()) {                                    \
            const Place place = place_of(static_cast<u32>(row), heads, tokens, group);                            \
            lse[static_cast<u64>(place.head) * num_tokens + place.token] = maxima[row] + logf(sums[row]);         \
        }                                                                                                         \
    }                                                                                                             \
    KERNEL(attention_softmax_##suffix, T *p, float *maxima, float *sums, float *acc, const float *scores,         \
           const u32 *ranges, u32 rows, u32 acc_rows, u32 group, u32 first_key, u32 keys, u32 stride, u32 d,      \
           float cap) {                                                                                           \
        softmax<T>(p, maxima, sums, acc, scores, ranges, rows, acc_rows, group, first_key, keys, stride, d, cap); \
    }                                                                                                             \
    KERNEL(attention_softmax_backward_##suffix, T *p, T *ds, const float *scores, const float *dp,                \
           const float *lse, const float *delta, const u32 *heads, const u32 *ranges, u32 rows, u32 group,        \
           u32 num_tokens, u32 first_key, u32 keys, u32 stride, float cap) {                                      \
        softmax_backward<T>(p, ds, scores, dp, lse, delta, heads, ranges, rows, group, num_tokens, first_key,     \
                            keys, stride, cap);                                                                   \
    }                                                                                                             \
    KERNEL(attention_delta_##suffix, float *sums, const T *o, const T *dout, u64 rows, u32 tokens, u32 num_heads, \
           u32 d, u32 width) {                                                                                    \
        delta<T>(sums, o, dout, rows, tokens, num_heads, d, width);                                               \
    }                                                                                                             \
    KERNEL(attention_merge_##suffix, float *o, float *lse, const T *part, const float *part_lse, u64 rows,        \
           u32 tokens, u32 num_heads, u32 d, u32 width) {                                                         \
        merge<T>(o, lse, part, part_lse, rows, tokens, num_heads, d, width);                                      \
    }
FOR_EACH_FLOAT(INSTANTIATE)
