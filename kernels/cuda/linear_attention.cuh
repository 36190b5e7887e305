// Chunks, working memory, and products of small matrices, which both passes share. The formulas are those of
// `src/linear_attention/cpu/mod.rs`.

namespace {

// `CHUNK` of `src/linear_attention/segments.rs`, and the columns of a state that a block of a scan has.
constexpr u32 kChunk = 64, kColumns = 32;
constexpr u32 kNone = 0xffffffff;

// `Rule` of `src/linear_attention/mod.rs`. In kernels for sums, errors are the values, and there is no L.
enum class Rule { delta, channel_delta, sum };
template <Rule kRule> constexpr bool kIsDelta = kRule != Rule::sum;
// With decays per channel of the keys, those of value heads are 1.
template <Rule kRule> constexpr bool kHasChannels = kRule == Rule::channel_delta;

// As in `src/linear_attention/cuda/mod.rs`. `rows` are the tokens of a segment in the working memory, of which each has `key_row`
// elements of a key head and `value_row` of a value head. `slots` are the states of a segment there, `saved` those that a forward pass
// saves of a sequence.
struct Sizes {
    u32 seq_len, rows, key_heads, value_heads, key_dim, value_dim, key_row, value_row, slots, saved;
};

// Tokens of a document, and their first row in the segment. `state` is the slot of the state before them and `dstate` that of the
// gradient of the state behind them, `kNone` at the ends of the document.
struct Chunk {
    u32 sequence, token, len, row, state, dstate;

    // The index of token i of the chunk among all tokens.
    __device__ __forceinline__ u64 token_at(u32 i, const Sizes &sizes) const {
        return static_cast<u64>(sequence) * sizes.seq_len + token + i;
    }
};

__device__ __forceinline__ Chunk chunk_at(const u32 *chunks, u32 index) {
    const u32 *words = chunks + static_cast<u64>(index) * 6;
    return {words[0], words[1], words[2], words[3], words[4], words[5]};
}

// The chunks of a segment, and the index of the saved state before it.
struct Segment {
    u32 begin, end, saved;
};

__device__ __forceinline__ Segment segment_at(const u32 *segments, u32 sequence) {
    const u32 *words = segments + static_cast<u64>(sequence) * 3;
    return {words[0], words[1], words[2]};
}

// Rows of a chunk in the working memory of a key head: queries, keys, and their products. By the delta rule, queries are normalized and
// times 1/√Dk, keys are normalized, and the inverse norms of both and the products of keys follow.
template <typename F> struct KeyRows {
    F *q, *k, *qk, *q_inverse_norms, *k_inverse_norms, *kk;

    __device__ __forceinline__ KeyRows(F *memory, const Chunk &chunk, u32 head, const Sizes &sizes) {
        const u64 rows = sizes.rows, dim = sizes.key_dim, row = chunk.row;
        memory += (static_cast<u64>(chunk.sequence) * sizes.key_heads + head) * rows * sizes.key_row;
        q = memory + row * dim;
        k = q + rows * dim;
        memory += 2 * rows * dim;
        qk = memory + row * kChunk;
        memory += rows * kChunk;
        q_inverse_norms = memory + row;
        k_inverse_norms = q_inverse_norms + rows;
        kk = memory + 2 * rows + row * kChunk;
    }
};

// Rows of a chunk in the working memory of a key head with decays per channel, behind `KeyRows`: γ, Q∘exp(γ), K∘exp(γ) and
// K∘exp(γ_end − γ).
template <typename F> struct ChannelRows {
    F *decay, *q, *k, *stored;

    __device__ __forceinline__ ChannelRows(F *memory, const Chunk &chunk, u32 head, const Sizes &sizes) {
        const u64 rows = sizes.rows, dim = sizes.key_dim;
        memory += (static_cast<u64>(chunk.sequence) * sizes.key_heads + head) * rows * sizes.key_row;
        decay = memory + rows * (2 * dim + 2 * kChunk + 2) + chunk.row * dim;
        q = decay + rows * dim;
        k = q + rows * dim;
        stored = k + rows * dim;
    }

    // γ of the chunk's last token.
    __device__ __forceinline__ F *end(u32 len, u32 dim) const { return decay + static_cast<u64>(len - 1) * dim; }
};

// The rows of a chunk that read the state before it, of queries and of keys, and those that store in the state behind it; but for the
// decays of value heads.
struct StateRows {
    const float *q, *k, *stored;

