// Reductions and the elementwise arithmetic of flat tensors (`src/elementwise`).

#include "common.cuh"

namespace {

// Adds one value per thread, first over lanes, then over warps; thread 0 gets the sum.
__device__ __forceinline__ double block_sum(double value) {
    SHARED(double, sums, [kThreads / kWarp]);
    const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    for (u32 distance = kWarp / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(kFullWarp, value, distance);
    }
    if (lane == 0) sums[warp] = value;
    __syncthreads();
    double sum = 0.0;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < kThreads / kWarp; ++i) sum += sums[i];
    }
    return sum;
}

// Adds squares in f64. The elements that a thread adds, and their order, depend only on the number of
// elements and of blocks; without alignment the same elements are read one by one.
template <typename T> struct SumOfSquares {
    const T *x;
    bool aligned;
    double sum;

    template <int N> __device__ __forceinline__ void at(u64 i) {
        const auto values = load_in_row<N>(x + i, 0, N, aligned);
        for (int k = 0; k < N; ++k) {
            const double value = values.at[k];
            sum += value * value;
        }
    }
};

// partial[block] = Σ x² over every gridDim.x-th tile.
template <typename T> __device__ __forceinline__ void sum_of_squares(double *partial, const T *x, u64 size) {
    SumOfSquares<T> squares = {x, is_aligned(x), 0.0};
    for (u64 tile = blockIdx.x; tile * kTile < size; tile += gridDim.x) {
        for_each_in_tile<kPack<T>>(tile, size, squares);
    }
    const double sum = block_sum(squares.sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// Finds the largest exponent and mantissa. Only infinities and NaN have all exponent bits set.
template <typename T> struct LargestMagnitude {
    const T *x;
    bool aligned;
    u32 largest;

    template <int N> __device__ __forceinline__ void at(u64 i) {
        const auto values = load_in_row<N>(x + i, 0, N, aligned);
        for (int k = 0; k < N; ++k) {
            const u32 magnitude = __float_as_uint(values.at[k]) << 1;
            largest = magnitude > largest ? magnitude : largest;
        }
    }
};

// found[block] = 1 if a tile of the block has an infinity or a NaN, else 0.
template <typename T> __device__ __forceinline__ void find_non_finite(float *found, const T *x, u64 size) {
    SHARED(float, scratch, [kWarp]);
    LargestMagnitude<T> magnitude = {x, is_aligned(x), 0};
    for (u64 tile = blockIdx.x; tile * kTile < size; tile += gridDim.x) {
        for_each_in_tile<kPack<T>>(tile, size, magnitude);
    }
    const float any = block_reduce<Max>(magnitude.largest >= 0xff000000u ? 1.0f : 0.0f, scratch);
    if (threadIdx.x == 0) found[blockIdx.x] = any;
}

// dst += src, where D is at least as wide as S.
template <typename D, typename S> struct Accumulate {
    D *dst;
    const S *src;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        const auto old = load<N>(dst + i), added = load<N>(src + i);
        Pack<float, N> sum;
        for (int k = 0; k < N; ++k) sum.at[k] = old.at[k] + added.at[k];
        store(dst + i, sum);
    }
};

template <typename D, typename S> __device__ __forceinline__ void accumulate(D *dst, const S *src, u64 size) {
    for_each_pack<kPack<D>>(size, is_aligned(dst) && is_aligned(src), Accumulate<D, S>{dst, src});
}

// dst *= factor
template <typename T> struct Scale {
    T *dst;
    float factor;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        auto values = load<N>(dst + i);
        for (int k = 0; k < N; ++k) values.at[k] *= factor;
        store(dst + i, values);
    }
};

// dst = cap · tanh(dst / cap)
template <typename T> struct Softcap {
    T *dst;
    float cap;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        auto values = load<N>(dst + i);
        for (int k = 0; k < N; ++k) values.at[k] = softcap(values.at[k], cap);
        store(dst + i, values);
    }
};

// dst = value
template <typename T> struct Fill {
    T *dst;
    float value;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        Pack<float, N> values;
        for (int k = 0; k < N; ++k) values.at[k] = value;
        store(dst + i, values);
    }
};

}  // namespace

// sums += Σ partial over the blocks, in order, where each block has a row of `row` elements.
KERNEL(elementwise_add_blocks, float *__restrict__ sums, const float *__restrict__ partial, u32 blocks, u32 row, u32 size) {
    const u64 i = global_thread();
    if (i >= size) return;
    float sum = 0.0f;
    for (u32 block = 0; block < blocks; ++block) sum += partial[static_cast<u64>(block) * row + i];
    sums[i] += sum;
}

#define INSTANTIATE(T, suffix)                                                                                 \
    KERNEL(elementwise_sum_of_squares_##suffix, double *partial, const T *__restrict__ x, u64 size) {          \
        sum_of_squares(partial, x, size);                                                                      \
    }                                                                                                          \
    KERNEL(elementwise_find_non_finite_##suffix, float *found, const T *__restrict__ x, u64 size) {            \
        find_non_finite(found, x, size);                                                                       \
    }                                                                                                          \
    KERNEL(elementwise_accumulate_##suffix, T *__restrict__ dst, const T *__restrict__ src, u64 size) {        \
        accumulate(dst, src, size);                                                                            \
    }                                                                                                          \
    KERNEL(elementwise_scale_##suffix, T *__restrict__ dst, float factor, u64 size) {                          \
        for_each_pack<kPack<T>>(size, is_aligned(dst), Scale<T>{dst, factor});                                 \
    }                                                                                                          \
    KERNEL(elementwise_scale_by_##suffix, T *__restrict__ dst, const T *__restrict__ factor, u64 size) {       \
        for_each_pack<kPack<T>>(size, is_aligned(dst), Scale<T>{dst, widen(*factor)});                         \
    }                                                                                                          \
    KERNEL(elementwise_softcap_##suffix, T *__restrict__ dst, float cap, u64 size) {                           \
        for_each_pack<kPack<T>>(size, is_aligned(dst), Softcap<T>{dst, cap});                                  \
    }                                                                                                          \
    KERNEL(elementwise_fill_##suffix, T *__restrict__ dst, float value, u64 size) {                            \
        for_each_pack<kPack<T>>(size, is_aligned(dst), Fill<T>{dst, value});                                   \
    }
FOR_EACH_FLOAT(INSTANTIATE)

// Adds 16-bit gradients to an f32 buffer.
KERNEL(elementwise_accumulate_in_f32_bf16, float *__restrict__ dst, const bf16 *__restrict__ src, u64 size) {
    accumulate(dst, src, size);
}
KERNEL(elementwise_accumulate_in_f32_f16, float *__restrict__ dst, const f16 *__restrict__ src, u64 size) {
    accumulate(dst, src, size);
}
