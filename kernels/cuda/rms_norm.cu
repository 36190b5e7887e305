// RMS normalization, forward and backward, of whole rows and of parts of them (`src/rms_norm`).

#include "common.cuh"

namespace {

// The mean of the block's row if it is to be subtracted (LayerNorm), else 0.
template <typename T>
__device__ __forceinline__ float mean_of(const T *x, u32 d, bool aligned, u32 centered, float *scratch) {
    constexpr int N = kPack<T>;
    if (!centered) return 0.0f;
    float sum = 0.0f;
    for (u32 i = threadIdx.x * N; i < d; i += blockDim.x * N) {
        const auto value = load_in_row<N>(x, i, d, aligned);
        for (int k = 0; k < N; ++k) sum += value.at[k];
    }
    return block_reduce<Sum>(sum, scratch) / static_cast<float>(d);
}

// One block per row: y = (offset + w) · x / sqrt(mean(x²) + eps), of x without its mean if it is `centered`; rstd stores the
// reciprocal root. The mean is over `width` elements: those of the row, or if there are `sums` of squares, of these.
template <typename T>
__device__ __forceinline__ void forward(T *y, float *rstd, const T *x, const T *weight, const float *sums, u32 d, float width,
                                        float eps, float offset, u32 centered) {
    constexpr int N = kPack<T>;
    SHARED(float, scratch, [kWarp]);
    const bool aligned = d % N == 0 && is_aligned(y, x, weight);
    const u64 row = blockIdx.x;
    x += row * d;
    y += row * d;
    const float mean = mean_of(x, d, aligned, centered, scratch);
    float squares = 0.0f;
    for (u32 i = threadIdx.x * N; sums == nullptr && i < d; i += blockDim.x * N) {
        const auto value = load_in_row<N>(x, i, d, aligned);
        for (int k = 0; k < N; ++k) {
            // Elements past the row's end are 0, not minus the mean.
            const float part = !aligned && i + k >= d ? 0.0f : value.at[k] - mean;
            squares += part * part;
        }
    }
    const float sum = sums == nullptr ? block_reduce<Sum>(squares, scratch) : sums[row];
    const float scale = rsqrtf(sum / width + eps);
    if (threadIdx.x == 0) rstd[row] = scale;
    for (u32 i = threadIdx.x * N; i < d; i += blockDim.x * N) {
        const auto value = load_in_row<N>(x, i, d, aligned), w = load_in_row<N>(weight, i, d, aligned);
        Pack<float, N> normed;
        for (int k = 0; k < N; ++k) normed.at[k] = (offset + w.at[k]) * ((value.at[k] - mean) * scale);
        store_in_row(y, i, d, aligned, normed);
    }
}

// One block per row: sums[row] = Σ a · b, or Σ (offset + w) · a · b if there is a weight.
template <typename T>
__device__ __forceinline__ void products(float *sums, const T *a, const T *b, const T *weight, u32 d, float offset) {
    constexpr int N = kPack<T>;
    SHARED(float, scratch, [kWarp]);
    const bool aligned = d % N == 0 && is_aligned(a, b, weight);
    const u64 row = blockIdx.x;
    a += row * d;
    b += row * d;
    float sum = 0.0f;
    for (u32 i = threadIdx.x * N; i < d; i += blockDim.x * N) {
        const auto left = load_in_row<N>(a, i, d, aligned), right = load_in_row<N>(b, i, d, aligned);
        if (weight == nullptr) {
            for (int k = 0; k < N; ++k) sum += left.at[k] * right.at[k];
        } else {
            const auto w = load_in_row<N>(weight, i, d, aligned);
            for (int k = 0; k < N; ++k) sum += (offset + w.at[k]) * left.at[k] * right.at[k];
        }
    }
    sum = block_reduce<Sum>(sum, scratch);
    if (threadIdx.x == 0) sums[row] = sum;
}

// One block per row: dx = rstd · (w · dy − x · rstd² · mean(w · dy · x)) for w = offset + weight, added to dx with
// `accumulate`. If it is `centered`, of x without its mean, which goes to `means`, and minus the mean of the result. The mean is
// over `width` elements: those of the row, or if there are `sums` of products, of these.
template <typename T>
__device__ __forceinline__ void backward_input(T *dx, float *means, const T *dy, const T *x, const T *weight, const float *rstd,
                                               const float *sums, u32 d, float width, u32 accumulate, float offset,
                                               u32 centered) {
    constexpr int N = kPack<T>;
    SHARED(float, scratch, [kWarp]);
    const bool aligned = d % N == 0 && is_aligned(dx, dy, x, weight);
    const u64 row = blockIdx.x;
    x += row * d;
    dy += row * d;
    dx += row * d;
    const float scale = rstd[row], mean_x = mean_of(x, d, aligned, centered, scratch);
    if (centered && threadIdx.x == 0) means[row] = mean_x;
    float dot = 0.0f, sum = 0.0f;
    for (u32 i = threadIdx.x * N; sums == nullptr && i < d; i += blockDim.x * N) {
        const auto w = load_in_row<N>(weight, i, d, aligned), gradient = load_in_row<N>(dy, i, d, aligned);
        const auto value = load_in_row<N>(x, i, d, aligned);
        for (int k = 0; k < N; ++k) {
            const float product = (offset + w.at[k]) * gradient.at[k];
            dot += product * (value.at[k] - mean_x);
            sum += product;
        }
    }
    const float mean_gradient = centered ? block_reduce<Sum>(sum, scratch) / width : 0.0f;
    const float mean = (sums == nullptr ? block_reduce<Sum>(dot, scratch) : sums[row]) / width;
    const float shift = scale * scale * mean;
    for (u32 i = threadIdx.x * N; i < d; i += blockDim.x * N) {
        const auto w = load_in_row<N>(weight, i, d, aligned), gradient = load_in_row<N>(dy, i, d, aligned);
        const auto value = load_in_row<N>(x, i, d, aligned);
        Pack<float, N> result = {};
        if (accumulate) result = load_in_row<N>(dx, i, d, aligned);
        for (int k = 0; k < N; ++k) {
            const float product = (offset + w.at[k]) * gradient.at[k] - mean_gradient;
            result.at[k] += scale * (product - (value.at[k] - mean_x) * shift);
        }
        store_in_row(dx, i, d, aligned, result);
    }
}

// A block sums a chunk of the rows for 32 packs of columns: 8 rows at a time, one pack per lane.
// partial[chunk, i] = Σ over the chunk's rows of dy · x · rstd, of x minus the row's mean if there are `means`.
template <typename T>
__device__ __forceinline__ void backward_weight(float *partial, const T *dy, const T *x, const float *rstd,
                                                const float *means, u64 rows, u32 rows_per_chunk, u32 d) {
    constexpr int N = kPack<T>;
    constexpr u32 kWarps = kThreads / kWarp, kColumns = kWarp * N;
    SHARED(float, sums, [kWarps][kColumns]);
    const bool aligned = d % N == 0 && is_aligned(dy, x);
    const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const u32 first = blockIdx.y * kColumns, column = first + lane * N;
    const u64 begin = static_cast<u64>(blockIdx.x) * rows_per_chunk;
    const u64 end = begin + rows_per_chunk < rows ? begin + rows_per_chunk : rows;
    Pack<float, N> sum = {};
    if (column < d) {
        for (u64 row = begin + warp; row < end; row += kWarps) {
            const auto gradient = load_in_row<N>(dy + row * d, column, d, aligned);
            const auto value = load_in_row<N>(x + row * d, column, d, aligned);
            const float scale = rstd[row], mean = means != nullptr ? means[row] : 0.0f;
            for (int k = 0; k < N; ++k) sum.at[k] += gradient.at[k] * ((value.at[k] - mean) * scale);
        }
    }
    for (int k = 0; k < N; ++k) sums[warp][lane * N + k] = sum.at[k];
    __syncthreads();
    for (u32 i = threadIdx.x; i < kColumns && first + i < d; i += kThreads) {
        float total = 0.0f;
        for (u32 other = 0; other < kWarps; ++other) total += sums[other][i];
        partial[static_cast<u64>(blockIdx.x) * d + first + i] = total;
    }
}

}  // namespace