    template <Rule kRule>
    static __device__ __forceinline__ StateRows of(const float *memory, const Chunk &chunk, u32 head, const Sizes &sizes) {
        if constexpr (kHasChannels<kRule>) {
            const ChannelRows<const float> rows(memory, chunk, head, sizes);
            return {rows.q, rows.k, rows.stored};
        } else {
            const KeyRows<const float> rows(memory, chunk, head, sizes);
            return {rows.q, rows.k, rows.k};
        }
    }
};

// Decays `width` columns of a state by channel over a chunk that ends with the sums `end`, before `multiply` adds to them.
__device__ __forceinline__ void decay_state(float *state, const float *end, u32 key_dim, u32 width, u32 row) {
    for (u32 e = threadIdx.x; e < key_dim * width; e += kThreads) state[e / width * row + e % width] *= expf(end[e / width]);
}

// Rows of a chunk in the working memory of a value head: sums of g from the chunk's start, rates, errors, updates, and by the delta
// rule (I + L)⁻¹. Then the state `[Dk, Dv]` behind the chunk that was processed last, and the states before chunks.
template <typename F> struct ValueRows {
    F *decay, *rate, *errors, *updates, *inverse, *state, *states;

    __device__ __forceinline__ ValueRows(F *memory, const Chunk &chunk, u32 head, const Sizes &sizes) {
        const u64 rows = sizes.rows, dim = sizes.value_dim, row = chunk.row;
        const u64 state_size = dim * sizes.key_dim;
        memory += (static_cast<u64>(chunk.sequence) * sizes.value_heads + head) *
                  (rows * sizes.value_row + (1 + sizes.slots) * state_size);
        decay = memory + row;
        rate = decay + rows;
        errors = memory + 2 * rows + row * dim;
        updates = errors + rows * dim;
        inverse = memory + 2 * rows * (1 + dim) + row * kChunk;
        state = memory + rows * sizes.value_row;
        states = state + state_size;
    }
};

// As `ValueRows` for the gradients: of the output; of the updates, then of the rates' products with errors; of the state before the
// chunk that was processed last; and of the states behind chunks.
template <typename F> struct GradientRows {
    F *output, *updates, *state, *states;

    __device__ __forceinline__ GradientRows(F *memory, const Chunk &chunk, u32 head, const Sizes &sizes) {
        const u64 rows = sizes.rows, dim = sizes.value_dim, row = chunk.row;
        const u64 state_size = dim * sizes.key_dim;
        memory += (static_cast<u64>(chunk.sequence) * sizes.value_heads + head) *
                  (rows * 2 * dim + (1 + sizes.slots) * state_size);
        output = memory + row * dim;
        updates = output + rows * dim;
        state = memory + 2 * rows * dim;
        states = state + state_size;
    }
};

// A matrix whose element (i, j) is `at[i · row + j · column]`, times `factors[i]` if there are any.
struct Matrix {
    const float *at;
    u32 row, column;
    const float *factors;

