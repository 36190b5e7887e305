// A matrix product as cuBLAS defines it, on the host.

#pragma once

#include <cstddef>
#include <cstdint>

namespace fake {

enum class Number { kF32, kF16, kBf16 };

// A column-major matrix, `rows` × `columns` once it is transposed where asked.
struct Matrix {
    std::uintptr_t address;
    Number type;
    bool is_transposed;
    std::size_t leading;
};

// c = alpha · a · b + beta · c with sums in f32, for an m × n result. c is not read where beta is 0.
void multiply(std::size_t m, std::size_t n, std::size_t k, float alpha, const Matrix &a, const Matrix &b, float beta,
              const Matrix &c);

}  // namespace fake
