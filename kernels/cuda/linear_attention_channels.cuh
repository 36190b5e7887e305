// Gradients with decays per channel of the keys. The formulas are those of `src/linear_attention/cpu/channels.rs`.

namespace {

// A row of the working memory of gradients: distance between rows in shared memory, which avoids bank conflicts of columns.
constexpr u32 kPitch = kChunk + 1;

// Rows of a chunk in the working memory of a key head: the gradients of `KeyRows::q` and `KeyRows::k`, and a term of one of them. With
// decays per channel, `k` is for keys that read, `stored` for those that later tokens read; `end` is a row of gradients of γ_end.
template <Rule kRule> struct KeyGradients {
    float *q, *k, *term, *stored, *end;

    __device__ __forceinline__ KeyGradients(float *memory, const Chunk &chunk, u32 head, const Sizes &sizes) {
        constexpr u32 kParts = kHasChannels<kRule> ? 5 : 3;
        const u64 size = static_cast<u64>(sizes.rows) * sizes.key_dim;
        q = memory + (static_cast<u64>(chunk.sequence) * sizes.key_heads + head) * kParts * size +
            static_cast<u64>(chunk.row) * sizes.key_dim;
        k = q + size;
        term = k + size;
        stored = term + size;
        end = stored + size;
    }

    // Zeros, of a chunk of `len` tokens.
    __device__ __forceinline__ void clear(u32 len, u32 dim) const {
        for (u32 e = threadIdx.x; e < len * dim; e += kThreads) {
            q[e] = k[e] = 0.0f;
            if constexpr (kHasChannels<kRule>) stored[e] = end[e] = 0.0f;
        }
    }
};

using ChannelGradients = KeyGradients<Rule::channel_delta>;

// Adds factors∘exp(γ)∘terms to a gradient of rows that read the state; a row has one factor.
__device__ __forceinline__ void add_decayed(float *gradient, const float *terms, const float *factors, const float *decay, u32 len,
                                            u32 dim) {
    for (u32 e = threadIdx.x; e < len * dim; e += kThreads) gradient[e] += factors[e / dim] * expf(decay[e]) * terms[e];
    __syncthreads();
}

// Adds the gradients that come from `decayed_products`: one thread per channel.
__device__ __forceinline__ void add_decayed_pairs(const ChannelGradients &to, const KeyRows<const float> &key, const float *decay,
                                                  const float *da, const float *dl, u32 len, u32 dim) {
    for (u32 channel = threadIdx.x; channel < dim; channel += kThreads) {
        for (u32 i = 0; i < len; ++i) {
            const u32 now = i * dim + channel;
            float of_query = 0.0f, of_key = 0.0f, of_stored = 0.0f;
            for (u32 j = 0; j <= i; ++j) {
                const u32 before = j * dim + channel, pair = i * kPitch + j;
                const float term = key.k[before] * expf(decay[now] - decay[before]);
                of_query += da[pair] * term;
                if (j < i) of_key += dl[pair] * term;
            }
            for (u32 row = i; row < len; ++row) {
                const u32 after = row * dim + channel, pair = row * kPitch + i;
                const float of_keys = row > i ? dl[pair] * key.k[after] : 0.0f;
                of_stored += (da[pair] * key.q[after] + of_keys) * expf(decay[after] - decay[now]);
            }
            to.q[now] += of_query;
            to.k[now] += of_key;
            to.stored[now] += of_stored;
        }
    }
    __syncthreads();
}

// Adds the gradients that come from the state behind the chunk, for the terms `updates dstateᵀ`: one warp per channel. `state` is that
// before the chunk, if there is one; a row of both has `dim` elements.
__device__ __forceinline__ void add_stored(const ChannelGradients &to, const KeyRows<const float> &key,
                                           const ChannelRows<const float> &channels, const float *state, const float *dstate, u32 len,
                                           u32 key_dim, u32 dim) {
    const u32 lane = threadIdx.x % kWarp;
    for (u32 channel = threadIdx.x / kWarp; channel < key_dim; channel += kThreads / kWarp) {
        const float end = channels.end(len, key_dim)[channel];
        float of_end = 0.0f;
        for (u32 at = lane * key_dim + channel; at < len * key_dim; at += kWarp * key_dim) {
            const float of_key = to.term[at] * expf(end - channels.decay[at]);
            to.stored[at] += of_key;
            of_end += of_key * key.k[at];
        }
        float product = 0.0f;
        for (u32 i = lane; i < dim && state != nullptr; i += kWarp) product += state[channel * dim + i] * dstate[channel * dim + i];
        of_end = warp_reduce<Sum>(of_end + expf(end) * product);
        if (lane == 0) to.end[channel] += of_end;
    }
    __syncthreads();
}

// Writes the gradients of g, and adds those of stored keys to those of keys: one thread per channel.
__device__ __forceinline__ void write_channels(float *dg, const ChannelGradients &gradients,
                                               const KeyRows<const float> &rows, const Chunk &chunk, u32 head, const Sizes &sizes) {
    const u32 dim = sizes.key_dim;
    for (u32 channel = threadIdx.x; channel < dim; channel += kThreads) {
        float sum = gradients.end[channel];
        for (u32 i = chunk.len; i-- > 0;) {
            const u32 at = i * dim + channel;
            const float of_keys = rows.k[at] * (gradients.k[at] - gradients.stored[at]);
            sum += rows.q[at] * gradients.q[at] + of_keys;
            dg[(chunk.token_at(i, sizes) * sizes.key_heads + head) * dim + channel] = sum;
            gradients.k[at] += gradients.stored[at];
        }
    }
    __syncthreads();
}

}  // namespace
