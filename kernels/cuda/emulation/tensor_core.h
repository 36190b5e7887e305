// Models of the instructions of `mma.cuh`, exact in which lane's register has which element.
//
// Written after the tables of the PTX ISA ("Matrix Fragments for mma.m16n8k16", "ldmatrix"), with g = lane / 4 and
// t = lane % 4. The sum of a product is rounded once; how a GPU rounds within it is not documented.

#pragma once

#include "emulation.h"

namespace emulation {

// The fragments of a lane: 16 × 16 elements of A and 16 × 8 of B are spread over a warp, two per register.
struct Fragments {
    u32 a[4], b[2];
};
static_assert(sizeof(Fragments) <= kSlotBytes, "fragments fit a slot");

inline float mma_element(bf16 x) { return bf16_to_float(x); }
inline float mma_element(f16 x) { return f16_to_float(x); }

inline void need_whole_warps() {
    if (position.block_size.x % 32 != 0) fail("a warp of fewer than 32 threads in a warp-wide instruction");
}

// The two elements of a register.
template <typename T> NOT_SANITIZED void read_pair(float *to, u32 pair) {
    to[0] = mma_element(T{static_cast<u16>(pair)});
    to[1] = mma_element(T{static_cast<u16>(pair >> 16)});
}

template <typename T> NOT_SANITIZED void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    need_whole_warps();
    auto *mine = static_cast<Fragments *>(exchange_slot());
    std::memcpy(mine->a, a, sizeof a);
    std::memcpy(mine->b, b, sizeof b);
    // The lanes that have rows g and g + 8 of A, and columns 2t and 2t + 1 of B.
    const unsigned g = position.thread.x % 32 / 4, t = position.thread.x % 4;
    const Fragments *of_rows[4], *of_columns[2][4];
    for (unsigned i = 0; i < 4; ++i) {
        of_rows[i] = static_cast<const Fragments *>(exchange_slot_of(g * 4 + i));
        of_columns[0][i] = static_cast<const Fragments *>(exchange_slot_of(2 * t * 4 + i));
        of_columns[1][i] = static_cast<const Fragments *>(exchange_slot_of((2 * t + 1) * 4 + i));
    }
    sync_warp(WarpOp::kMma);
    // A[row][k]: registers 0 and 1 have k < 8, 2 and 3 the rest; odd ones have rows from 8 on. B[k][column]: register 0 has
    // k < 8, register 1 the rest.
    float rows[2][16], columns[2][16];
    for (unsigned half = 0; half < 2; ++half) {
        for (unsigned k = 0; k < 16; k += 2) {
            read_pair<T>(&rows[half][k], of_rows[k % 8 / 2]->a[half + k / 8 * 2]);
            read_pair<T>(&columns[half][k], of_columns[half][k % 8 / 2]->b[k / 8]);
        }
    }
    for (unsigned i = 0; i < 4; ++i) {
        double sum = c[i];
        for (unsigned k = 0; k < 16; ++k) sum += static_cast<double>(rows[i / 2][k]) * columns[i % 2][k];
        c[i] = static_cast<float>(sum);
    }
}

// Counts the passes that a warp needs beyond the first, when the 8 rows of a matrix share banks: 16 bytes are four
// of the 32 banks.
NOT_SANITIZED inline void count_conflicts_of_rows(const void *const (&slots)[32], unsigned matrix) {
    unsigned rows_in[8] = {}, most = 1;
    for (unsigned row = 0; row < 8; ++row) {
        const std::size_t offset = shared_offset(*static_cast<const void *const *>(slots[8 * matrix + row]));
        bool is_repeated = false;
        for (unsigned before = 0; before < row; ++before) {
            is_repeated |= shared_offset(*static_cast<const void *const *>(slots[8 * matrix + before])) == offset;
        }
        const unsigned rows = is_repeated ? 0 : ++rows_in[offset / 16 % 8];
        most = rows > most ? rows : most;
    }
    count_bank_conflicts(most - 1);
}

// Reads N matrices of 8 × 8 elements. Lane 8 · i + r gives the address of row r of matrix i, and lane l gets two
// elements of each: (g, 2t) and (g, 2t + 1), or transposed.
template <unsigned N, bool kTransposed> NOT_SANITIZED void load_matrices(u32 (&to)[N], const void *row) {
    need_whole_warps();
    const unsigned lane = position.thread.x % 32, g = lane / 4, t = lane % 4;
    if (lane < 8 * N && shared_offset(row) % 16 != 0) fail("a row of ldmatrix is not aligned to 16 bytes");
    std::memcpy(exchange_slot(), &row, sizeof row);
    const void *slots[32];
    for (unsigned other = 0; other < 32; ++other) slots[other] = exchange_slot_of(other);
    sync_warp(WarpOp::kLoadMatrix);
    for (unsigned i = 0; i < N; ++i) {
        if (lane == 0) count_conflicts_of_rows(slots, i);
        u16 elements[2];
        for (unsigned half = 0; half < 2; ++half) {
            const unsigned pair = 2 * t + half;
            const auto *from = *static_cast<const u16 *const *>(slots[8 * i + (kTransposed ? pair : g)]);
            from += kTransposed ? g : pair;
            check_access(from, sizeof(u16), false);
            std::memcpy(&elements[half], from, sizeof(u16));
        }
        std::memcpy(&to[i], elements, sizeof elements);
    }
}

}  // namespace emulation
