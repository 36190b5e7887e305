// One step of Lion on flat tensors (`src/ops/lion`).

#include "common.cuh"

namespace {

// The constants of a step, as `Factors` in `src/ops/lion/mod.rs`.
struct Factors {
    float grad_scale, one_minus_beta1, one_minus_beta2, lr, decay;
};

// 1, −1 or 0, and NaN for NaN.
__device__ __forceinline__ float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }

__device__ __forceinline__ void update(float &param, float grad, float &exp_avg, const Factors &f) {
    const float g = grad * f.grad_scale;
    const float direction = fmaf(f.one_minus_beta1, g - exp_avg, exp_avg);
    const float kept = fmaf(-f.decay, param, param);
    param = fmaf(-f.lr, sign(direction), kept);
    exp_avg = fmaf(f.one_minus_beta2, g - exp_avg, exp_avg);
}

struct Step {
    float *param, *exp_avg;
    const float *grad;
    Factors factors;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        auto p = load<N>(param + i), m = load<N>(exp_avg + i);
        const auto g = load<N>(grad + i);
        for (int k = 0; k < N; ++k) update(p.at[k], g.at[k], m.at[k], factors);
        store(param + i, p);
        store(exp_avg + i, m);
    }
};

}  // namespace

KERNEL(lion_step, float *__restrict__ param, float *__restrict__ exp_avg, const float *__restrict__ grad, u64 len,
       float grad_scale, float one_minus_beta1, float one_minus_beta2, float lr, float decay) {
    const Factors factors = {grad_scale, one_minus_beta1, one_minus_beta2, lr, decay};
    const bool aligned = is_aligned(param, exp_avg, grad);
    for_each_pack<kPack<float>>(len, aligned, Step{param, exp_avg, grad, factors});
}
