// Linear attention in chunks: gradients (`src/linear_attention`), once `linear_attention_forward.cu` has computed a segment again.

#include "common.cuh"
#include "linear_attention.cuh"
#include "linear_attention_channels.cuh"

namespace {

// The gradients of γ and of the rates, one per token of a chunk.
struct Sums {
    float *decay, *rate;
};

// One block per chunk and value head: the output's gradient in f32, and its share of the gradients of the updates, Aᵀ dO.
template <typename T>
__device__ __forceinline__ void backward_output(float *gradients, const float *values, const float *keys, const T *dout,
                                                const u32 *v_to_k, const u32 *chunks, const Sizes &sizes) {
    SHARED(float, a, [kChunk * kChunk]);
    const u32 head = blockIdx.y, dim = sizes.value_dim;
    const Chunk chunk = chunk_at(chunks, blockIdx.x);
    const GradientRows<float> gradient(gradients, chunk, head, sizes);
    for (u32 e = threadIdx.x; e < chunk.len * dim; e += kThreads) {
        const u64 token = chunk.token_at(e / dim, sizes);
        gradient.output[e] = widen(dout[(token * sizes.value_heads + head) * dim + e % dim]);
    }
    const KeyRows<const float> key(keys, chunk, v_to_k[head], sizes);
    write_attention(a, key.qk, ValueRows<const float>(values, chunk, head, sizes).decay, chunk.len);
    multiply<4>(gradient.updates, dim, 0.0f, 1.0f, transposed(a, kChunk), matrix(gradient.output, dim),
                {chunk.len, dim, chunk.len});
}

// Adds factors∘terms to a gradient of queries or keys, and its products with their rows to `dots`: one warp per row.
__device__ __forceinline__ void add_terms(float *gradient, float *dots, const float *terms, const float *factors,
                                          const float *rows, u32 len, u32 dim) {
    for (u32 row = threadIdx.x / kWarp; row < len; row += kThreads / kWarp) {
        float dot = 0.0f;
        for (u32 i = row * dim + threadIdx.x % kWarp; i < (row + 1) * dim; i += kWarp) {
            dot += terms[i] * rows[i];
            gradient[i] += factors[row] * terms[i];
        }
        dot = warp_reduce<Sum>(dot);
        if (threadIdx.x % kWarp == 0) dots[row] += factors[row] * dot;
    }
    __syncthreads();
}

// Replaces the gradient of A by that of the products of queries and keys, and by the delta rule the gradient of L by that of the
// products of keys, symmetric. Writes the gradients of γ and of the rates that come from them.
template <Rule kRule>
__device__ __forceinline__ void backward_pairs(float *da, float *dl, const Sums &sums, const float *qk, const float *kk,
                                               const float *decay, const float *rate, u32 len) {
    const u32 i = threadIdx.x;
    float of_decay = 0.0f, of_rate = 0.0f;
    if (i < len) {
        for (u32 j = 0; j < len; ++j) {
            const u32 at = i * kPitch + j;
            if (j < i) {
                const float factor = expf(decay[i] - decay[j]);
                da[at] *= factor;
                float of_pair = da[at] * qk[i * kChunk + j];
                if constexpr (kIsDelta<kRule>) {
                    const float of_kk = dl[at] * factor;
                    dl[at] = rate[i] * of_kk;
                    of_rate += of_kk * kk[i * kChunk + j];
                    of_pair += dl[at] * kk[i * kChunk + j];
                }
                of_decay += of_pair;
            } else {
                if constexpr (kIsDelta<kRule>) dl[at] = 0.0f;
                if (j > i) da[at] = 0.0f;
            }
        }
        sums.rate[i] = of_rate;
    }
    __syncthreads();
    if (i < len) {
        for (u32 row = i + 1; row < len; ++row) {
            const u32 at = row * kPitch + i;
            float of_pair = da[at] * qk[row * kChunk + i];
            if constexpr (kIsDelta<kRule>) {
                of_pair += dl[at] * kk[row * kChunk + i];
                dl[i * kPitch + row] = dl[at];
            }
            of_decay -= of_pair;
        }
        sums.decay[i] = of_decay;
    }
    __syncthreads();
}

// One chunk of a value head, for a block.
template <Rule kRule> struct ValueChunk {
    Chunk chunk;
    KeyRows<const float> key;
    // With decays per channel.
    ChannelRows<const float> channels;
    ValueRows<const float> value;
    GradientRows<const float> gradient;
    const Sizes &sizes;
    // exp(γ), exp(γ_end − γ), and exp(γ) times the rates.
    const float *decays, *decays_to_end, *decayed_rates;

    // The gradients that come from A and L.
    __device__ __forceinline__ void through_pairs(const KeyGradients<kRule> &to, const Sums &sums, float *da, float *dl) const {
        const u32 len = chunk.len, dim = sizes.value_dim, key_dim = sizes.key_dim;
        const Shape pairs = {len, len, dim}, keys = {len, key_dim, len};
        multiply<4>(da, kPitch, 0.0f, 1.0f, matrix(gradient.output, dim), transposed(value.updates, dim), pairs);
        if constexpr (kIsDelta<kRule>) {
            multiply<4>(dl, kPitch, 0.0f, -1.0f, matrix(gradient.updates, dim), transposed(value.updates, dim), pairs);
        }
        backward_pairs<kRule>(da, dl, sums, key.qk, key.kk, value.decay, value.rate, len);
        if constexpr (kHasChannels<kRule>) {
            add_decayed_pairs(to, key, channels.decay, da, dl, len, key_dim);
            return;
        }
        multiply<4>(to.q, key_dim, 1.0f, 1.0f, matrix(da, kPitch), matrix(key.k, key_dim), keys);
        multiply<4>(to.k, key_dim, 1.0f, 1.0f, transposed(da, kPitch), matrix(key.q, key_dim), keys);
        if constexpr (kIsDelta<kRule>) {
            multiply<4>(to.k, key_dim, 1.0f, 1.0f, matrix(dl, kPitch), matrix(key.k, key_dim), keys);
        }
    }

    // The gradients that come from reading the state before the chunk: for the output, and for the errors.
    __device__ __forceinline__ void through_state(const KeyGradients<kRule> &to, const Sums &sums) const {
        const u32 dim = sizes.value_dim, key_dim = sizes.key_dim;
        const Matrix state = transposed(state_before(), dim);
        const Shape shape = {chunk.len, key_dim, dim};
        multiply<4>(to.term, key_dim, 0.0f, 1.0f, matrix(gradient.output, dim), state, shape);
        add_read(to.q, sums, to.term, decays, key.q);
        if constexpr (kIsDelta<kRule>) {
            multiply<4>(to.term, key_dim, 0.0f, -1.0f, matrix(gradient.updates, dim), state, shape);
            add_read(to.k, sums, to.term, decayed_rates, key.k);
        }
    }

    // Adds the gradients of rows that read the state, whose factors are these and exp(γ) of the channels.
    __device__ __forceinline__ void add_read(float *gradient, const Sums &sums, const float *terms, const float *factors,
                                             const float *rows) const {
        if constexpr (kHasChannels<kRule>) {
            add_decayed(gradient, terms, factors, channels.decay, chunk.len, sizes.key_dim);
        } else {
            add_terms(gradient, sums.decay, terms, factors, rows, chunk.len, sizes.key_dim);
        }
    }

    // The gradients that come from the state behind the chunk. `dots` and `scratch` are shared memory of the block.
    __device__ __forceinline__ void through_next_state(const KeyGradients<kRule> &to, const Sums &sums, float *dots,
                                                       float *scratch) const {
        const u32 dim = sizes.value_dim, key_dim = sizes.key_dim, last = chunk.len - 1;
        const u64 state_size = static_cast<u64>(key_dim) * dim;
        const float *dstate = gradient.states + chunk.dstate * state_size;
        for (u32 i = threadIdx.x; i < chunk.len; i += kThreads) dots[i] = 0.0f;
        multiply<4>(to.term, key_dim, 0.0f, 1.0f, matrix(value.updates, dim), transposed(dstate, dim),
                    {chunk.len, key_dim, dim});
        if constexpr (kHasChannels<kRule>) {
            const float *state = chunk.state != kNone ? state_before() : nullptr;
            add_stored(to, key, channels, state, dstate, chunk.len, key_dim, dim);
            return;
        }
        add_terms(to.k, dots, to.term, decays_to_end, key.k, chunk.len, key_dim);
        float product = 0.0f;
        if (chunk.state != kNone) {
            const float *state = state_before();
            for (u64 e = threadIdx.x; e < state_size; e += kThreads) product += state[e] * dstate[e];
        }
        float of_end = decays[last] * block_reduce<Sum>(product, scratch);
        if (threadIdx.x == 0) {
            for (u32 i = 0; i < chunk.len; ++i) {
                of_end += dots[i];
                sums.decay[i] -= dots[i];
            }
            sums.decay[last] += of_end;
        }
        __syncthreads();
    }

    __device__ __forceinline__ const float *state_before() const {
        return value.states + chunk.state * static_cast<u64>(sizes.key_dim) * sizes.value_dim;
    }
};

// The gradients of a value head, on tokens.
template <typename T> struct ValueOutputs {
    T *dv;
    float *dg, *dbeta, *dskip;
};

// The gradients of a value head's values, rates, skip connection and decays. The latter are in all γ from their token to the end of
// the chunk. `skip` is 0 by the delta rule.
template <Rule kRule, typename T>
__device__ __forceinline__ void write_values(const ValueOutputs<T> &to, const ValueChunk<kRule> &at, const Sums &sums, float skip,
                                             u32 head) {
    const Sizes &sizes = at.sizes;
    const u32 dim = sizes.value_dim, lane = threadIdx.x % kWarp;
    for (u32 row = threadIdx.x / kWarp; row < at.chunk.len; row += kThreads / kWarp) {
        const u64 token = at.chunk.token_at(row, sizes) * sizes.value_heads + head;
        float of_rate = 0.0f, of_skip = 0.0f;
        for (u32 i = lane; i < dim; i += kWarp) {
            const float gradient = at.gradient.updates[row * dim + i], error = at.value.errors[row * dim + i];
            float of_value = at.value.rate[row] * gradient;
            of_rate += gradient * error;
            if constexpr (kRule == Rule::sum) {
                const float of_output = at.gradient.output[row * dim + i];
                of_value += skip * of_output;
                of_skip += of_output * error;
            }
            to.dv[token * dim + i] = round_to<T>(of_value);
        }
        of_rate = warp_reduce<Sum>(of_rate);
        if constexpr (kRule == Rule::sum) of_skip = warp_reduce<Sum>(of_skip);
        if (lane != 0) continue;
        to.dbeta[token] = sums.rate[row] + of_rate;
        if (kRule == Rule::sum && to.dskip != nullptr) to.dskip[token] = of_skip;
    }
    if (threadIdx.x == 0 && !kHasChannels<kRule>) {
        float sum = 0.0f;
        for (u32 row = at.chunk.len; row-- > 0;) {
            to.dg[at.chunk.token_at(row, sizes) * sizes.value_heads + head] = sum += sums.decay[row];
        }
    }
    __syncthreads();
}

// Writes the gradients of queries or keys: one warp per row. By the delta rule, passes those of the normalized rows `scale · x / |x|`
// through the normalization.
template <Rule kRule, typename T>
__device__ __forceinline__ void write_keys(T *dx, const float *gradients, const float *rows, const float *inverse_norms,
                                           float scale, const Chunk &chunk, u32 head, const Sizes &sizes) {
    const u32 dim = sizes.key_dim, lane = threadIdx.x % kWarp;
    for (u32 row = threadIdx.x / kWarp; row < chunk.len; row += kThreads / kWarp) {
        const float *x = rows + row * dim, *gradient = gradients + row * dim;
        T *to = dx + (chunk.token_at(row, sizes) * sizes.key_heads + head) * dim;
        if constexpr (kRule == Rule::sum) {
            for (u32 i = lane; i < dim; i += kWarp) to[i] = round_to<T>(gradient[i]);
        } else {
            float dot = 0.0f;
            for (u32 i = lane; i < dim; i += kWarp) dot += x[i] * gradient[i];
            const float along = warp_reduce<Sum>(dot) / scale;
            for (u32 i = lane; i < dim; i += kWarp) {
                to[i] = round_to<T>(inverse_norms[row] * (scale * gradient[i] - along * x[i]));
            }
        }
    }
}

// One block per chunk and key head: all gradients of the chunk, summed over the value heads that use the key head.
template <Rule kRule, typename T>
__device__ __forceinline__ void backward_chunk(T *dq, T *dk, const ValueOutputs<T> &outputs, float *key_gradients,
                                               const float *keys, const float *values, const float *gradients, const T *skip,
                                               const u32 *v_to_k, const u32 *chunks, const Sizes &sizes) {
    SHARED(float, da, [kChunk * kPitch]);
    SHARED(float, dl, [kIsDelta<kRule> ? kChunk * kPitch : 1]);
    SHARED(float, factors, [3][kChunk]);
    SHARED(float, sums_of_tokens, [3][kChunk]);
    SHARED(float, scratch, [kWarp]);
    const u32 key_head = blockIdx.y;
    const Chunk chunk = chunk_at(chunks, blockIdx.x);
    const KeyRows<const float> key(keys, chunk, key_head, sizes);
    const KeyGradients<kRule> to(key_gradients, chunk, key_head, sizes);
    to.clear(chunk.len, sizes.key_dim);
    for (u32 head = 0; head < sizes.value_heads; ++head) {
        if (v_to_k[head] != key_head) continue;
        const ValueChunk<kRule> at = {chunk, key, {keys, chunk, key_head, sizes}, {values, chunk, head, sizes},
                                      {gradients, chunk, head, sizes}, sizes, factors[0], factors[1], factors[2]};
        write_decays(factors[0], factors[1], at.value.decay, chunk.len);
        for (u32 i = threadIdx.x; i < chunk.len; i += kThreads) factors[2][i] = factors[0][i] * at.value.rate[i];
        const Sums sums = {sums_of_tokens[0], sums_of_tokens[1]};
        at.through_pairs(to, sums, da, dl);
        if (chunk.state != kNone) at.through_state(to, sums);
        if (chunk.dstate != kNone) at.through_next_state(to, sums, sums_of_tokens[2], scratch);
        write_values(outputs, at, sums, kRule == Rule::sum ? widen(skip[head]) : 0.0f, head);
    }
    __syncthreads();
    if constexpr (kHasChannels<kRule>) write_channels(outputs.dg, to, key, chunk, key_head, sizes);
    const float scale = 1.0f / sqrtf(static_cast<float>(sizes.key_dim));
    write_keys<kRule>(dq, to.q, key.q, key.q_inverse_norms, scale, chunk, key_head, sizes);
    write_keys<kRule>(dk, to.k, key.k, key.k_inverse_norms, 1.0f, chunk, key_head, sizes);
}

// One block per sequence, value head and `kColumns` columns of the state: the gradients dR of β∘errors over the output's share of
// the gradients of the updates, and the gradients of the states behind chunks, from the last chunk to the first.
template <Rule kRule>
__device__ __forceinline__ void scan_backward(float *gradients, const float *values, const float *keys, const u32 *v_to_k,
                                              const u32 *chunks, const u32 *segments, const Sizes &sizes) {
    SHARED(float, decays, [kChunk]);
    SHARED(float, decays_to_end, [kChunk]);
    SHARED(float, decayed_rates, [kChunk]);
    const u32 head = blockIdx.y, first = blockIdx.z * kColumns;
    const u32 key_dim = sizes.key_dim, dim = sizes.value_dim, width = dim - first < kColumns ? dim - first : kColumns;
    const u64 state_size = static_cast<u64>(key_dim) * dim;
    const Segment segment = segment_at(segments, blockIdx.x);
    for (u32 index = segment.end; index-- > segment.begin;) {
        const Chunk chunk = chunk_at(chunks, index);
        const StateRows key = StateRows::of<kRule>(keys, chunk, v_to_k[head], sizes);
        const ValueRows<const float> value(values, chunk, head, sizes);
        const GradientRows<float> gradient(gradients, chunk, head, sizes);
        float *dstate = gradient.state + first, *dupdates = gradient.updates + first;
        write_decays(decays, decays_to_end, value.decay, chunk.len);
        for (u32 i = threadIdx.x; i < chunk.len; i += kThreads) decayed_rates[i] = decays[i] * value.rate[i];
        for (u32 e = threadIdx.x; e < key_dim * width; e += kThreads) {
            const u32 i = e / width * dim + e % width;
            if (chunk.dstate == kNone) {
                dstate[i] = 0.0f;
            } else {
                gradient.states[chunk.dstate * state_size + first + i] = dstate[i];
            }
        }
        if (chunk.dstate != kNone) {
            multiply<2>(dupdates, dim, 1.0f, 1.0f, matrix(key.stored, key_dim, decays_to_end), matrix(dstate, dim),
                        {chunk.len, width, key_dim});
        }
        if constexpr (kIsDelta<kRule>) {
            multiply<2>(dupdates, dim, 0.0f, 1.0f, transposed(value.inverse, kChunk), matrix(dupdates, dim),
                        {chunk.len, width, chunk.len});
        }
        if (chunk.state == kNone) continue;
        const Shape shape = {key_dim, width, chunk.len};
        const Matrix dout = matrix(gradient.output + first, dim, decays);
        if constexpr (kHasChannels<kRule>) {
            const ChannelRows<const float> channels(keys, chunk, v_to_k[head], sizes);
            __syncthreads();
            decay_state(dstate, channels.end(chunk.len, key_dim), key_dim, width, dim);
        }
        multiply<2>(dstate, dim, decays[chunk.len - 1], 1.0f, transposed(key.q, key_dim), dout, shape);
        if constexpr (kIsDelta<kRule>) {
            multiply<2>(dstate, dim, 1.0f, -1.0f, transposed(key.k, key_dim), matrix(dupdates, dim, decayed_rates), shape);
        }
    }
}

}  // namespace

