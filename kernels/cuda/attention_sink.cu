// Attention sinks, forward and backward (`src/attention_sink`).

#include "common.cuh"

namespace {

// `TOKENS` of `src/attention_sink/cuda.rs`: those that a block sums.
constexpr u32 kTokens = 2048;

// A warp per row [token, head] of o, which it scales by the part of the softmax that the keys keep; and the row's lse.
template <typename T>
__device__ __forceinline__ void forward(T *o, float *lse, const T *sinks, u64 rows, u32 tokens, u32 heads, u32 d) {
    const u64 row = global_thread() / kWarp;
    if (row >= rows) return;
    const u32 lane = threadIdx.x % kWarp;
    const u64 head = row % heads, token = row / heads % tokens, sequence = row / heads / tokens;
    const u64 at = (sequence * heads + head) * tokens + token;
    const float before = lse[at], sink = widen(sinks[head]), maximum = fmaxf(before, sink);
    const bool is_empty = maximum == kNegativeInfinity;
    const float kept = is_empty ? 0.0f : 1.0f / (1.0f + expf(sink - before));
    __syncwarp();  // All lanes have read the row's lse.
    if (lane == 0 && !is_empty) lse[at] = maximum + log1pf(expf(-fabsf(before - sink)));
    o += row * d;
    for (u32 column = lane; column < d; column += kWarp) o[column] = round_to<T>(widen(o[column]) * kept);
}

// partial[sequence, block, head] = −Σ e^(sink − lse) · delta over a block of tokens. A block of threads per head.
template <typename T>
__device__ __forceinline__ void backward(float *partial, const T *sinks, const float *lse, const float *delta,
                                         u32 tokens, float *scratch) {
    const u32 head = blockIdx.y, heads = gridDim.y, sequence = blockIdx.z;
    const u32 begin = blockIdx.x * kTokens, end = tokens - begin < kTokens ? tokens : begin + kTokens;
    const u64 row = (static_cast<u64>(sequence) * heads + head) * tokens;
    const float sink = widen(sinks[head]);
    float sum = 0.0f;
    for (u32 token = begin + threadIdx.x; token < end; token += kThreads) {
        const float of_token = lse[row + token];
        if (of_token != kNegativeInfinity) sum -= expf(sink - of_token) * delta[row + token];
    }
    sum = block_reduce<Sum>(sum, scratch);
    if (threadIdx.x == 0) partial[(static_cast<u64>(sequence) * gridDim.x + blockIdx.x) * heads + head] = sum;
}

}  // namespace

#define INSTANTIATE(T, suffix)                                                                                 \
    KERNEL(attention_sink_forward_##suffix, T *__restrict__ o, float *__restrict__ lse,                        \
           const T *__restrict__ sinks, u64 rows, u32 tokens, u32 heads, u32 d) {                              \
        forward(o, lse, sinks, rows, tokens, heads, d);                                                        \
    }                                                                                                          \
    KERNEL(attention_sink_backward_##suffix, float *__restrict__ partial, const T *__restrict__ sinks,         \
           const float *__restrict__ lse, const float *__restrict__ delta, u32 tokens) {                       \
        SHARED(float, scratch, [32]);                                                                          \
        backward(partial, sinks, lse, delta, tokens, scratch);                                                 \
    }
FOR_EACH_FLOAT(INSTANTIATE)
