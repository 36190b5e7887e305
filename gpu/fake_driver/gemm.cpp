// The matrix product: operands unpacked to f32, then sums over blocks that fit the caches.

#include "gemm.h"

#include <algorithm>
#include <vector>

#include "numbers.h"

namespace fake {
namespace {

constexpr std::size_t kRows = 512, kDepth = 256, kColumns = 4;

template <typename T> const T *elements(const Matrix &matrix) { return reinterpret_cast<const T *>(matrix.address); }

// Copies a matrix so that its columns (`by_column`) or rows are contiguous.
template <typename T>
void unpack_as(const Matrix &from, std::size_t rows, std::size_t columns, bool by_column, float *to) {
    const T *source = elements<T>(from);
    const std::size_t along_row = from.is_transposed ? 1 : from.leading;
    const std::size_t along_column = from.is_transposed ? from.leading : 1;
    const std::size_t outer = by_column ? columns : rows, inner = by_column ? rows : columns;
    const std::size_t outer_step = by_column ? along_row : along_column;
    const std::size_t inner_step = by_column ? along_column : along_row;
    for (std::size_t i = 0; i < outer; ++i) {
        for (std::size_t j = 0; j < inner; ++j) *to++ = static_cast<float>(source[i * outer_step + j * inner_step]);
    }
}

std::vector<float> unpack(const Matrix &from, std::size_t rows, std::size_t columns, bool by_column) {
    std::vector<float> to(rows * columns);
    switch (from.type) {
    case Number::kF32: unpack_as<float>(from, rows, columns, by_column, to.data()); break;
    case Number::kF16: unpack_as<F16>(from, rows, columns, by_column, to.data()); break;
    case Number::kBf16: unpack_as<Bf16>(from, rows, columns, by_column, to.data()); break;
    }
    return to;
}

// Adds to up to kColumns columns of the result the products of a block of a with as many columns of b.
template <std::size_t N>
void add_block(std::size_t rows, std::size_t depth, const float *a, std::size_t a_step, const float *b,
               std::size_t b_step, float *sums, std::size_t sums_step) {
    for (std::size_t l = 0; l < depth; ++l) {
        const float *column = a + l * a_step;
        for (std::size_t j = 0; j < N; ++j) {
            const float factor = b[j * b_step + l];
            float *to = sums + j * sums_step;
            for (std::size_t i = 0; i < rows; ++i) to[i] += column[i] * factor;
        }
    }
}

// a · b, column by column. Each block along the depth has sums of its own, or a long sum would round once per term.
std::vector<float> product(std::size_t m, std::size_t n, std::size_t k, const std::vector<float> &a,
                           const std::vector<float> &b) {
    std::vector<float> sums(m * n, 0.0f), of_block;
    for (std::size_t i = 0; i < m; i += kRows) {
        const std::size_t rows = std::min(kRows, m - i);
        for (std::size_t l = 0; l < k; l += kDepth) {
            const std::size_t depth = std::min(kDepth, k - l);
            const float *block = a.data() + l * m + i;
            of_block.assign(rows * n, 0.0f);
            std::size_t j = 0;
            for (; j + kColumns <= n; j += kColumns) {
                add_block<kColumns>(rows, depth, block, m, b.data() + j * k + l, k, of_block.data() + j * rows, rows);
            }
            for (; j < n; ++j) {
                add_block<1>(rows, depth, block, m, b.data() + j * k + l, k, of_block.data() + j * rows, rows);
            }
            for (j = 0; j < n; ++j) {
                for (std::size_t row = 0; row < rows; ++row) sums[j * m + i + row] += of_block[j * rows + row];
            }
        }
    }
    return sums;
}

template <typename T>
void store(const std::vector<float> &sums, std::size_t m, std::size_t n, float alpha, float beta, const Matrix &c) {
    T *to = reinterpret_cast<T *>(c.address);
    for (std::size_t j = 0; j < n; ++j) {
        for (std::size_t i = 0; i < m; ++i) {
            T &element = to[j * c.leading + i];
            const float value = alpha * sums[j * m + i];
            element = static_cast<T>(beta == 0.0f ? value : value + beta * static_cast<float>(element));
        }
    }
}

}  // namespace

void multiply(std::size_t m, std::size_t n, std::size_t k, float alpha, const Matrix &a, const Matrix &b, float beta,
              const Matrix &c) {
    const auto sums = product(m, n, k, unpack(a, m, k, true), unpack(b, k, n, true));
    switch (c.type) {
    case Number::kF32: store<float>(sums, m, n, alpha, beta, c); break;
    case Number::kF16: store<F16>(sums, m, n, alpha, beta, c); break;
    case Number::kBf16: store<Bf16>(sums, m, n, alpha, beta, c); break;
    }
}

}  // namespace fake
