// SwiGLU, forward and backward (`src/swiglu`).

#include "common.cuh"

namespace {

// Uses the hardware's reciprocal, 1 ulp from the exact one, without a branch, so that the loads of one pack
// need not wait for the sigmoids of another.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// y = gate · σ(gate) · up
template <typename T> struct Forward {
    T *y;
    const T *gate, *up;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        const auto g = load<N>(gate + i), u = load<N>(up + i);
        Pack<float, N> product;
        for (int k = 0; k < N; ++k) product.at[k] = g.at[k] * sigmoid(g.at[k]) * u.at[k];
        store(y + i, product);
    }
};

// dup = dy · silu(gate), dgate = dy · up · silu′(gate) with silu′(g) = σ + g · σ · (1 − σ)
template <typename T> struct Backward {
    T *dgate, *dup;
    const T *dy, *gate, *up;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        const auto d = load<N>(dy + i), g = load<N>(gate + i), u = load<N>(up + i);
        Pack<float, N> of_gate, of_up;
        for (int k = 0; k < N; ++k) {
            const float s = sigmoid(g.at[k]);
            const float silu = g.at[k] * s;
            of_up.at[k] = d.at[k] * silu;
            of_gate.at[k] = d.at[k] * u.at[k] * (silu * (1.0f - s) + s);
        }
        store(dgate + i, of_gate);
        store(dup + i, of_up);
    }
};

}  // namespace

#define INSTANTIATE(T, suffix)                                                                                \
    KERNEL(swiglu_forward_##suffix, T *__restrict__ y, const T *__restrict__ gate, const T *__restrict__ up,  \
           u64 size) {                                                                                        \
        for_each_pack<kPack<T>>(size, is_aligned(y, gate, up), Forward<T>{y, gate, up});                      \
    }                                                                                                         \
    KERNEL(swiglu_backward_##suffix, T *__restrict__ dgate, T *__restrict__ dup, const T *__restrict__ dy,    \
           const T *__restrict__ gate, const T *__restrict__ up, u64 size) {                                  \
        const Backward<T> body = {dgate, dup, dy, gate, up};                                                  \
        for_each_pack<kPack<T>>(size, is_aligned(dgate, dup, dy, gate, up), body);                            \
    }
FOR_EACH_FLOAT(INSTANTIATE)
