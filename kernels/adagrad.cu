// One step of Adagrad on flat tensors (`src/ops/adagrad`).

#include "common.cuh"

namespace {

// The constants of a step, as `Factors` in `src/ops/adagrad/mod.rs`.
struct Factors {
    float grad_scale, weight_decay, step_size, eps;
};

__device__ __forceinline__ void update(float &param, float grad, float &state_sum, const Factors &f) {
    const float g = fmaf(f.weight_decay, param, grad * f.grad_scale);
    state_sum = fmaf(g, g, state_sum);
    param = fmaf(-f.step_size, g / (sqrtf(state_sum) + f.eps), param);
}

struct Step {
    float *param, *state_sum;
    const float *grad;
    Factors factors;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        auto p = load<N>(param + i), s = load<N>(state_sum + i);
        const auto g = load<N>(grad + i);
        for (int k = 0; k < N; ++k) update(p.at[k], g.at[k], s.at[k], factors);
        store(param + i, p);
        store(state_sum + i, s);
    }
};

}  // namespace

KERNEL(adagrad_step, float *__restrict__ param, float *__restrict__ state_sum, const float *__restrict__ grad, u64 len,
       float grad_scale, float weight_decay, float step_size, float eps) {
    const Factors factors = {grad_scale, weight_decay, step_size, eps};
    const bool aligned = is_aligned(param, state_sum, grad);
    for_each_pack<kPack<float>>(len, aligned, Step{param, state_sum, grad, factors});
}
