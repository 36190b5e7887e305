// The short convolution along the tokens of a document, forward and backward (`src/causal_conv`).

#include "common.cuh"

namespace {

// `MAX_WIDTH` and `TOKENS` of `src/causal_conv`: the taps of a filter, and the tokens of a block, of which a thread has one channel.
constexpr u32 kTaps = 8, kTokens = 128;

// The filter of a thread's channel, tap 0 for the current token, and the inputs that it reads at a token.
struct Window {
    float taps[kTaps], inputs[kTaps], bias;
    u32 width;

    template <typename T>
    __device__ __forceinline__ Window(const T *weight, const T *bias_of, const T *x, u64 token, u32 channel, u32 channels, u32 size)
        : bias(bias_of != nullptr ? widen(bias_of[channel]) : 0.0f), width(size) {
#pragma unroll
        for (u32 tap = 0; tap < kTaps; ++tap) {
            taps[tap] = tap < width ? widen(weight[channel * width + width - 1 - tap]) : 0.0f;
            inputs[tap] = tap < token ? widen(x[(token - 1 - tap) * channels + channel]) : 0.0f;
        }
    }

    // Moves on by one token.
    __device__ __forceinline__ void push(float input) {
#pragma unroll
        for (u32 tap = kTaps - 1; tap > 0; --tap) inputs[tap] = inputs[tap - 1];
        inputs[0] = input;
    }

    // Whether a tap reads a token of the document, with so many of its tokens before the current one.
    __device__ __forceinline__ bool reads(u32 tap, u32 before) const { return tap < width && tap <= before; }

    __device__ __forceinline__ float sum(u32 before) const {
        float sum = bias;
#pragma unroll
        for (u32 tap = 0; tap < kTaps; ++tap) {
            if (reads(tap, before)) sum += taps[tap] * inputs[tap];
        }
        return sum;
    }
};

__device__ __forceinline__ u32 channel_of_thread() { return blockIdx.y * kThreads + threadIdx.x; }

// `before` has for each token the number of its document's tokens before it.
template <typename T>
__device__ __forceinline__ void forward(T *y, const T *x, const T *weight, const T *bias, const u32 *before, u64 tokens,
                                        u32 channels, u32 width, u32 silu) {
    const u32 channel = channel_of_thread();
    if (channel >= channels) return;
    const u64 begin = static_cast<u64>(blockIdx.x) * kTokens, end = begin + kTokens < tokens ? begin + kTokens : tokens;
    Window window(weight, bias, x, begin, channel, channels, width);
#pragma unroll 4
    for (u64 token = begin; token < end; ++token) {
        window.push(widen(x[token * channels + channel]));
        const float sum = window.sum(before[token]);
        y[token * channels + channel] = round_to<T>(silu ? sum / (1.0f + expf(-sum)) : sum);
    }
}

// dx, and the sums of the block's tokens for the gradients of the weight `[channels, width]` and then of the bias `[channels]`.
// An input's gradient is complete once the last token that reads it has been seen, `kTaps` − 1 tokens later.
template <typename T>
__device__ __forceinline__ void backward(T *dx, float *partial, const T *dy, const T *x, const T *weight, const T *bias,
                                         const u32 *before, u64 tokens, u32 channels, u32 width, u32 silu) {
    const u32 channel = channel_of_thread();
    if (channel >= channels) return;
    const u64 begin = static_cast<u64>(blockIdx.x) * kTokens, end = begin + kTokens < tokens ? begin + kTokens : tokens;
    Window window(weight, bias, x, begin, channel, channels, width);
    float dtaps[kTaps] = {}, dbias = 0.0f, dinputs[kTaps] = {};
    for (u64 token = begin; token < end + kTaps - 1; ++token) {
#pragma unroll
        for (u32 tap = kTaps - 1; tap > 0; --tap) dinputs[tap] = dinputs[tap - 1];
        dinputs[0] = 0.0f;
        if (token < tokens) {
            window.push(widen(x[token * channels + channel]));
            const u32 reach = before[token];
            float dsum = widen(dy[token * channels + channel]);
            if (silu) {
                const float sum = window.sum(reach), sigmoid = 1.0f / (1.0f + expf(-sum));
                dsum *= sigmoid * (sum * (1.0f - sigmoid) + 1.0f);
            }
#pragma unroll
            for (u32 tap = 0; tap < kTaps; ++tap) {
                if (!window.reads(tap, reach)) continue;
                dinputs[tap] += window.taps[tap] * dsum;
                if (token < end) dtaps[tap] += window.inputs[tap] * dsum;
            }
            if (token < end) dbias += dsum;
        }
        if (token >= begin + kTaps - 1) dx[(token - (kTaps - 1)) * channels + channel] = round_to<T>(dinputs[kTaps - 1]);
    }
    partial += static_cast<u64>(blockIdx.x) * (width + 1) * channels;
#pragma unroll
    for (u32 tap = 0; tap < kTaps; ++tap) {
        if (tap < width) partial[channel * width + width - 1 - tap] = dtaps[tap];
    }
    partial[channels * width + channel] = dbias;
}

}  // namespace

#define INSTANTIATE(T, suffix)                                                                                  \
    KERNEL(causal_conv_forward_##suffix, T *__restrict__ y, const T *__restrict__ x,                            \
           const T *__restrict__ weight, const T *bias, const u32 *__restrict__ before, u64 tokens,             \
           u32 channels, u32 width, u32 silu) {                                                                 \
        forward(y, x, weight, bias, before, tokens, channels, width, silu);                                     \
    }                                                                                                           \
    KERNEL(causal_conv_backward_##suffix, T *__restrict__ dx, float *__restrict__ partial,                      \
           const T *__restrict__ dy, const T *__restrict__ x, const T *__restrict__ weight, const T *bias,      \
           const u32 *__restrict__ before, u64 tokens, u32 channels, u32 width, u32 silu) {                     \
        backward(dx, partial, dy, x, weight, bias, before, tokens, channels, width, silu);                      \
    }
FOR_EACH_FLOAT(INSTANTIATE)
