// One step of Adam or AdamW on flat tensors (`src/ops/adamw`).

#include "common.cuh"

namespace {

// The constants of a step, as `Factors` in `src/ops/adamw/mod.rs`.
struct Factors {
    float grad_scale, coupled_decay, decoupled_decay, one_minus_beta1, beta2, one_minus_beta2, step_size, root_scale,
        eps;
};

__device__ __forceinline__ void update(float &param, float grad, float &exp_avg, float &exp_avg_sq,
                                       const Factors &f) {
    const float g = fmaf(f.coupled_decay, param, grad * f.grad_scale);
    exp_avg = fmaf(f.one_minus_beta1, g - exp_avg, exp_avg);
    exp_avg_sq = fmaf(f.one_minus_beta2 * g, g, f.beta2 * exp_avg_sq);
    const float denominator = fmaf(sqrtf(exp_avg_sq), f.root_scale, f.eps);
    const float kept = fmaf(-f.decoupled_decay, param, param);
    param = fmaf(-f.step_size, exp_avg / denominator, kept);
}

struct Step {
    float *param, *exp_avg, *exp_avg_sq;
    const float *grad;
    Factors factors;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        auto p = load<N>(param + i), m = load<N>(exp_avg + i), v = load<N>(exp_avg_sq + i);
        const auto g = load<N>(grad + i);
        for (int k = 0; k < N; ++k) update(p.at[k], g.at[k], m.at[k], v.at[k], factors);
        store(param + i, p);
        store(exp_avg + i, m);
        store(exp_avg_sq + i, v);
    }
};

}  // namespace

KERNEL(adamw_step, float *__restrict__ param, float *__restrict__ exp_avg, float *__restrict__ exp_avg_sq,
       const float *__restrict__ grad, u64 len, float grad_scale, float coupled_decay, float decoupled_decay,
       float one_minus_beta1, float beta2, float one_minus_beta2, float step_size, float root_scale, float eps) {
    const Factors factors = {grad_scale,      coupled_decay, decoupled_decay, one_minus_beta1, beta2,
                             one_minus_beta2, step_size,     root_scale,      eps};
    const bool aligned = is_aligned(param, exp_avg, exp_avg_sq, grad);
    for_each_pack<kPack<float>>(len, aligned, Step{param, exp_avg, exp_avg_sq, grad, factors});
}
