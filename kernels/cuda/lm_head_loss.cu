// Softmax and cross-entropy of a tile of logits, between the matmuls (`src/lm_head_loss`).
//
// The logits are always f32, since rounding them would be the largest error of the loss. Rows are
// `row_stride` columns apart, a multiple of 8, so that every row begins at a 16-byte boundary.

#include "common.cuh"

namespace {

constexpr i64 kIgnored = -100;
// Number of 16-byte loads that a thread has in flight.
constexpr u32 kUnroll = 4;

// The value to subtract before exponentiating; finite if all logits are −∞, so that −∞ − shift is not NaN.
__device__ __forceinline__ float shift_of(float max) { return max == kNegativeInfinity ? 0.0f : max; }

// gradient = softmax − one-hot of the label for N adjacent columns, times the derivative of the soft cap `cap` (0: none); 0 for an
// ignored token. `gradient` may
// overwrite the logits: a thread reads its columns before it writes them.
template <typename T>
__device__ void gradient_of_columns(T *gradient, const float *logits, const float *lse, const i64 *labels,
                                    u32 vocab_size, u32 row_stride, float cap) {
    constexpr u32 N = kPack<T>;
    const u64 row = blockIdx.x;
    const u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (column >= vocab_size) return;
    const i64 label = labels[row];
    const u64 offset = row * row_stride + column;
    Pack<T, N> result;
    if (label == kIgnored) {
        for (u32 j = 0; j < N; ++j) result.at[j] = round_to<T>(0.0f);
    } else {
        const float log_denominator = lse[row];
        for (u32 begin = 0; begin < N; begin += 4) {
            const auto some = *reinterpret_cast<const Pack<float, 4> *>(logits + offset + begin);
            for (u32 j = 0; j < 4; ++j) {
                const float hit = static_cast<i64>(column + begin + j) == label ? 1.0f : 0.0f;
                const float logit = softcap(some.at[j], cap);
                const float difference = expf(logit - log_denominator) - hit;
                result.at[begin + j] = round_to<T>(difference * softcap_slope(logit, cap));
            }
        }
    }
    *reinterpret_cast<Pack<T, N> *>(gradient + offset) = result;
}

template <typename T> __device__ void clear(T *rows, u64 len) {
    for (u64 i = global_thread(); i < len; i += global_threads()) rows[i] = round_to<T>(0.0f);
}

}  // namespace

// One block per token: logsumexp of its logits with their soft cap (0: none), and its loss, logsumexp − logit of the label; both 0 if the
// label is ignored. Of a slice of the vocabulary: instead of the loss the logit of the label, −∞ if that is negative. The maximum is
// updated along the way, so the logits are read once (Milakov & Gimelshein 2018).
KERNEL(lm_head_loss_forward, float *lse, float *results, const float *logits, const i64 *labels, u32 vocab_size,
       u32 row_stride, float cap, u32 is_slice) {
    SHARED(float, scratch, [kWarp]);
    const u64 row = blockIdx.x;
    const i64 label = labels[row];
    if (label == kIgnored) {
        if (threadIdx.x == 0) lse[row] = results[row] = 0.0f;
        return;
    }
    logits += row * row_stride;
    float max = kNegativeInfinity, sum = 0.0f;
    const u32 packs = (vocab_size + 3) / 4;
    for (u32 first = threadIdx.x; first < packs; first += kUnroll * blockDim.x) {
        float values[kUnroll * 4];
#pragma unroll
        for (u32 u = 0; u < kUnroll; ++u) {
            const u32 column = (first + u * blockDim.x) * 4;
            Pack<float, 4> some = {};
            if (column < vocab_size) some = *reinterpret_cast<const Pack<float, 4> *>(logits + column);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                values[u * 4 + j] = column + j < vocab_size ? softcap(some.at[j], cap) : kNegativeInfinity;
            }
        }
        float larger = max;
#pragma unroll
        for (u32 i = 0; i < kUnroll * 4; ++i) larger = fmaxf(larger, values[i]);
        const float shift = shift_of(larger);
        sum *= expf(max - shift);
#pragma unroll
        for (u32 i = 0; i < kUnroll * 4; ++i) sum += expf(values[i] - shift);
        max = larger;
    }
    const float shift = shift_of(block_reduce<Max>(max, scratch));
    sum = block_reduce<Sum>(sum * expf(max - shift), scratch);
    if (threadIdx.x == 0) {
        lse[row] = shift + logf(sum);
        const float logit = label < 0 ? kNegativeInfinity : softcap(logits[label], cap);
        results[row] = is_slice ? logit : logf(sum) + (shift - logit);
    }
}

// One thread per token: from the statistics of all slices of the vocabulary, [slices][2][tokens] (logsumexp, logit of the label or −∞),
// the logsumexp of all logits, and the loss.
KERNEL(lm_head_loss_combine, float *lse, float *losses, const float *statistics, u32 slices, u64 tokens) {
    for (u64 token = global_thread(); token < tokens; token += global_threads()) {
        float max = kNegativeInfinity, logit = kNegativeInfinity, sum = 0.0f;
        for (u32 slice = 0; slice < slices; ++slice) {
            const float *of_slice = statistics + 2 * slice * tokens + token;
            max = fmaxf(max, of_slice[0]);
            logit = fmaxf(logit, of_slice[tokens]);
        }
        const float shift = shift_of(max);
        for (u32 slice = 0; slice < slices; ++slice) sum += expf(statistics[2 * slice * tokens + token] - shift);
        lse[token] = shift + logf(sum);
        losses[token] = logf(sum) + (shift - logit);
    }
}

#define INSTANTIATE(T, suffix)                                                                                 \
    KERNEL(lm_head_loss_gradient_##suffix, T *gradient, const float *logits, const float *lse,                 \
           const i64 *labels, u32 vocab_size, u32 row_stride, float cap) {                                     \
        gradient_of_columns<T>(gradient, logits, lse, labels, vocab_size, row_stride, cap);                    \
    }                                                                                                          \
    KERNEL(lm_head_loss_clear_##suffix, T *rows, u64 len) { clear<T>(rows, len); }
FOR_EACH_FLOAT(INSTANTIATE)
