// Conversion between element types (`src/cast`).

#include "common.cuh"

namespace {

// target = source, rounded to nearest even.
template <typename T, typename S> struct Cast {
    T *target;
    const S *source;

    template <int N> __device__ __forceinline__ void at(u64 i) const { store(target + i, load<N>(source + i)); }
};

template <typename T, typename S> __device__ __forceinline__ void cast(T *target, const S *source, u64 size) {
    constexpr int kWidth = kPack<T> < kPack<S> ? kPack<T> : kPack<S>;  // packs of the wider type
    for_each_pack<kWidth>(size, is_aligned(target) && is_aligned(source), Cast<T, S>{target, source});
}

}  // namespace

#define INSTANTIATE_PAIR(S, T, name) \
    KERNEL(name, T *__restrict__ target, const S *__restrict__ source, u64 size) { cast(target, source, size); }
#define INSTANTIATE(S, suffix)                            \
    INSTANTIATE_PAIR(S, float, cast_##suffix##_to_f32)    \
    INSTANTIATE_PAIR(S, bf16, cast_##suffix##_to_bf16)    \
    INSTANTIATE_PAIR(S, f16, cast_##suffix##_to_f16)
FOR_EACH_FLOAT(INSTANTIATE)
