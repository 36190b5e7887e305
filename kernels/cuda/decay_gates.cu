// Decay and rate of linear attention, forward and backward (`src/decay_gates`).

#include "common.cuh"

namespace {

// `TOKENS` of `src/decay_gates/cuda.rs`: those that a block sums for the gradients of the heads' parameters.
constexpr u32 kTokens = 512;

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// log(1 + eˣ)
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// The smallest and the largest time step.
struct Limits {
    float least, most;

    // NaN stays NaN, which fmaxf would drop.
    __device__ __forceinline__ float clamp(float step) const {
        return step < least ? least : step > most ? most : step;
    }
};

// Tokens, heads, and the decays of each head: one, or one per channel of its keys.
struct Sizes {
    u64 tokens;
    u32 heads, channels;

    __device__ __forceinline__ u32 columns() const { return heads * channels; }
};

// g = −exp(a_log) · clamp(softplus(a + dt_bias)), beta = σ(b), or the clamped time step without b
template <typename T>
__device__ __forceinline__ void forward(float *g, float *beta, const T *a, const T *b, const T *a_log, const T *dt_bias,
                                        const Limits &limits, const Sizes &sizes) {
    const u64 i = global_thread();
    if (i >= sizes.tokens * sizes.columns()) return;
    const u32 column = static_cast<u32>(i % sizes.columns());
    const float step = limits.clamp(softplus(widen(a[i]) + widen(dt_bias[column])));
    g[i] = -expf(widen(a_log[column / sizes.channels])) * step;
    if (b == nullptr) {
        beta[i] = step;
    } else if (i < sizes.tokens * sizes.heads) {
        beta[i] = sigmoid(widen(b[i]));
    }
}

// One head of a block of tokens, for a warp. As PyTorch's clamp: no gradient outside the limits.
template <typename T> struct Head {
    T *da;
    const T *a;
    const float *dg, *dbeta;
    const Limits &limits;
    // exp(a_log)
    float rate;
    bool is_time_step;

    // Writes da of an element, and adds the gradients of a_log and of dt_bias.
    __device__ __forceinline__ void backward(u64 i, float bias, float &of_a_log, float &of_dt_bias) const {
        const float time = widen(a[i]) + bias, unclamped = softplus(time), step = limits.clamp(unclamped);
        const float rated = -rate * dg[i], of_step = is_time_step ? rated + dbeta[i] : rated;
        const float gradient = step == unclamped ? of_step * sigmoid(time) : 0.0f;
        of_a_log += rated * step;
        of_dt_bias += gradient;
        da[i] = round_to<T>(gradient);
    }
};

// da, and db if it is asked for; and partial[block, heads + columns], the sums of a_log and of dt_bias over the block's tokens. A warp
// has one head. Its lanes have the tokens, or the channels if there are several.
template <typename T>
__device__ __forceinline__ void backward(T *da, T *db, float *partial, const T *a, const T *b, const T *a_log,
                                         const T *dt_bias, const float *dg, const float *dbeta, const Limits &limits,
                                         const Sizes &sizes) {
    const u32 heads = sizes.heads, channels = sizes.channels, columns = sizes.columns();
    const u64 begin = static_cast<u64>(blockIdx.x) * kTokens;
    const u64 end = begin + kTokens < sizes.tokens ? begin + kTokens : sizes.tokens;
    const u32 head = blockIdx.y * (kThreads / kWarp) + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (head >= heads) return;
    const Head<T> at = {da, a, dg, dbeta, limits, expf(widen(a_log[head])), b == nullptr};
    float *of_heads = partial + static_cast<u64>(blockIdx.x) * (heads + columns), *of_columns = of_heads + heads;
    float of_a_log = 0.0f;
    if (channels == 1) {
        float of_dt_bias = 0.0f;
        const float bias = widen(dt_bias[head]);
        for (u64 token = begin + lane; token < end; token += kWarp) at.backward(token * heads + head, bias, of_a_log, of_dt_bias);
        of_dt_bias = warp_reduce<Sum>(of_dt_bias);
        if (lane == 0) of_columns[head] = of_dt_bias;
    } else {
        for (u32 column = head * channels + lane; column < (head + 1) * channels; column += kWarp) {
            float of_dt_bias = 0.0f;
            const float bias = widen(dt_bias[column]);
            for (u64 token = begin; token < end; ++token) at.backward(token * columns + column, bias, of_a_log, of_dt_bias);
            of_columns[column] = of_dt_bias;
        }
    }
    of_a_log = warp_reduce<Sum>(of_a_log);
    if (lane == 0) of_heads[head] = of_a_log;
    if (db == nullptr) return;
    for (u64 token = begin + lane; token < end; token += kWarp) {
        const u64 i = token * heads + head;
        const float x = widen(b[i]);
        db[i] = round_to<T>(dbeta[i] * sigmoid(x) * sigmoid(-x));
    }
}

}  // namespace

#define INSTANTIATE(T, suffix)                                                                                 \
    KERNEL(decay_gates_forward_##suffix, float *__restrict__ g, float *__restrict__ beta,                      \
           const T *__restrict__ a, const T *__restrict__ b, const T *__restrict__ a_log,                      \
           const T *__restrict__ dt_bias, BY_VALUE(Limits) limits, u64 tokens, u32 heads, u32 channels) { \
        forward(g, beta, a, b, a_log, dt_bias, limits, Sizes{tokens, heads, channels});                                           \
    }                                                                                                          \
    KERNEL(decay_gates_backward_##suffix, T *__restrict__ da, T *__restrict__ db, float *__restrict__ partial, \
           const T *__restrict__ a, const T *__restrict__ b, const T *__restrict__ a_log,                      \
           const T *__restrict__ dt_bias, const float *__restrict__ dg, const float *__restrict__ dbeta,       \
           BY_VALUE(Limits) limits, u64 tokens, u32 heads, u32 channels) {                                                   \
        backward(da, db, partial, a, b, a_log, dt_bias, dg, dbeta, limits, Sizes{tokens, heads, channels});                     \
    }
FOR_EACH_FLOAT(INSTANTIATE)
