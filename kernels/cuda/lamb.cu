// The two halves of a LAMB step on flat tensors (`src/optimizer/lamb`). A block processes a chunk of a
// parameter tensor: the elements from chunks[2 · block] up to chunks[2 · block + 1].

#include "common.cuh"

namespace {

// The constants of a step, as `Factors` in `src/optimizer/lamb/mod.rs`.
struct Factors {
    float grad_scale, one_minus_beta1, beta2, one_minus_beta2, mean_scale, root_scale, eps, weight_decay;
};

// Σ p² and Σ u².
struct SquaredNorms {
    float param, direction;
};

// Turns a gradient into the direction and adds to the norms.
__device__ __forceinline__ void update(float param, float &grad, float &exp_avg, float &exp_avg_sq, const Factors &f,
                                       SquaredNorms &norms) {
    const float g = grad * f.grad_scale;
    exp_avg = fmaf(f.one_minus_beta1, g - exp_avg, exp_avg);
    exp_avg_sq = fmaf(f.one_minus_beta2 * g, g, f.beta2 * exp_avg_sq);
    const float denominator = fmaf(sqrtf(exp_avg_sq), f.root_scale, f.eps);
    grad = fmaf(f.weight_decay, param, exp_avg * f.mean_scale / denominator);
    norms.param = fmaf(param, param, norms.param);
    norms.direction = fmaf(grad, grad, norms.direction);
}

// Calls `vector(i)` for every four elements from a multiple of 4 on within the block's chunk, if vectors are
// possible, and `element(i)` for all others.
template <typename Vector, typename Element>
__device__ __forceinline__ void for_chunk(const i64 *chunks, bool fits_vectors, Vector vector, Element element) {
    const i64 begin = chunks[2 * static_cast<u64>(blockIdx.x)];
    const i64 end = chunks[2 * static_cast<u64>(blockIdx.x) + 1];
    for (i64 at = begin / 4 * 4 + threadIdx.x * 4; at < end; at += blockDim.x * 4) {
        if (fits_vectors && at >= begin && at + 4 <= end) {
            vector(at);
        } else {
            for (i64 i = at > begin ? at : begin; i < at + 4 && i < end; ++i) element(i);
        }
    }
}

}  // namespace

// partial[block] = Σ p² and Σ u² of the block's chunk; grad becomes the direction u.
KERNEL(lamb_direction, float *grad, float *exp_avg, float *exp_avg_sq, float *partial, const float *param,
       const i64 *chunks, float grad_scale, float one_minus_beta1, float beta2, float one_minus_beta2,
       float mean_scale, float root_scale, float eps, float weight_decay) {
    SHARED(float, scratch, [kWarp]);
    const Factors f = {grad_scale,      one_minus_beta1, beta2, one_minus_beta2,
                       mean_scale,      root_scale,      eps,   weight_decay};
    SquaredNorms norms = {0.0f, 0.0f};
    const bool fits_vectors =
        is_aligned(grad) && is_aligned(exp_avg) && is_aligned(exp_avg_sq) && is_aligned(param);
    for_chunk(
        chunks, fits_vectors,
        [&](i64 i) {
            auto &grads = *reinterpret_cast<Pack<float, 4> *>(grad + i);
            auto &means = *reinterpret_cast<Pack<float, 4> *>(exp_avg + i);
            auto &squares = *reinterpret_cast<Pack<float, 4> *>(exp_avg_sq + i);
            const auto p = *reinterpret_cast<const Pack<float, 4> *>(param + i);
            auto g = grads, m = means, v = squares;
            for (u32 j = 0; j < 4; ++j) update(p.at[j], g.at[j], m.at[j], v.at[j], f, norms);
            grads = g;
            means = m;
            squares = v;
        },
        [&](i64 i) { update(param[i], grad[i], exp_avg[i], exp_avg_sq[i], f, norms); });
    const float of_param = block_reduce<Sum>(norms.param, scratch);
    const float of_direction = block_reduce<Sum>(norms.direction, scratch);
    if (threadIdx.x == 0) {
        partial[2 * static_cast<u64>(blockIdx.x)] = of_param;
        partial[2 * static_cast<u64>(blockIdx.x) + 1] = of_direction;
    }
}

// p −= step size of the block's chunk · u.
KERNEL(lamb_apply, float *param, const float *direction, const i64 *chunks, const float *step_sizes) {
    const float step_size = step_sizes[blockIdx.x];
    for_chunk(
        chunks, is_aligned(param) && is_aligned(direction),
        [&](i64 i) {
            auto &params = *reinterpret_cast<Pack<float, 4> *>(param + i);
            const auto u = *reinterpret_cast<const Pack<float, 4> *>(direction + i);
            auto p = params;
            for (u32 j = 0; j < 4; ++j) p.at[j] = fmaf(-step_size, u.at[j], p.at[j]);
            params = p;
        },
        [&](i64 i) { param[i] = fmaf(-step_size, direction[i], param[i]); });
}