    __device__ __forceinline__ float operator()(u32 i, u32 j) const {
        const float value = at[i * row + j * column];
        return factors != nullptr ? factors[i] * value : value;
    }
};

__device__ __forceinline__ Matrix matrix(const float *at, u32 row, const float *factors = nullptr) {
    return {at, row, 1, factors};
}

__device__ __forceinline__ Matrix transposed(const float *at, u32 row) { return {at, 1, row, nullptr}; }

struct Shape {
    u32 rows, columns, inner;
};

// to ← keep · to + sign · a b, in f32, by all threads of a block of `kThreads`. It sees what they wrote before, and they see the
// result. Rows of `to` are `to_row` apart. `to` is not read if `keep` is 0, and may be `b` if it has at most 64 rows and 16 · kWide
// columns: those of a tile, of which a thread has 4 × kWide elements.
template <u32 kWide>
__device__ void multiply(float *to, u32 to_row, float keep, float sign, const Matrix &a, const Matrix &b, Shape shape) {
    constexpr u32 kHeight = 4, kInner = 16, kTileRows = 16 * kHeight, kTileColumns = 16 * kWide;
    SHARED(float, a_tile, [kInner][kTileRows]);
    SHARED(float, b_tile, [kInner][kTileColumns]);
    const u32 row = threadIdx.x / 16 * kHeight, column = threadIdx.x % 16 * kWide;
    for (u32 first_row = 0; first_row < shape.rows; first_row += kTileRows) {
        for (u32 first_column = 0; first_column < shape.columns; first_column += kTileColumns) {
            float sums[kHeight][kWide] = {};
            for (u32 first = 0; first < shape.inner; first += kInner) {
                __syncthreads();
                // Adjacent threads read adjacent elements.
                for (u32 e = threadIdx.x; e < kInner * kTileRows; e += kThreads) {
                    const u32 k = a.column == 1 ? e % kInner : e / kTileRows, i = a.column == 1 ? e / kInner : e % kTileRows;
                    const bool exists = first_row + i < shape.rows && first + k < shape.inner;
                    a_tile[k][i] = exists ? a(first_row + i, first + k) : 0.0f;
                }
                for (u32 e = threadIdx.x; e < kInner * kTileColumns; e += kThreads) {
                    const u32 k = b.column == 1 ? e / kTileColumns : e % kInner;
                    const u32 j = b.column == 1 ? e % kTileColumns : e / kInner;
                    const bool exists = first_column + j < shape.columns && first + k < shape.inner;
                    b_tile[k][j] = exists ? b(first + k, first_column + j) : 0.0f;
                }
                __syncthreads();
#pragma unroll
                for (u32 k = 0; k < kInner; ++k) {
                    const auto x = *reinterpret_cast<const Pack<float, kHeight> *>(&a_tile[k][row]);
                    const auto y = *reinterpret_cast<const Pack<float, kWide> *>(&b_tile[k][column]);
                    for (u32 i = 0; i < kHeight; ++i) {
                        for (u32 j = 0; j < kWide; ++j) sums[i][j] += x.at[i] * y.at[j];
                    }
                }
            }
            for (u32 i = 0; i < kHeight && first_row + row + i < shape.rows; ++i) {
                float *into = to + static_cast<u64>(first_row + row + i) * to_row + first_column + column;
                for (u32 j = 0; j < kWide && first_column + column + j < shape.columns; ++j) {
                    const float sum = sign * sums[i][j];
                    into[j] = keep == 0.0f ? sum : keep * into[j] + sum;
                }
            }
        }
    }
    __syncthreads();
}

// Writes exp(γ) and exp(γ_end − γ) of a chunk, which all threads of the block see.
__device__ __forceinline__ void write_decays(float *decays, float *decays_to_end, const float *decay, u32 len) {
    for (u32 i = threadIdx.x; i < len; i += kThreads) {
        decays[i] = expf(decay[i]);
        decays_to_end[i] = expf(decay[len - 1] - decay[i]);
    }
    __syncthreads();
}

// Aᵢⱼ = (qᵢ·kⱼ) exp(γᵢ − γⱼ) for j ≤ i, and zeros.
__device__ __forceinline__ void write_attention(float *a, const float *qk, const float *decay, u32 len) {
    for (u32 e = threadIdx.x; e < len * kChunk; e += kThreads) {
        const u32 i = e / kChunk, j = e % kChunk;
        a[e] = j <= i ? qk[e] * expf(decay[i] - decay[j]) : 0.0f;
    }
}

}  // namespace

// As FOR_EACH_FLOAT, for each rule.
#define FOR_EACH_RULE_AND_FLOAT(macro) \
    macro(delta, float, f32)           \
    macro(delta, bf16, bf16)           \
    macro(delta, f16, f16)             \
    macro(channel_delta, float, f32)   \
    macro(channel_delta, bf16, bf16)   \
    macro(channel_delta, f16, f16)     \
    macro(sum, float, f32)             \
    macro(sum, bf16, bf16)             \
    macro(sum, f16, f16)
