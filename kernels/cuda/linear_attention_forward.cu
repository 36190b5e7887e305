// Linear attention in chunks, by the gated delta rule or by sums: what both passes compute, and the output (`src/linear_attention`).

#include "common.cuh"
#include "linear_attention.cuh"

namespace {

// Sums of g of a chunk, and the rows with their decays, one thread per channel.
__device__ __forceinline__ void decay_rows(const ChannelRows<float> &to, const KeyRows<float> &rows, const float *g,
                                           const Chunk &chunk, u32 head, const Sizes &sizes) {
    const u32 dim = sizes.key_dim;
    for (u32 channel = threadIdx.x; channel < dim; channel += kThreads) {
        float sum = 0.0f;
        for (u32 i = 0; i < chunk.len; ++i) {
            to.decay[i * dim + channel] = sum += g[(chunk.token_at(i, sizes) * sizes.key_heads + head) * dim + channel];
        }
        for (u32 at = channel; at < chunk.len * dim; at += dim) {
            const float decay = to.decay[at], of_start = expf(decay);
            to.q[at] = rows.q[at] * of_start;
            to.k[at] = rows.k[at] * of_start;
            to.stored[at] = rows.k[at] * expf(sum - decay);
        }
    }
    __syncthreads();
}

// The products of queries, and of keys, with the keys of tokens up to theirs, with the decays between the two: one warp per pair.
__device__ __forceinline__ void decayed_products(const KeyRows<float> &rows, const float *decay, u32 len, u32 dim) {
    for (u32 pair = threadIdx.x / kWarp; pair < len * len; pair += kThreads / kWarp) {
        const u32 i = pair / len, j = pair % len;
        if (j > i) continue;
        float qk = 0.0f, kk = 0.0f;
        for (u32 channel = threadIdx.x % kWarp; channel < dim; channel += kWarp) {
            const u32 now = i * dim + channel, before = j * dim + channel;
            const float term = rows.k[before] * expf(decay[now] - decay[before]);
            qk += rows.q[now] * term;
            kk += rows.k[now] * term;
        }
        qk = warp_reduce<Sum>(qk);
        kk = warp_reduce<Sum>(kk);
        if (threadIdx.x % kWarp != 0) continue;
        rows.qk[i * kChunk + j] = qk;
        rows.kk[i * kChunk + j] = kk;
    }
}

// One block per chunk and key head: queries and keys, by the delta rule normalized, one warp per row, and their products.
template <Rule kRule, typename T>
__device__ __forceinline__ void prepare_keys(float *keys, const T *q, const T *k, const float *g, const u32 *chunks,
                                             const Sizes &sizes) {
    const u32 head = blockIdx.y, lane = threadIdx.x % kWarp, dim = sizes.key_dim;
    const Chunk chunk = chunk_at(chunks, blockIdx.x);
    const KeyRows<float> rows(keys, chunk, head, sizes);
    for (u32 row = threadIdx.x / kWarp; row < 2 * chunk.len; row += kThreads / kWarp) {
        const bool is_key = row >= chunk.len;
        const u32 token = is_key ? row - chunk.len : row;
        const T *from = (is_key ? k : q) + (chunk.token_at(token, sizes) * sizes.key_heads + head) * dim;
        float scale = 1.0f;
        if constexpr (kIsDelta<kRule>) {
            float squares = 0.0f;
            for (u32 i = lane; i < dim; i += kWarp) squares += widen(from[i]) * widen(from[i]);
            const float inverse_norm = 1.0f / sqrtf(warp_reduce<Sum>(squares) + 1e-6f);
            if (lane == 0) (is_key ? rows.k_inverse_norms : rows.q_inverse_norms)[token] = inverse_norm;
            scale = is_key ? inverse_norm : inverse_norm / sqrtf(static_cast<float>(dim));
        }
        float *to = (is_key ? rows.k : rows.q) + static_cast<u64>(token) * dim;
        for (u32 i = lane; i < dim; i += kWarp) to[i] = widen(from[i]) * scale;
    }
    if constexpr (kHasChannels<kRule>) {
        const ChannelRows<float> channels(keys, chunk, head, sizes);
        __syncthreads();
        decay_rows(channels, rows, g, chunk, head, sizes);
        decayed_products(rows, channels.decay, chunk.len, dim);
        return;
    }
    const Shape shape = {chunk.len, chunk.len, dim};
    multiply<4>(rows.qk, kChunk, 0.0f, 1.0f, matrix(rows.q, dim), transposed(rows.k, dim), shape);
    if constexpr (kIsDelta<kRule>) {
        multiply<4>(rows.kk, kChunk, 0.0f, 1.0f, matrix(rows.k, dim), transposed(rows.k, dim), shape);
    }
}

// (I + L)⁻¹ of a chunk, `row i = eᵢ − Σ Lᵢⱼ · row j`, one thread per column.
__device__ __forceinline__ void invert(float *to, const float *kk, const float *decay, const float *rate, u32 len) {
    SHARED(float, lower, [kChunk][kChunk]);
    SHARED(float, inverse, [kChunk][kChunk]);
    for (u32 e = threadIdx.x; e < len * kChunk; e += kThreads) {
        const u32 i = e / kChunk, j = e % kChunk;
        if (j < i) lower[i][j] = rate[i] * kk[e] * expf(decay[i] - decay[j]);
    }
    __syncthreads();
    const u32 column = threadIdx.x;
    if (column >= len) return;
    for (u32 i = 0; i < len; ++i) {
        float sum = i == column ? 1.0f : 0.0f;
        for (u32 j = 0; j < i; ++j) sum -= lower[i][j] * inverse[j][column];
        to[i * kChunk + column] = inverse[i][column] = sum;
    }
}

// One block per chunk and value head: sums of g, rates, and by the delta rule (I + L)⁻¹.
template <Rule kRule>
__device__ __forceinline__ void prepare_values(float *values, const float *keys, const float *g, const float *beta,
                                               const u32 *v_to_k, const u32 *chunks, const Sizes &sizes) {
    SHARED(float, decay, [kChunk]);
    SHARED(float, rate, [kChunk]);
    const u32 head = blockIdx.y;
    const Chunk chunk = chunk_at(chunks, blockIdx.x);
    const ValueRows<float> value(values, chunk, head, sizes);
    for (u32 i = threadIdx.x; i < chunk.len; i += kThreads) {
        const u64 at = chunk.token_at(i, sizes) * sizes.value_heads + head;
        decay[i] = kHasChannels<kRule> ? 0.0f : g[at];
        value.rate[i] = rate[i] = beta[at];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (u32 i = 0; i < chunk.len; ++i) value.decay[i] = decay[i] = sum += decay[i];
    }
    if constexpr (kIsDelta<kRule>) {
        __syncthreads();
        invert(value.inverse, KeyRows<const float>(keys, chunk, v_to_k[head], sizes).kk, decay, rate, chunk.len);
    }
}

// One block per sequence, value head and `kColumns` columns of the state: errors, updates, and the states before chunks, chunk by
// chunk. The state before a segment goes to `saved`, or comes from `restored`, if there is one.
template <Rule kRule, typename T>
__device__ __forceinline__ void scan(float *values, float *saved, const float *restored, const float *keys, const T *v,
                                     const u32 *v_to_k, const u32 *chunks, const u32 *segments, const Sizes &sizes) {
    SHARED(float, decays, [kChunk]);
    SHARED(float, decays_to_end, [kChunk]);
    const u32 sequence = blockIdx.x, head = blockIdx.y, first = blockIdx.z * kColumns;
    const u32 key_dim = sizes.key_dim, dim = sizes.value_dim, width = dim - first < kColumns ? dim - first : kColumns;
    const u64 state_size = static_cast<u64>(key_dim) * dim;
    const Segment segment = segment_at(segments, sequence);
    for (u32 index = segment.begin; index < segment.end; ++index) {
        const Chunk chunk = chunk_at(chunks, index);
        const StateRows key = StateRows::of<kRule>(keys, chunk, v_to_k[head], sizes);
        const ValueRows<float> value(values, chunk, head, sizes);
        float *state = value.state + first, *errors = value.errors + first, *updates = value.updates + first;
        if (index == segment.begin && segment.saved != kNone) {
            const u64 at = ((static_cast<u64>(sequence) * sizes.value_heads + head) * sizes.saved + segment.saved) * state_size;
            for (u32 e = threadIdx.x; e < key_dim * width; e += kThreads) {
                const u32 i = e / width * dim + e % width;
                if (restored != nullptr) state[i] = restored[at + first + i];
                if (saved != nullptr) saved[at + first + i] = state[i];
            }
        }
        write_decays(decays, decays_to_end, value.decay, chunk.len);
        for (u32 e = threadIdx.x; e < chunk.len * width; e += kThreads) {
            const u32 i = e / width, column = e % width;
            const float x = widen(v[(chunk.token_at(i, sizes) * sizes.value_heads + head) * dim + first + column]);
            errors[i * dim + column] = x;
            if constexpr (kRule == Rule::sum) updates[i * dim + column] = value.rate[i] * x;
        }
        for (u32 e = threadIdx.x; e < key_dim * width; e += kThreads) {
            const u32 i = e / width * dim + e % width;
            if (chunk.state == kNone) {
                state[i] = 0.0f;
            } else {
                value.states[chunk.state * state_size + first + i] = state[i];
            }
        }
        if constexpr (kIsDelta<kRule>) {
            if (chunk.state != kNone) {
                multiply<2>(errors, dim, 1.0f, -1.0f, matrix(key.k, key_dim, decays), matrix(state, dim),
                            {chunk.len, width, key_dim});
            }
            multiply<2>(updates, dim, 0.0f, 1.0f, matrix(value.inverse, kChunk), matrix(errors, dim, value.rate),
                        {chunk.len, width, chunk.len});
        }
        if (chunk.dstate != kNone) {
            if constexpr (kHasChannels<kRule>) {
                const ChannelRows<const float> channels(keys, chunk, v_to_k[head], sizes);
                __syncthreads();
                decay_state(state, channels.end(chunk.len, key_dim), key_dim, width, dim);
            }
            multiply<2>(state, dim, decays[chunk.len - 1], 1.0f, transposed(key.stored, key_dim),
                        matrix(updates, dim, decays_to_end), {key_dim, width, chunk.len});
        }
    }
}

// One block per chunk and value head: O = exp(γ)∘(Q S) + A updates, by sums also + D∘V, in the memory of the errors, which only a
// backward pass needs.
template <Rule kRule, typename T>
__device__ __forceinline__ void write_output(T *o, float *values, const float *keys, const T *skip, const u32 *v_to_k,
                                             const u32 *chunks, const Sizes &sizes) {
    SHARED(float, a, [kChunk * kChunk]);
    SHARED(float, decays, [kChunk]);
    const u32 head = blockIdx.y, dim = sizes.value_dim, key_dim = sizes.key_dim;
    const Chunk chunk = chunk_at(chunks, blockIdx.x);
    const KeyRows<const float> key(keys, chunk, v_to_k[head], sizes);
    const ValueRows<float> value(values, chunk, head, sizes);
    float *sums = value.errors;
    for (u32 i = threadIdx.x; i < chunk.len; i += kThreads) decays[i] = expf(value.decay[i]);
    write_attention(a, key.qk, value.decay, chunk.len);
    const bool has_state = chunk.state != kNone;
    constexpr bool kHasSkip = kRule == Rule::sum;
    if constexpr (kHasSkip) {
        const float factor = widen(skip[head]);
        for (u32 e = threadIdx.x; e < chunk.len * dim; e += kThreads) sums[e] *= factor;
    }
    if (has_state) {
        const float *state = value.states + chunk.state * static_cast<u64>(key_dim) * dim;
        const StateRows rows = StateRows::of<kRule>(keys, chunk, v_to_k[head], sizes);
        multiply<4>(sums, dim, kHasSkip ? 1.0f : 0.0f, 1.0f, matrix(rows.q, key_dim, decays), matrix(state, dim),
                    {chunk.len, dim, key_dim});
    }
    multiply<4>(sums, dim, kHasSkip || has_state ? 1.0f : 0.0f, 1.0f, matrix(a, kChunk), matrix(value.updates, dim),
                {chunk.len, dim, chunk.len});
    for (u32 e = threadIdx.x; e < chunk.len * dim; e += kThreads) {
        o[(chunk.token_at(e / dim, sizes) * sizes.value_heads + head) * dim + e % dim] = round_to<T>(sums[e]);
    }
}

}  // namespace

