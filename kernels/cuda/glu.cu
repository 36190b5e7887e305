// Gated linear units, forward and backward (`src/glu`).

#include "common.cuh"

namespace {

// Uses the hardware's reciprocal, 1 ulp from the exact one, without a branch, so that the loads of one pack
// need not wait for the sigmoids of another.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// The activation is g · σ(z), and this is z with its derivative.
struct Curve {
    float z, slope;
};

// silu(g) = g · σ(g)
struct Silu {
    static __device__ __forceinline__ Curve at(float g) { return {g, 1.0f}; }
};

// gelu(g) ≈ g · (1 + tanh(√(2/π) · (g + 0.044715 g³))) / 2, with (1 + tanh(x)) / 2 = σ(2x). Beyond 12 the sigmoid is 0
// or 1 in f32; a cube could overflow.
struct GeluTanh {
    static __device__ __forceinline__ Curve at(float g) {
        constexpr float kSlope = 1.5957691f, kCubic = 0.044715f;
        g = fminf(fmaxf(g, -12.0f), 12.0f);
        return {kSlope * g * (kCubic * g * g + 1.0f), kSlope * (3.0f * kCubic * g * g + 1.0f)};
    }
};

// y = activation(gate) · up
template <typename T, typename Activation> struct Forward {
    T *y;
    const T *gate, *up;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        const auto g = load<N>(gate + i), u = load<N>(up + i);
        Pack<float, N> product;
        for (int k = 0; k < N; ++k) product.at[k] = g.at[k] * sigmoid(Activation::at(g.at[k]).z) * u.at[k];
        store(y + i, product);
    }
};

// dup = dy · activation(gate), dgate = dy · up · (σ + g · σ · (1 − σ) · z′)
template <typename T, typename Activation> struct Backward {
    T *dgate, *dup;
    const T *dy, *gate, *up;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        const auto d = load<N>(dy + i), g = load<N>(gate + i), u = load<N>(up + i);
        Pack<float, N> of_gate, of_up;
        for (int k = 0; k < N; ++k) {
            const Curve curve = Activation::at(g.at[k]);
            const float s = sigmoid(curve.z);
            const float activated = g.at[k] * s;
            of_up.at[k] = d.at[k] * activated;
            of_gate.at[k] = d.at[k] * u.at[k] * (activated * curve.slope * (1.0f - s) + s);
        }
        store(dgate + i, of_gate);
        store(dup + i, of_up);
    }
};

}  // namespace

#define INSTANTIATE(T, suffix)                                                                                \
    KERNEL(swiglu_forward_##suffix, T *__restrict__ y, const T *__restrict__ gate, const T *__restrict__ up,  \
           u64 size) {                                                                                        \
        for_each_pack<kPack<T>>(size, is_aligned(y, gate, up), Forward<T, Silu>{y, gate, up});                \
    }                                                                                                         \
    KERNEL(swiglu_backward_##suffix, T *__restrict__ dgate, T *__restrict__ dup, const T *__restrict__ dy,    \
           const T *__restrict__ gate, const T *__restrict__ up, u64 size) {                                  \
        const Backward<T, Silu> body = {dgate, dup, dy, gate, up};                                            \
        for_each_pack<kPack<T>>(size, is_aligned(dgate, dup, dy, gate, up), body);                            \
    }                                                                                                         \
    KERNEL(geglu_forward_##suffix, T *__restrict__ y, const T *__restrict__ gate, const T *__restrict__ up,   \
           u64 size) {                                                                                        \
        for_each_pack<kPack<T>>(size, is_aligned(y, gate, up), Forward<T, GeluTanh>{y, gate, up});            \
    }                                                                                                         \
    KERNEL(geglu_backward_##suffix, T *__restrict__ dgate, T *__restrict__ dup, const T *__restrict__ dy,     \
           const T *__restrict__ gate, const T *__restrict__ up, u64 size) {                                  \
        const Backward<T, GeluTanh> body = {dgate, dup, dy, gate, up};                                        \
        for_each_pack<kPack<T>>(size, is_aligned(dgate, dup, dy, gate, up), body);                            \
    }
FOR_EACH_FLOAT(INSTANTIATE)
