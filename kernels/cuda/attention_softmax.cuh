// The softmax of the fused forward kernels: masks, running maxima and sums of rows, for scores that are spread over the
// lanes of a warp as in `attention_fused.cuh`. A kernel includes this file after that one.

#ifndef ULYSSES_ATTENTION_SOFTMAX_CUH
#define ULYSSES_ATTENTION_SOFTMAX_CUH

// The rows of a lane are 16 · m + 8 · half + lane / 4, counted from the first one of its warp.
template <u32 kM> struct Softmax {
    // Maximum of the scores so far, and this lane's part of the sum of exp(score − maximum), both per [m][half].
    float maximum[kM][2], sum[kM][2];

    __device__ __forceinline__ Softmax() : sum{} {
#pragma unroll
        for (u32 i = 0; i < 2 * kM; ++i) maximum[i / 2][i % 2] = kNegativeInfinity;
    }
};

// The keys that at least one of a block's rows sees, and those that all see.
struct BlockVisible {
    Visible any, all;
    __device__ __forceinline__ bool sees_all(u32 first_key, u32 num_keys) const {
        return all.begin <= first_key && first_key + num_keys <= all.end;
    }
};

__device__ __forceinline__ BlockVisible visible_to_rows(const u32 *ranges, u32 first_row, u32 num_rows,
                                                        const FusedSizes &sizes) {
    const u32 past = first_row + num_rows < sizes.rows() ? first_row + num_rows : sizes.rows();
    const Visible first = visible_to(ranges, first_row / sizes.group), last = visible_to(ranges, (past - 1) / sizes.group);
    return {{first.begin, last.end}, {last.begin, first.end}};
}

// Scores of keys that a row does not see become −∞; `row` is the warp's first one.
template <u32 kM, u32 kN>
__device__ __forceinline__ void mask(float (&scores)[kM][kN][4], const u32 *ranges, u32 row, u32 first_key,
                                     const FusedSizes &sizes) {
    const u32 lane = threadIdx.x % kWarp, last_row = sizes.rows() - 1, first_column = first_key + lane % 4 * 2;
#pragma unroll
    for (u32 m = 0; m < kM; ++m) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 at = row + 16 * m + 8 * half + lane / 4;
            const Visible visible = visible_to(ranges, (at < last_row ? at : last_row) / sizes.group);
            const int begin = static_cast<int>(visible.begin - first_column);
            const int end = static_cast<int>(visible.end - first_column);
#pragma unroll
            for (u32 n = 0; n < kN; ++n) {
#pragma unroll
                for (u32 j = 0; j < 2; ++j) {
                    const int column = static_cast<int>(8 * n + j);
                    if (column < begin || column >= end) scores[m][n][2 * half + j] = kNegativeInfinity;
                }
            }
        }
    }
}

// Replaces a row's scores by p = exp(score − maximum), and adds them to its sum. Returns exp(old − new maximum), the
// factor on all that was summed before. `scale` contains log2 e.
template <u32 kN>
__device__ __forceinline__ float exponentials(float (&scores)[kN][4], u32 half, float &maximum, float &sum,
                                              float scale) {
    const float old = maximum;
#pragma unroll
    for (u32 n = 0; n < kN; ++n) {
        maximum = fmaxf(maximum, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
    }
    maximum = row_reduce<Max>(maximum);
    // A row that has seen no key yet: all its scores are −∞, and so must be the exponents.
    const float shift = maximum == kNegativeInfinity ? 0.0f : maximum * scale;
    const float factor = fast_exp2(old * scale - shift);
    sum *= factor;
#pragma unroll
    for (u32 n = 0; n < kN; ++n) {
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            float &score = scores[n][2 * half + j];
            score = fast_exp2(score * scale - shift);
            sum += score;
        }
    }
    return factor;
}

// The softmax's step for a tile: scores become p. Returns the factors on the output so far.
template <u32 kM, u32 kN>
__device__ __forceinline__ void update(float (&factor)[kM][2], Softmax<kM> &softmax, float (&scores)[kM][kN][4],
                                       float scale) {
#pragma unroll
    for (u32 m = 0; m < kM; ++m) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            factor[m][half] = exponentials(scores[m], half, softmax.maximum[m][half], softmax.sum[m][half], scale);
        }
    }
}

template <u32 kM, u32 kN>
__device__ __forceinline__ void scale_rows(float (&o)[kM][kN][4], const float (&factor)[kM][2]) {
#pragma unroll
    for (u32 m = 0; m < kM; ++m) {
#pragma unroll
        for (u32 n = 0; n < kN; ++n) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) o[m][n][i] *= factor[m][i / 2];
        }
    }
}

// Writes lse = ln Σ exp(score), and computes the factor on each row of the output. A row that sees nothing has a sum
// of 0: its output is 0, its lse −∞.
template <u32 kM>
__device__ __forceinline__ void finish(float (&factor)[kM][2], float *lse, const Softmax<kM> &softmax, const u32 *heads,
                                       u32 row, float scale, const FusedSizes &sizes) {
    const u32 lane = threadIdx.x % kWarp;
#pragma unroll
    for (u32 m = 0; m < kM; ++m) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const float sum = row_reduce<Sum>(softmax.sum[m][half]);
            factor[m][half] = sum == 0.0f ? 0.0f : 1.0f / sum;
            const u32 at = row + 16 * m + 8 * half + lane / 4;
            if (lane % 4 != 0 || at >= sizes.rows()) continue;
            const u64 head = heads[at % sizes.group];
            lse[head * sizes.tokens + at / sizes.group] = softmax.maximum[m][half] * scale + logf(sum);
        }
    }
}

#endif
