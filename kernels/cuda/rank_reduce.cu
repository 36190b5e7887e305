// Sums, averages, products, maxima and minima over ranks, in rank order (`src/rank_reduce`).

#include "common.cuh"

namespace {

constexpr u32 kMaxRanks = 256;

// Passed by value: the address of every rank's elements.
struct Ranks {
    u64 sources[kMaxRanks];
    u32 count;
    // 0: sum, 1: maximum, 2: minimum, 3: average, 4: product.
    u32 op;
};

// What follows the last rank.
struct Unchanged {
    template <typename W> __device__ __forceinline__ W finish(W all, u32) const { return all; }
};

struct RankSum : Unchanged {
    template <typename W> __device__ __forceinline__ W operator()(W a, W b) const { return plus(a, b); }
};
struct RankAverage {
    template <typename W> __device__ __forceinline__ W operator()(W a, W b) const { return plus(a, b); }
    template <typename W> __device__ __forceinline__ W finish(W all, u32 ranks) const {
        return static_cast<W>(all / static_cast<W>(ranks));
    }
};
struct RankProduct : Unchanged {
    template <typename W> __device__ __forceinline__ W operator()(W a, W b) const { return static_cast<W>(a * b); }
};

// A NaN on either side wins, so that it cannot hide.
struct RankMax : Unchanged {
    template <typename W> __device__ __forceinline__ W operator()(W a, W b) const {
        return a > b || !(a == a) ? a : b;
    }
};
struct RankMin : Unchanged {
    template <typename W> __device__ __forceinline__ W operator()(W a, W b) const {
        return a < b || !(a == a) ? a : b;
    }
};

// Element or pack `index`: ((x₀ ∘ x₁) ∘ x₂) …, rounded once.
template <typename T, int N, typename Op>
__device__ __forceinline__ void reduce_pack(T *target, const Ranks &ranks, u64 index) {
    const Op combine;
    typename Wide<T>::type sums[N];
    const auto read = [&](u32 rank) { return reinterpret_cast<const Pack<T, N> *>(ranks.sources[rank])[index]; };
    const Pack<T, N> first = read(0);
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] = Wide<T>::of(first.at[i]);
#pragma unroll 4
    for (u32 rank = 1; rank < ranks.count; ++rank) {
        const Pack<T, N> next = read(rank);
#pragma unroll
        for (int i = 0; i < N; ++i) sums[i] = combine(sums[i], Wide<T>::of(next.at[i]));
    }
    Pack<T, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) result.at[i] = Wide<T>::round(combine.finish(sums[i], ranks.count));
    reinterpret_cast<Pack<T, N> *>(target)[index] = result;
}

// One thread per pack of 16 bytes, then one per remaining element.
template <typename T, typename Op>
__device__ __forceinline__ void reduce(T *target, const Ranks &ranks, u64 packs, u64 elements) {
    const u64 thread = global_thread();
    if (thread < packs) {
        reduce_pack<T, kPack<T>, Op>(target, ranks, thread);
        return;
    }
    const u64 element = packs * kPack<T> + (thread - packs);
    if (element < elements) reduce_pack<T, 1, Op>(target, ranks, element);
}

template <typename T> __device__ __forceinline__ void dispatch(T *target, const Ranks &ranks, u64 packs, u64 elements) {
    if (ranks.op == 0) {
        reduce<T, RankSum>(target, ranks, packs, elements);
    } else if (ranks.op == 1) {
        reduce<T, RankMax>(target, ranks, packs, elements);
    } else if (ranks.op == 2) {
        reduce<T, RankMin>(target, ranks, packs, elements);
    } else if (ranks.op == 3) {
        reduce<T, RankAverage>(target, ranks, packs, elements);
    } else {
        reduce<T, RankProduct>(target, ranks, packs, elements);
    }
}

}  // namespace

#define INSTANTIATE(T, suffix)                                                                  \
    KERNEL(rank_reduce_##suffix, T *target, BY_VALUE(Ranks) ranks, u64 packs, u64 elements) {   \
        dispatch<T>(target, ranks, packs, elements);                                            \
    }
FOR_EACH_ELEMENT(INSTANTIATE)