#define INSTANTIATE(T, suffix)                                                                                 \
    KERNEL(rms_norm_forward_##suffix, T *__restrict__ y, float *__restrict__ rstd, const T *__restrict__ x,    \
           const T *__restrict__ weight, const float *sums, u32 d, float width, float eps, float offset,       \
           u32 centered) {                                                                                     \
        forward(y, rstd, x, weight, sums, d, width, eps, offset, centered);                                    \
    }                                                                                                          \
    KERNEL(rms_norm_products_##suffix, float *__restrict__ sums, const T *__restrict__ a,                      \
           const T *__restrict__ b, const T *weight, u32 d, float offset) {                                    \
        products(sums, a, b, weight, d, offset);                                                               \
    }                                                                                                          \
    KERNEL(rms_norm_backward_input_##suffix, T *__restrict__ dx, float *means, const T *__restrict__ dy,       \
           const T *__restrict__ x, const T *__restrict__ weight, const float *__restrict__ rstd,              \
           const float *sums, u32 d, float width, u32 accumulate, float offset, u32 centered) {                \
        backward_input(dx, means, dy, x, weight, rstd, sums, d, width, accumulate, offset, centered);          \
    }                                                                                                          \
    KERNEL(rms_norm_backward_weight_##suffix, float *__restrict__ partial, const T *__restrict__ dy,           \
           const T *__restrict__ x, const float *__restrict__ rstd, const float *means, u64 rows,              \
           u32 rows_per_chunk, u32 d) {                                                                        \
        backward_weight(partial, dy, x, rstd, means, rows, rows_per_chunk, d);                                 \
    }
FOR_EACH_FLOAT(INSTANTIATE)
