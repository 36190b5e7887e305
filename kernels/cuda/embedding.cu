// Token embedding, forward and backward (`src/embedding`).

#include "common.cuh"

namespace {

// The id of a token whose row is in another slice of the table: `ELSEWHERE` of `src/embedding`.
constexpr u32 kElsewhere = 0xffffffff;

// y[i] = weight[ids[i]], bit for bit, or 0 if the row is elsewhere: one warp per row.
template <int N, typename T>
__device__ __forceinline__ void copy_rows(T *y, const T *weight, const u32 *ids, u64 rows, u32 d) {
    const u64 row = global_thread() / kWarp;
    if (row >= rows) return;
    const u32 id = ids[row];
    const T *from = weight + static_cast<u64>(id) * d;
    T *to = y + row * d;
#pragma unroll 4
    for (u32 i = threadIdx.x % kWarp * N; i < d; i += kWarp * N) {
        Pack<T, N> some = {};
        if (id != kElsewhere) some = *reinterpret_cast<const Pack<T, N> *>(from + i);
        *reinterpret_cast<Pack<T, N> *>(to + i) = some;
    }
}

template <typename T>
__device__ __forceinline__ void forward(T *y, const T *weight, const u32 *ids, u64 rows, u32 d) {
    if (d % kPack<T> == 0 && is_aligned(y, weight)) {
        copy_rows<kPack<T>>(y, weight, ids, rows, d);
    } else {
        copy_rows<1>(y, weight, ids, rows, d);
    }
}

// Tokens of one id, `tokens[begin..end]`, and the row for the sum of their gradients: a row of `dweight`, or
// of `partial` if the id has more tokens than fit one segment. As `Segment` in `src/embedding/plan.rs`.
struct Segment {
    u32 begin, end, row, is_partial;
};

// Columns that a block adds up, and its threads.
constexpr u32 kColumns = 512, kColumnThreads = 128;

// Adds the gradients of a segment's tokens, in order, for N columns per thread.
template <int N, typename T>
__device__ __forceinline__ void add_segment(float *dweight, float *partial, const T *dy, const u32 *tokens,
                                            const Segment &segment, u32 d) {
    const u32 first = blockIdx.y * kColumns, end = first + kColumns < d ? first + kColumns : d;
    float *row = (segment.is_partial ? partial : dweight) + static_cast<u64>(segment.row) * d;
    for (u32 column = first + threadIdx.x * N; column < end; column += kColumnThreads * N) {
        Pack<float, N> sum = {};
        if (!segment.is_partial) sum = load<N>(row + column);
#pragma unroll 8
        for (u32 i = segment.begin; i < segment.end; ++i) {
            const auto gradient = load<N>(dy + static_cast<u64>(tokens[i]) * d + column);
            for (int k = 0; k < N; ++k) sum.at[k] += gradient.at[k];
        }
        store(row + column, sum);
    }
}

template <typename T>
__device__ __forceinline__ void add_segments(float *dweight, float *partial, const T *dy, const u32 *tokens,
                                             const u32 *segments, u32 d) {
    const u32 *words = segments + static_cast<u64>(blockIdx.x) * 4;
    const Segment segment = {words[0], words[1], words[2], words[3]};
    constexpr int kWidth = kColumns / kColumnThreads;
    if (d % kWidth == 0 && is_aligned(dweight, partial) && is_aligned(dy)) {
        add_segment<kWidth>(dweight, partial, dy, tokens, segment, d);
    } else {
        add_segment<1>(dweight, partial, dy, tokens, segment, d);
    }
}

}  // namespace

// dweight[row] += Σ partial[begin..end], in order, for each id with several segments: {row, begin, end}.
KERNEL(embedding_add_partials, float *__restrict__ dweight, const float *__restrict__ partial,
       const u32 *__restrict__ sums, u32 d) {
    const u32 *sum_of = sums + static_cast<u64>(blockIdx.x) * 3;
    float *row = dweight + static_cast<u64>(sum_of[0]) * d;
    for (u32 column = blockIdx.y * blockDim.x + threadIdx.x; column < d; column += gridDim.y * blockDim.x) {
        float sum = row[column];
#pragma unroll 8
        for (u32 i = sum_of[1]; i < sum_of[2]; ++i) sum += partial[static_cast<u64>(i) * d + column];
        row[column] = sum;
    }
}

#define INSTANTIATE(T, suffix)                                                                                 \
    KERNEL(embedding_forward_##suffix, T *__restrict__ y, const T *__restrict__ weight,                        \
           const u32 *__restrict__ ids, u64 rows, u32 d) {                                                     \
        forward(y, weight, ids, rows, d);                                                                      \
    }                                                                                                          \
    KERNEL(embedding_add_segments_##suffix, float *__restrict__ dweight, float *__restrict__ partial,          \
           const T *__restrict__ dy, const u32 *__restrict__ tokens, const u32 *__restrict__ segments, u32 d) { \
        add_segments(dweight, partial, dy, tokens, segments, d);                                               \
    }
FOR_EACH_FLOAT(INSTANTIATE)
