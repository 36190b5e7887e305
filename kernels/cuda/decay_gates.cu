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

// g = −exp(a_log) · clamp(softplus(a + dt_bias)), beta = σ(b), or the clamped time step without b
template <typename T>
__device__ __forceinline__ void forward(float *g, float *beta, const T *a, const T *b, const T *a_log, const T *dt_bias,
                                        const Limits &limits, u64 size, u32 heads) {
    const u64 i = global_thread();
    if (i >= size) return;
    const u32 head = static_cast<u32>(i % heads);
    const float step = limits.clamp(softplus(widen(a[i]) + widen(dt_bias[head])));
    g[i] = -expf(widen(a_log[head])) * step;
    beta[i] = b != nullptr ? sigmoid(widen(b[i])) : step;
}

// da, and db if it is asked for; and partial[block, 2, heads], the sums of a_log and of dt_bias over the block's tokens. A warp has
// one head, its lanes the tokens. As PyTorch's clamp: no gradient outside the limits.
template <typename T>
__device__ __forceinline__ void backward(T *da, T *db, float *partial, const T *a, const T *b, const T *a_log,
                                         const T *dt_bias, const float *dg, const float *dbeta, const Limits &limits,
                                         u64 tokens, u32 heads) {
    const u64 begin = static_cast<u64>(blockIdx.x) * kTokens, end = begin + kTokens < tokens ? begin + kTokens : tokens;
    const u32 head = blockIdx.y * (kThreads / kWarp) + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (head >= heads) return;
    const float rate = expf(widen(a_log[head])), bias = widen(dt_bias[head]);
    float of_a_log = 0.0f, of_dt_bias = 0.0f;
    for (u64 token = begin + lane; token < end; token += kWarp) {
        const u64 i = token * heads + head;
        const float time = widen(a[i]) + bias, unclamped = softplus(time), step = limits.clamp(unclamped);
        const float rated = -rate * dg[i], of_step = b != nullptr ? rated : rated + dbeta[i];
        const float gradient = step == unclamped ? of_step * sigmoid(time) : 0.0f;
        of_a_log += rated * step;
        of_dt_bias += gradient;
        da[i] = round_to<T>(gradient);
        if (db != nullptr) {
            const float x = widen(b[i]);
            db[i] = round_to<T>(dbeta[i] * sigmoid(x) * sigmoid(-x));
        }
    }
    of_a_log = warp_reduce<Sum>(of_a_log);
    of_dt_bias = warp_reduce<Sum>(of_dt_bias);
    if (lane != 0) return;
    partial[static_cast<u64>(blockIdx.x) * 2 * heads + head] = of_a_log;
    partial[(static_cast<u64>(blockIdx.x) * 2 + 1) * heads + head] = of_dt_bias;
}

}  // namespace

#define INSTANTIATE(T, suffix)                                                                                 \
    KERNEL(decay_gates_forward_##suffix, float *__restrict__ g, float *__restrict__ beta,                      \
           const T *__restrict__ a, const T *__restrict__ b, const T *__restrict__ a_log,                      \
           const T *__restrict__ dt_bias, BY_VALUE(Limits) limits, u64 size, u32 heads) {                      \
        forward(g, beta, a, b, a_log, dt_bias, limits, size, heads);                                           \
    }                                                                                                          \
    KERNEL(decay_gates_backward_##suffix, T *__restrict__ da, T *__restrict__ db, float *__restrict__ partial, \
           const T *__restrict__ a, const T *__restrict__ b, const T *__restrict__ a_log,                      \
           const T *__restrict__ dt_bias, const float *__restrict__ dg, const float *__restrict__ dbeta,       \
           BY_VALUE(Limits) limits, u64 tokens, u32 heads) {                                                   \
        backward(da, db, partial, a, b, a_log, dt_bias, dg, dbeta, limits, tokens, heads);                     \
    }
FOR_EACH_FLOAT(INSTANTIATE)
