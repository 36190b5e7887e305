// One step of an optimizer on flat tensors (`src/optimizer`): rules for one element, and the driver of all.
//
// A rule is the struct `Constants` of the Rust file with its name. Its `update` gets one element of each
// tensor that a step updates, the parameter first.

#include "common.cuh"

namespace {

struct AdamW {
    float grad_scale, coupled_decay, decoupled_decay, one_minus_beta1, beta2, one_minus_beta2, step_size, root_scale,
        eps;

    __device__ __forceinline__ void update(float (&element)[3], float grad) const {
        float &param = element[0], &exp_avg = element[1], &exp_avg_sq = element[2];
        const float g = fmaf(coupled_decay, param, grad * grad_scale);
        exp_avg = fmaf(one_minus_beta1, g - exp_avg, exp_avg);
        exp_avg_sq = fmaf(one_minus_beta2 * g, g, beta2 * exp_avg_sq);
        const float denominator = fmaf(sqrtf(exp_avg_sq), root_scale, eps);
        const float kept = fmaf(-decoupled_decay, param, param);
        param = fmaf(-step_size, exp_avg / denominator, kept);
    }
};

struct Sgd {
    float lr, momentum, weight_decay, grad_scale;
    u32 is_nesterov, is_first;

    __device__ __forceinline__ float decayed(float param, float grad) const {
        return fmaf(weight_decay, param, grad * grad_scale);
    }

    __device__ __forceinline__ void update(float (&element)[1], float grad) const {
        element[0] = fmaf(-lr, decayed(element[0], grad), element[0]);
    }

    __device__ __forceinline__ void update(float (&element)[2], float grad) const {
        float &param = element[0], &buffer = element[1];
        const float g = decayed(param, grad);
        // The first step ignores the buffer: it may hold anything, even NaN.
        buffer = is_first ? g : fmaf(momentum, buffer, g);
        param = fmaf(-lr, is_nesterov ? fmaf(momentum, buffer, g) : buffer, param);
    }
};

// 1, −1 or 0, and NaN for NaN.
__device__ __forceinline__ float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }

struct Lion {
    float grad_scale, one_minus_beta1, one_minus_beta2, lr, decay;

    __device__ __forceinline__ void update(float (&element)[2], float grad) const {
        float &param = element[0], &exp_avg = element[1];
        const float g = grad * grad_scale;
        const float direction = fmaf(one_minus_beta1, g - exp_avg, exp_avg);
        const float kept = fmaf(-decay, param, param);
        param = fmaf(-lr, sign(direction), kept);
        exp_avg = fmaf(one_minus_beta2, g - exp_avg, exp_avg);
    }
};

struct Adagrad {
    float grad_scale, weight_decay, step_size, eps;

    __device__ __forceinline__ void update(float (&element)[2], float grad) const {
        float &param = element[0], &state_sum = element[1];
        const float g = fmaf(weight_decay, param, grad * grad_scale);
        state_sum = fmaf(g, g, state_sum);
        param = fmaf(-step_size, g / (sqrtf(state_sum) + eps), param);
    }
};

// Applies a rule to N adjacent elements of T tensors.
template <typename Rule, int T> struct Step {
    float *tensors[T];
    const float *grad;
    const Rule &rule;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        Pack<float, N> packs[T];
#pragma unroll
        for (int t = 0; t < T; ++t) packs[t] = load<N>(tensors[t] + i);
        const auto grads = load<N>(grad + i);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            float element[T];
#pragma unroll
            for (int t = 0; t < T; ++t) element[t] = packs[t].at[k];
            rule.update(element, grads.at[k]);
#pragma unroll
            for (int t = 0; t < T; ++t) packs[t].at[k] = element[t];
        }
#pragma unroll
        for (int t = 0; t < T; ++t) store(tensors[t] + i, packs[t]);
    }
};

template <typename Rule, typename... State>
__device__ __forceinline__ void step(u64 len, const Rule &rule, const float *grad, float *param, State *... state) {
    const Step<Rule, 1 + sizeof...(State)> body = {{param, state...}, grad, rule};
    for_each_pack<kPack<float>>(len, is_aligned(param, state..., grad), body);
}

}  // namespace

// The kernels of rules by the number of their state tensors. Parameters come as `src/optimizer/elementwise.rs` passes
// them: the updated tensors in the order of the rule's `TENSORS`, the gradient, the number of elements, the constants.
#define STEP_0(name, Rule)                                                                                        \
    KERNEL(name, float *__restrict__ param, const float *__restrict__ grad, u64 len, BY_VALUE(Rule) rule) {       \
        step(len, rule, grad, param);                                                                             \
    }

#define STEP_1(name, Rule)                                                                                        \
    KERNEL(name, float *__restrict__ param, float *__restrict__ state, const float *__restrict__ grad, u64 len,   \
           BY_VALUE(Rule) rule) {                                                                                 \
        step(len, rule, grad, param, state);                                                                      \
    }

#define STEP_2(name, Rule)                                                                                        \
    KERNEL(name, float *__restrict__ param, float *__restrict__ state0, float *__restrict__ state1,               \
           const float *__restrict__ grad, u64 len, BY_VALUE(Rule) rule) {                                        \
        step(len, rule, grad, param, state0, state1);                                                             \
    }

STEP_2(adamw_step, AdamW)            // exp_avg, exp_avg_sq
STEP_0(sgd_step, Sgd)                // no state
STEP_1(sgd_step_with_momentum, Sgd)  // momentum_buffer
STEP_1(lion_step, Lion)              // exp_avg
STEP_1(adagrad_step, Adagrad)        // state_sum
