// One step of stochastic gradient descent on flat tensors (`src/ops/sgd`).

#include "common.cuh"

namespace {

struct Factors {
    float lr, momentum, weight_decay, grad_scale;
    bool is_nesterov, is_first;
};

__device__ __forceinline__ float decayed(float param, float grad, const Factors &f) {
    return fmaf(f.weight_decay, param, grad * f.grad_scale);
}

__device__ __forceinline__ void update(float &param, float grad, float &buffer, const Factors &f) {
    const float g = decayed(param, grad, f);
    // The first step does not read the buffer: it may hold anything, even NaN.
    buffer = f.is_first ? g : fmaf(f.momentum, buffer, g);
    param = fmaf(-f.lr, f.is_nesterov ? fmaf(f.momentum, buffer, g) : buffer, param);
}

struct Step {
    float *param;
    const float *grad;
    Factors factors;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        auto p = load<N>(param + i);
        const auto g = load<N>(grad + i);
        for (int k = 0; k < N; ++k) p.at[k] = fmaf(-factors.lr, decayed(p.at[k], g.at[k], factors), p.at[k]);
        store(param + i, p);
    }
};

struct StepWithMomentum {
    float *param, *buffer;
    const float *grad;
    Factors factors;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        auto p = load<N>(param + i), b = load<N>(buffer + i);
        const auto g = load<N>(grad + i);
        for (int k = 0; k < N; ++k) update(p.at[k], g.at[k], b.at[k], factors);
        store(param + i, p);
        store(buffer + i, b);
    }
};

}  // namespace

KERNEL(sgd_step, float *__restrict__ param, const float *__restrict__ grad, u64 len, float lr, float weight_decay,
       float grad_scale) {
    const Factors factors = {lr, 0.0f, weight_decay, grad_scale, false, false};
    for_each_pack<kPack<float>>(len, is_aligned(param, grad), Step{param, grad, factors});
}

KERNEL(sgd_step_with_momentum, float *__restrict__ param, float *__restrict__ buffer, const float *__restrict__ grad,
       u64 len, float lr, float momentum, float weight_decay, float grad_scale, u32 is_nesterov, u32 is_first) {
    const Factors factors = {lr, momentum, weight_decay, grad_scale, is_nesterov != 0, is_first != 0};
    const bool aligned = is_aligned(param, buffer, grad);
    for_each_pack<kPack<float>>(len, aligned, StepWithMomentum{param, buffer, grad, factors});
}
