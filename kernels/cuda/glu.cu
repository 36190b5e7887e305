// Gated linear units, forward and backward (`src/glu`).

#include "common.cuh"

namespace {

// Uses the hardware's reciprocal, 1 ulp from the exact one, without a branch, so that the loads of one pack
// need not wait for the sigmoids of another.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// An activation, with its derivative.
struct Curve {
    float value, slope;
};

// g · σ(z), with the derivative σ + g · σ · (1 − σ) · z′.
__device__ __forceinline__ Curve gated(float g, float z, float slope) {
    const float s = sigmoid(z);
    const float value = g * s;
    return {value, value * slope * (1.0f - s) + s};
}

// silu(g) = g · σ(g)
struct Silu {
    static __device__ __forceinline__ Curve at(float g) { return gated(g, g, 1.0f); }
};

// gelu(g) ≈ g · (1 + tanh(√(2/π) · (g + 0.044715 g³))) / 2, with (1 + tanh(x)) / 2 = σ(2x). Beyond 12 the sigmoid is 0
// or 1 in f32; a cube could overflow.
struct GeluTanh {
    static __device__ __forceinline__ Curve at(float g) {
        constexpr float kSlope = 1.5957691f, kCubic = 0.044715f;
        const float c = fminf(fmaxf(g, -12.0f), 12.0f);
        return gated(g, kSlope * c * (kCubic * c * c + 1.0f), kSlope * (3.0f * kCubic * c * c + 1.0f));
    }
};

// gelu(g) = g · Φ(g), with the derivative Φ + g · φ and the normal distribution's Φ and φ.
struct Gelu {
    static __device__ __forceinline__ Curve at(float g) {
        const float cumulative = 0.5f * erff(0.70710678f * g) + 0.5f;
        const float density = 0.39894228f * expf(-0.5f * g * g);
        return {g * cumulative, g * density + cumulative};
    }
};

struct SquaredRelu {
    static __device__ __forceinline__ Curve at(float g) {
        const float positive = fmaxf(g, 0.0f);
        return {positive * positive, 2.0f * positive};
    }
};

struct Sigmoid {
    static __device__ __forceinline__ Curve at(float g) {
        const float s = sigmoid(g);
        return {s, s * sigmoid(-g)};
    }
};

struct Identity {
    static __device__ __forceinline__ Curve at(float g) { return {g, 1.0f}; }
};

// y = activation(gate) · up
template <typename T, typename Activation> struct Forward {
    T *y;
    const T *gate, *up;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        const auto g = load<N>(gate + i), u = load<N>(up + i);
        Pack<float, N> product;
        for (int k = 0; k < N; ++k) product.at[k] = Activation::at(g.at[k]).value * u.at[k];
        store(y + i, product);
    }
};

// dup = dy · activation(gate), dgate = dy · up · activation′(gate)
template <typename T, typename Activation> struct Backward {
    T *dgate, *dup;
    const T *dy, *gate, *up;

    template <int N> __device__ __forceinline__ void at(u64 i) const {
        const auto d = load<N>(dy + i), g = load<N>(gate + i), u = load<N>(up + i);
        Pack<float, N> of_gate, of_up;
        for (int k = 0; k < N; ++k) {
            const Curve curve = Activation::at(g.at[k]);
            of_up.at[k] = d.at[k] * curve.value;
            of_gate.at[k] = d.at[k] * u.at[k] * curve.slope;
        }
        store(dgate + i, of_gate);
        store(dup + i, of_up);
    }
};

}  // namespace

#define INSTANTIATE_ONE(name, Activation, T, suffix)                                                          \
    KERNEL(name##_forward_##suffix, T *__restrict__ y, const T *__restrict__ gate, const T *__restrict__ up,  \
           u64 size) {                                                                                        \
        for_each_pack<kPack<T>>(size, is_aligned(y, gate, up), Forward<T, Activation>{y, gate, up});          \
    }                                                                                                         \
    KERNEL(name##_backward_##suffix, T *__restrict__ dgate, T *__restrict__ dup, const T *__restrict__ dy,    \
           const T *__restrict__ gate, const T *__restrict__ up, u64 size) {                                  \
        const Backward<T, Activation> body = {dgate, dup, dy, gate, up};                                      \
        for_each_pack<kPack<T>>(size, is_aligned(dgate, dup, dy, gate, up), body);                            \
    }
#define INSTANTIATE(T, suffix)                                                                                \
    INSTANTIATE_ONE(swiglu, Silu, T, suffix)                                                                  \
    INSTANTIATE_ONE(geglu, GeluTanh, T, suffix)                                                               \
    INSTANTIATE_ONE(gelu, Gelu, T, suffix)                                                                    \
    INSTANTIATE_ONE(relu2, SquaredRelu, T, suffix)                                                            \
    INSTANTIATE_ONE(glu, Sigmoid, T, suffix)                                                                  \
    INSTANTIATE_ONE(bilinear, Identity, T, suffix)
FOR_EACH_FLOAT(INSTANTIATE)