#define INSTANTIATE_OUTPUT(T, suffix)                                                                           \
    KERNEL(linear_attention_output_backward_##suffix, float *gradients, const float *values, const float *keys, \
           const T *__restrict__ dout, const u32 *__restrict__ v_to_k, const u32 *__restrict__ chunks,          \
           BY_VALUE(Sizes) sizes) {                                                                             \
        backward_output(gradients, values, keys, dout, v_to_k, chunks, sizes);                                  \
    }
FOR_EACH_FLOAT(INSTANTIATE_OUTPUT)

#define INSTANTIATE_SCAN(rule)                                                                               \
    KERNEL(linear_attention_scan_backward_##rule, float *gradients, const float *values, const float *keys,  \
           const u32 *__restrict__ v_to_k, const u32 *__restrict__ chunks, const u32 *__restrict__ segments, \
           BY_VALUE(Sizes) sizes) {                                                                          \
        scan_backward<Rule::rule>(gradients, values, keys, v_to_k, chunks, segments, sizes);                 \
    }
INSTANTIATE_SCAN(delta)
INSTANTIATE_SCAN(channel_delta)
INSTANTIATE_SCAN(sum)

#define INSTANTIATE(rule, T, suffix)                                                                                \
    KERNEL(linear_attention_backward_##rule##_##suffix, T *__restrict__ dq, T *__restrict__ dk, T *__restrict__ dv, \
           float *__restrict__ dg, float *__restrict__ dbeta, float *__restrict__ dskip, float *key_gradients,      \
           const float *keys, const float *values, const float *gradients, const T *__restrict__ skip,              \
           const u32 *__restrict__ v_to_k, const u32 *__restrict__ chunks, BY_VALUE(Sizes) sizes) {                 \
        const ValueOutputs<T> outputs = {dv, dg, dbeta, dskip};                                                     \
        backward_chunk<Rule::rule>(dq, dk, outputs, key_gradients, keys, values, gradients, skip, v_to_k,           \
                                   chunks, sizes);                                                                  \
    }
FOR_EACH_RULE_AND_FLOAT(INSTANTIATE)
