// Parts of the fused backward kernels: their operands, rows of them in shared memory with the terms of packed rows, and
// the derivative of the softmax. A kernel includes this file after `attention_fused.cuh`.

#ifndef ULYSSES_ATTENTION_FUSED_BACKWARD_CUH
#define ULYSSES_ATTENTION_FUSED_BACKWARD_CUH

// The operands of both kernels: `q`, `dout` [sequence, token, head, D], `k`, `v` [sequence, key, KV head, D], `lse`,
// `delta` [sequence, head, token], `ranges` [sequence, token], and `heads` as in `packed_rows`. Offsets of this block's
// rows are computed from these members each time, because registers are scarce.
template <typename T, u32 D> struct Operands {
    const T *q, *k, *v, *dout;
    const float *lse, *delta;
    const u32 *heads, *ranges;
    FusedSizes sizes;
    // That of this block: ptxas would divide again for each row.
    u32 kv_head;

    __device__ __forceinline__ Visible visible_to_token(u32 token) const {
        return visible_to(ranges + 2 * static_cast<u64>(blockIdx.z) * sizes.tokens, token);
    }
    __device__ __forceinline__ u64 head_of_row(u32 row) const {
        return heads[kv_head * sizes.group + row % sizes.group];
    }
    // Of a row's elements in q and dout.
    __device__ __forceinline__ u64 offset_of_row(u32 row) const {
        const u64 token = static_cast<u64>(blockIdx.z) * sizes.tokens + row / sizes.group;
        return (token * sizes.num_heads + head_of_row(row)) * D;
    }
    // Of a row's element in lse and delta.
    __device__ __forceinline__ u64 offset_of_term(u32 row) const {
        const u64 head = static_cast<u64>(blockIdx.z) * sizes.num_heads + head_of_row(row);
        return head * sizes.tokens + row / sizes.group;
    }
    // Of a key's elements in k and v.
    __device__ __forceinline__ u64 offset_of_key(u32 key) const {
        const u64 at = static_cast<u64>(blockIdx.z) * sizes.keys + key;
        return (at * sizes.num_kv_heads + sizes.first_kv_head + kv_head) * D;
    }
};

// What the gradients of packed rows' scores need besides the rows of q and dout.
template <u32 kRows> struct alignas(16) RowTerms {
    float lse[kRows], delta[kRows];
    Visible visible[kRows];
};

// kCount rows of two tensors in shared memory: of k and v, or packed ones of q and dout with their terms. `Rows` is a
// `Tile`, or `Panels`.
template <typename Rows, u32 kCount> struct Stage {
    using T = typename Rows::Element;
    static constexpr u32 kRows = kCount, kElements = kRows * Rows::kChunks * Rows::kChunk;
    static constexpr u32 kBytes = 2 * kElements * sizeof(T) + sizeof(RowTerms<kRows>);
    Rows left, right;
    RowTerms<kRows> *terms;

    // One of the stages in shared memory.
    __device__ __forceinline__ Stage(u8 *shared, u32 index)
        : left{reinterpret_cast<T *>(shared + index * kBytes)},
          right{left.first + kElements},
          terms(reinterpret_cast<RowTerms<kRows> *>(right.first + kElements)) {}
};

// Starts copies of the rows of two tensors from `first` to before `past`; others become 0. Eight threads copy a row, so
// that few offsets are computed.
template <u32 kThreads, typename AnyStage, typename T, typename Offset>
__device__ __forceinline__ void copy_pairs(const AnyStage &to, const T *left, const T *right, u32 first, u32 past,
                                           const Offset &offset_of) {
    using Rows = decltype(to.left);
    constexpr u32 kAcross = 8;
#pragma unroll 1
    for (u32 row = threadIdx.x % kThreads / kAcross; row < AnyStage::kRows; row += kThreads / kAcross) {
        const bool exists = first + row < past;
        const u64 offset = offset_of(exists ? first + row : first);
#pragma unroll
        for (u32 chunk = threadIdx.x % kAcross; chunk < Rows::kChunks; chunk += kAcross) {
            const u64 at = offset + chunk * Rows::kChunk;
            cp_async<16>(to.left.at(row, chunk), left + at, exists ? 16 : 0);
            cp_async<16>(to.right.at(row, chunk), right + at, exists ? 16 : 0);
        }
    }
}

template <u32 kThreads, typename AnyStage, typename T, u32 D>
__device__ __forceinline__ void copy_keys(const AnyStage &to, const Operands<T, D> &of, u32 first) {
    copy_pairs<kThreads>(to, of.k, of.v, first, of.sizes.keys, [&](u32 key) { return of.offset_of_key(key); });
}

// Packed rows from `past` on become 0, and so do their contributions to all sums.
template <u32 kThreads, typename AnyStage, typename T, u32 D>
__device__ __forceinline__ void copy_queries(const AnyStage &to, const Operands<T, D> &of, u32 first, u32 past) {
    copy_pairs<kThreads>(to, of.q, of.dout, first, past, [&](u32 row) { return of.offset_of_row(row); });
    const u32 at = threadIdx.x % kThreads;
    if (at >= AnyStage::kRows) return;
    const bool exists = first + at < past;
    const u32 row = exists ? first + at : first;
    const u64 token = static_cast<u64>(blockIdx.z) * of.sizes.tokens + row / of.sizes.group;
    cp_async<4>(&to.terms->lse[at], of.lse + of.offset_of_term(row), exists ? 4 : 0);
    cp_async<4>(&to.terms->delta[at], of.delta + of.offset_of_term(row), exists ? 4 : 0);
    cp_async<8>(&to.terms->visible[at], of.ranges + 2 * token, exists ? 8 : 0);
}

