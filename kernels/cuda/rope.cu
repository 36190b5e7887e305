// Rotary position embedding (`src/rope`).

#include "common.cuh"

namespace {

// The pairs of each head that rotate: elements `pairs` apart, or neighbors.
struct Heads {
    u32 count, head_dim, pairs;
};

// Pairs i to i + N of a head, whose first elements are `a` and second ones `b`.
template <int N, bool kNeighbors> struct Pairs {
    Pack<float, N> a, b;

    template <typename T> __device__ __forceinline__ static Pairs read(const T *head, u32 i, u32 pairs) {
        Pairs x;
        if constexpr (!kNeighbors) {
            x.a = load<N>(head + i), x.b = load<N>(head + pairs + i);
        } else if constexpr (N == 1) {
            x.a = load<1>(head + 2 * i), x.b = load<1>(head + 2 * i + 1);
        } else {
            const auto both = load<2 * N>(head + 2 * i);
            for (int k = 0; k < N; ++k) x.a.at[k] = both.at[2 * k], x.b.at[k] = both.at[2 * k + 1];
        }
        return x;
    }

    template <typename T> __device__ __forceinline__ void write(T *head, u32 i, u32 pairs) const {
        if constexpr (!kNeighbors) {
            store(head + i, a), store(head + pairs + i, b);
        } else if constexpr (N == 1) {
            store(head + 2 * i, a), store(head + 2 * i + 1, b);
        } else {
            Pack<float, 2 * N> both;
            for (int k = 0; k < N; ++k) both.at[2 * k] = a.at[k], both.at[2 * k + 1] = b.at[k];
            store(head + 2 * i, both);
        }
    }
};

// Rotates N adjacent pairs at a time by the token's angles; `sign` −1 rotates backwards. A block has
// `tokens_per_block` tokens.
template <int N, bool kNeighbors, typename T>
__device__ __forceinline__ void rotate(T *x, const float *cos, const float *sin, u64 tokens, u32 tokens_per_block,
                                       Heads heads, float sign) {
    const u64 first = static_cast<u64>(blockIdx.x) * tokens_per_block;
    const u32 tokens_here = tokens - first < tokens_per_block ? tokens - first : tokens_per_block;
    const u32 packs_per_head = heads.pairs / N, packs_per_token = heads.count * packs_per_head;
    for (u32 pack = threadIdx.x; pack < tokens_here * packs_per_token; pack += blockDim.x) {
        const u64 token = first + pack / packs_per_token;
        const u32 head = pack % packs_per_token / packs_per_head, i = pack % packs_per_head * N;
        T *elements = x + (token * heads.count + head) * heads.head_dim;
        const auto pairs = Pairs<N, kNeighbors>::read(elements, i, heads.pairs);
        const auto c = load<N>(cos + token * heads.pairs + i), s = load<N>(sin + token * heads.pairs + i);
        Pairs<N, kNeighbors> turned;
        for (int k = 0; k < N; ++k) {
            const float sine = s.at[k] * sign;
            turned.a.at[k] = pairs.a.at[k] * c.at[k] - pairs.b.at[k] * sine;
            turned.b.at[k] = pairs.b.at[k] * c.at[k] + pairs.a.at[k] * sine;
        }
        turned.write(elements, i, heads.pairs);
    }
}

template <typename T>
__device__ __forceinline__ void apply(T *x, const float *cos, const float *sin, u64 tokens, u32 tokens_per_block,
                                      Heads heads, bool interleaved, float sign) {
    // The tables' rows are aligned if the pairs are; those of neighbors are half as many per access.
    const bool aligned = heads.pairs % kPack<T> == 0 && heads.head_dim % kPack<T> == 0 && is_aligned(x) &&
                         is_aligned(cos, sin);
    if (interleaved && aligned) {
        rotate<kPack<T> / 2, true>(x, cos, sin, tokens, tokens_per_block, heads, sign);
    } else if (interleaved) {
        rotate<1, true>(x, cos, sin, tokens, tokens_per_block, heads, sign);
    } else if (aligned) {
        rotate<kPack<T>, false>(x, cos, sin, tokens, tokens_per_block, heads, sign);
    } else {
        rotate<1, false>(x, cos, sin, tokens, tokens_per_block, heads, sign);
    }
}

}  // namespace

#define INSTANTIATE(T, suffix)                                                                               \
    KERNEL(rope_apply_##suffix, T *x, const float *__restrict__ cos, const float *__restrict__ sin,          \
           u64 tokens, u32 tokens_per_block, u32 heads, u32 head_dim, u32 pairs, u32 interleaved,            \
           float sign) {                                                                                     \
        apply(x, cos, sin, tokens, tokens_per_block, {heads, head_dim, pairs}, interleaved != 0, sign);      \
    }
FOR_EACH_FLOAT(INSTANTIATE)
