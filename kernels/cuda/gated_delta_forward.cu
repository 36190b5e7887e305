// The gated delta rule in chunks: what both passes compute, and the output (`src/gated_delta`).

#include "common.cuh"
#include "gated_delta.cuh"

namespace {

// One block per chunk and key head: normalized queries and keys, one warp per row, and their products.
template <typename T>
__device__ __forceinline__ void prepare_keys(float *keys, const T *q, const T *k, const u32 *chunks, const Sizes &sizes) {
    const u32 head = blockIdx.y, lane = threadIdx.x % kWarp, dim = sizes.key_dim;
    const Chunk chunk = chunk_at(chunks, blockIdx.x);
    const KeyRows<float> rows(keys, chunk, head, sizes);
    for (u32 row = threadIdx.x / kWarp; row < 2 * chunk.len; row += kThreads / kWarp) {
        const bool is_key = row >= chunk.len;
        const u32 token = is_key ? row - chunk.len : row;
        const T *from = (is_key ? k : q) + (chunk.token_at(token, sizes) * sizes.key_heads + head) * dim;
        float squares = 0.0f;
        for (u32 i = lane; i < dim; i += kWarp) squares += widen(from[i]) * widen(from[i]);
        const float inverse_norm = 1.0f / sqrtf(warp_reduce<Sum>(squares) + 1e-6f);
        if (lane == 0) (is_key ? rows.k_inverse_norms : rows.q_inverse_norms)[token] = inverse_norm;
        const float scale = is_key ? inverse_norm : inverse_norm / sqrtf(static_cast<float>(dim));
        float *to = (is_key ? rows.k : rows.q) + static_cast<u64>(token) * dim;
        for (u32 i = lane; i < dim; i += kWarp) to[i] = widen(from[i]) * scale;
    }
    const Shape shape = {chunk.len, chunk.len, dim};
    multiply<4>(rows.qk, kChunk, 0.0f, 1.0f, matrix(rows.q, dim), transposed(rows.k, dim), shape);
    multiply<4>(rows.kk, kChunk, 0.0f, 1.0f, matrix(rows.k, dim), transposed(rows.k, dim), shape);
}

// One block per sequence, value head and `kColumns` columns of the state: errors, updates, and the states before chunks, chunk by
// chunk. The state before a segment goes to `saved`, or comes from `restored`, if there is one.
template <typename T>
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
        const KeyRows<const float> key(keys, chunk, v_to_k[head], sizes);
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
            errors[i * dim + column] = widen(v[(chunk.token_at(i, sizes) * sizes.value_heads + head) * dim + first + column]);
        }
        for (u32 e = threadIdx.x; e < key_dim * width; e += kThreads) {
            const u32 i = e / width * dim + e % width;
            if (chunk.state == kNone) {
                state[i] = 0.0f;
            } else {
                value.states[chunk.state * state_size + first + i] = state[i];
            }
        }
        if (chunk.state != kNone) {
            multiply<2>(errors, dim, 1.0f, -1.0f, matrix(key.k, key_dim, decays), matrix(state, dim),
                        {chunk.len, width, key_dim});
        }
        multiply<2>(updates, dim, 0.0f, 1.0f, matrix(value.inverse, kChunk), matrix(errors, dim, value.rate),
                    {chunk.len, width, chunk.len});
        if (chunk.dstate != kNone) {
            multiply<2>(state, dim, decays[chunk.len - 1], 1.0f, transposed(key.k, key_dim),
                        matrix(updates, dim, decays_to_end), {key_dim, width, chunk.len});
        }
    }
}