// The number of tokens for which `holds` is true of the visible keys: they come before all others.
template <typename T, u32 D, typename Holds>
__device__ __forceinline__ u32 partition_point(const Operands<T, D> &of, const Holds &holds) {
    u32 begin = 0, end = of.sizes.tokens;
    while (begin < end) {
        const u32 middle = begin + (end - begin) / 2;
        if (holds(of.visible_to_token(middle))) {
            begin = middle + 1;
        } else {
            end = middle;
        }
    }
    return begin;
}

// Packed rows, from `row` to before `past`.
struct RowRange {
    u32 row, past;
};

// The rows that see one of the keys from `first_key` to before `past_key`, and perhaps others between them.
template <typename T, u32 D>
__device__ __forceinline__ RowRange rows_that_see(const Operands<T, D> &of, u32 first_key, u32 past_key) {
    const u32 first = partition_point(of, [&](const Visible &keys) { return keys.end <= first_key; });
    const u32 past = partition_point(of, [&](const Visible &keys) { return keys.begin < past_key; });
    return {first * of.sizes.group, past * of.sizes.group};
}

// Whether the first `count` rows, or all, see all keys from `first_key` to before `past_key`.
template <u32 kRows>
__device__ __forceinline__ bool all_see(const RowTerms<kRows> &rows, u32 count, u32 first_key, u32 past_key) {
    const u32 last = (count < kRows ? count : kRows) - 1;
    return rows.visible[last].begin <= first_key && past_key <= rows.visible[0].end;
}

// The terms of this lane's two rows of the 16 that its warp owns.
template <u32 kRows> __device__ __forceinline__ RowTerms<2> own_terms(const RowTerms<kRows> &rows) {
    const u32 row = threadIdx.x / kWarp * 16 + threadIdx.x % kWarp / 4;
    return {{rows.lse[row], rows.lse[row + 8]},
            {rows.delta[row], rows.delta[row + 8]},
            {rows.visible[row], rows.visible[row + 8]}};
}

// Rows and keys of this lane's products c[n][i], for a warp that owns keys from `first_key` on, and rows from
// `first_row` on.
struct OwnKeys {
    u32 first_row, first_key;
    __device__ __forceinline__ u32 row(u32 n, u32 i) const { return first_row + 8 * n + threadIdx.x % 4 * 2 + i % 2; }
    __device__ __forceinline__ u32 key(u32, u32 i) const { return first_key + threadIdx.x % kWarp / 4 + i / 2 * 8; }
};

// The same for a warp that owns rows, by their place in `own_terms`, and keys from `first_key` on.
struct OwnRows {
    u32 first_key;
    __device__ __forceinline__ u32 row(u32, u32 i) const { return i / 2; }
    __device__ __forceinline__ u32 key(u32 n, u32 i) const { return first_key + 8 * n + threadIdx.x % 4 * 2 + i % 2; }
};

// p of scores, 0 if a row does not see the key. `scale` contains log2 e.
template <bool kMasked, u32 kN, u32 kRows, typename Positions>
__device__ __forceinline__ void exponentiate(float (&p)[1][kN][4], const float (&s)[1][kN][4],
                                             const RowTerms<kRows> &rows, const Positions &at, float scale) {
#pragma unroll
    for (u32 n = 0; n < kN; ++n) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 row = at.row(n, i);
            const float exponential = fast_exp2(s[0][n][i] * scale - rows.lse[row] * kLog2E);
            p[0][n][i] = !kMasked || rows.visible[row].contains(at.key(n, i)) ? exponential : 0.0f;
        }
    }
}

// The same, masked unless all rows see all keys.
template <u32 kN, u32 kRows, typename Positions>
__device__ __forceinline__ void exponentiate(float (&p)[1][kN][4], const float (&s)[1][kN][4],
                                             const RowTerms<kRows> &rows, const Positions &at, float scale,
                                             bool all_see) {
    if (all_see) {
        exponentiate<false>(p, s, rows, at, scale);
    } else {
        exponentiate<true>(p, s, rows, at, scale);
    }
}

// dp becomes ds.
template <u32 kN, u32 kRows, typename Positions>
__device__ __forceinline__ void differentiate(float (&dp)[1][kN][4], const float (&p)[1][kN][4],
                                              const RowTerms<kRows> &rows, const Positions &at) {
#pragma unroll
    for (u32 n = 0; n < kN; ++n) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) dp[0][n][i] = p[0][n][i] * (dp[0][n][i] - rows.delta[at.row(n, i)]);
    }
}

#define PARAMETERS(T)                                                                                             \
    const T *q, const T *k, const T *v, const T *dout, const float *lse, const float *delta, const u32 *heads,    \
        const u32 *ranges, float scale, u32 tokens, u32 num_keys, u32 num_heads, u32 num_kv_heads,                \
        u32 first_kv_head, u32 group
#define OPERANDS                                                                                                  \
    {                                                                                                             \
        q, k, v, dout, lse, delta, heads, ranges,                                                                 \
            {tokens, num_keys, num_heads, num_kv_heads, first_kv_head, group}, block_place().kv_head              \
    }

#endif