#define INSTANTIATE(rule, T, suffix)                                                                                       \
    KERNEL(linear_attention_prepare_keys_##rule##_##suffix, float *keys, const T *__restrict__ q, const T *__restrict__ k, \
           const float *__restrict__ g, const u32 *__restrict__ chunks, BY_VALUE(Sizes) sizes) {                           \
        prepare_keys<Rule::rule>(keys, q, k, g, chunks, sizes);                                                            \
    }                                                                                                                      \
    KERNEL(linear_attention_scan_##rule##_##suffix, float *values, float *saved, const float *restored, const float *keys, \
           const T *__restrict__ v, const u32 *__restrict__ v_to_k, const u32 *__restrict__ chunks,                        \
           const u32 *__restrict__ segments, BY_VALUE(Sizes) sizes) {                                                      \
        scan<Rule::rule>(values, saved, restored, keys, v, v_to_k, chunks, segments, sizes);                               \
    }                                                                                                                      \
    KERNEL(linear_attention_output_##rule##_##suffix, T *__restrict__ o, float *values, const float *keys,                 \
           const T *__restrict__ skip, const u32 *__restrict__ v_to_k, const u32 *__restrict__ chunks,                     \
           BY_VALUE(Sizes) sizes) {                                                                                        \
        write_output<Rule::rule>(o, values, keys, skip, v_to_k, chunks, sizes);                                            \
    }
FOR_EACH_RULE_AND_FLOAT(INSTANTIATE)

#define INSTANTIATE_RULE(rule)                                                                                                 \
    KERNEL(linear_attention_prepare_values_##rule, float *values, const float *__restrict__ keys, const float *__restrict__ g, \
           const float *__restrict__ beta, const u32 *__restrict__ v_to_k, const u32 *__restrict__ chunks,                     \
           BY_VALUE(Sizes) sizes) {                                                                                            \
        prepare_values<Rule::rule>(values, keys, g, beta, v_to_k, chunks, sizes);                                              \
    }
INSTANTIATE_RULE(delta)
INSTANTIATE_RULE(channel_delta)
INSTANTIATE_RULE(sum)