// One block per chunk and value head: O = exp(γ)∘(Q S) + A updates, in the memory of the errors, which only a backward pass needs.
template <typename T>
__device__ __forceinline__ void write_output(T *o, float *values, const float *keys, const u32 *v_to_k, const u32 *chunks,
                                             const Sizes &sizes) {
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
    if (has_state) {
        const float *state = value.states + chunk.state * static_cast<u64>(key_dim) * dim;
        multiply<4>(sums, dim, 0.0f, 1.0f, matrix(key.q, key_dim, decays), matrix(state, dim), {chunk.len, dim, key_dim});
    }
    multiply<4>(sums, dim, has_state ? 1.0f : 0.0f, 1.0f, matrix(a, kChunk), matrix(value.updates, dim),
                {chunk.len, dim, chunk.len});
    for (u32 e = threadIdx.x; e < chunk.len * dim; e += kThreads) {
        o[(chunk.token_at(e / dim, sizes) * sizes.value_heads + head) * dim + e % dim] = round_to<T>(sums[e]);
    }
}

}  // namespace

// One block per chunk and value head: sums of g, rates, and (I + L)⁻¹, `row i = eᵢ − Σ Lᵢⱼ · row j`, one thread per column.
KERNEL(gated_delta_prepare_values, float *values, const float *__restrict__ keys, const float *__restrict__ g,
       const float *__restrict__ beta, const u32 *__restrict__ v_to_k, const u32 *__restrict__ chunks, BY_VALUE(Sizes) sizes) {
    SHARED(float, decay, [kChunk]);
    SHARED(float, rate, [kChunk]);
    SHARED(float, lower, [kChunk][kChunk]);
    SHARED(float, inverse, [kChunk][kChunk]);
    const u32 head = blockIdx.y;
    const Chunk chunk = chunk_at(chunks, blockIdx.x);
    const KeyRows<const float> key(keys, chunk, v_to_k[head], sizes);
    const ValueRows<float> value(values, chunk, head, sizes);
    for (u32 i = threadIdx.x; i < chunk.len; i += kThreads) {
        const u64 at = chunk.token_at(i, sizes) * sizes.value_heads + head;
        decay[i] = g[at];
        value.rate[i] = rate[i] = beta[at];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0.0f;
        for (u32 i = 0; i < chunk.len; ++i) value.decay[i] = decay[i] = sum += decay[i];
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < chunk.len * kChunk; e += kThreads) {
        const u32 i = e / kChunk, j = e % kChunk;
        if (j < i) lower[i][j] = rate[i] * key.kk[e] * expf(decay[i] - decay[j]);
    }
    __syncthreads();
    const u32 column = threadIdx.x;
    if (column >= chunk.len) return;
    for (u32 i = 0; i < chunk.len; ++i) {
        float sum = i == column ? 1.0f : 0.0f;
        for (u32 j = 0; j < i; ++j) sum -= lower[i][j] * inverse[j][column];
        value.inverse[i * kChunk + column] = inverse[i][column] = sum;
    }
}

#define INSTANTIATE(T, suffix)                                                                                   \
    KERNEL(gated_delta_prepare_keys_##suffix, float *keys, const T *__restrict__ q, const T *__restrict__ k,     \
           const u32 *__restrict__ chunks, BY_VALUE(Sizes) sizes) {                                              \
        prepare_keys(keys, q, k, chunks, sizes);                                                                 \
    }                                                                                                            \
    KERNEL(gated_delta_scan_##suffix, float *values, float *saved, const float *restored, const float *keys,     \
           const T *__restrict__ v, const u32 *__restrict__ v_to_k, const u32 *__restrict__ chunks,              \
           const u32 *__restrict__ segments, BY_VALUE(Sizes) sizes) {                                            \
        scan(values, saved, restored, keys, v, v_to_k, chunks, segments, sizes);                                 \
    }                                                                                                            \
    KERNEL(gated_delta_output_##suffix, T *__restrict__ o, float *values, const float *keys,                     \
           const u32 *__restrict__ v_to_k, const u32 *__restrict__ chunks, BY_VALUE(Sizes) sizes) {              \
        write_output(o, values, keys, v_to_k, chunks, sizes);                                                    \
    }
FOR_EACH_FLOAT(INSTANTIATE)
