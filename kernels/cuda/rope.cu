// Rotary position embedding (`src/rope`).

#include "common.cuh"

namespace {

// Rotates N adjacent pairs (x[i], x[i + half]) by the token's angles i; `sign` −1 rotates backwards. A block
// has `tokens_per_block` tokens.
template <int N, typename T>
__device__ __forceinline__ void rotate(T *x, const float *cos, const float *sin, u64 tokens, u32 tokens_per_block,
                                       u32 heads, u32 half, float sign) {
    const u64 first = static_cast<u64>(blockIdx.x) * tokens_per_block;
    const u32 tokens_here = tokens - first < tokens_per_block ? tokens - first : tokens_per_block;
    const u32 packs_per_head = half / N, packs_per_token = heads * packs_per_head;
    for (u32 pack = threadIdx.x; pack < tokens_here * packs_per_token; pack += blockDim.x) {
        const u64 token = first + pack / packs_per_token;
        const u32 head = pack % packs_per_token / packs_per_head, i = pack % packs_per_head * N;
        T *pair = x + (token * heads + head) * 2 * half + i;
        const auto a = load<N>(pair), b = load<N>(pair + half);
        const auto c = load<N>(cos + token * half + i), s = load<N>(sin + token * half + i);
        Pack<float, N> turned_a, turned_b;
        for (int k = 0; k < N; ++k) {
            const float sine = s.at[k] * sign;
            turned_a.at[k] = a.at[k] * c.at[k] - b.at[k] * sine;
            turned_b.at[k] = b.at[k] * c.at[k] + a.at[k] * sine;
        }
        store(pair, turned_a);
        store(pair + half, turned_b);
    }
}

template <typename T>
__device__ __forceinline__ void apply(T *x, const float *cos, const float *sin, u64 tokens, u32 tokens_per_block,
                                      u32 heads, u32 half, float sign) {
    if (half % kPack<T> == 0 && is_aligned(x) && is_aligned(cos, sin)) {
        rotate<kPack<T>>(x, cos, sin, tokens, tokens_per_block, heads, half, sign);
    } else {
        rotate<1>(x, cos, sin, tokens, tokens_per_block, heads, half, sign);
    }
}

}  // namespace

#define INSTANTIATE(T, suffix)                                                                               \
    KERNEL(rope_apply_##suffix, T *x, const float *__restrict__ cos, const float *__restrict__ sin,          \
           u64 tokens, u32 tokens_per_block, u32 heads, u32 half, float sign) {                              \
        apply(x, cos, sin, tokens, tokens_per_block, heads, half, sign);                                     \
    }
FOR_EACH_FLOAT(INSTANTIATE)
