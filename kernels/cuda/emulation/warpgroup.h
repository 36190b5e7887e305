// Models of the instructions of `wgmma.cuh`.
//
// Written after the PTX ISA ("Asynchronous Warpgroup Level Matrix Instructions"): the register fragments of
// wgmma.mma_async.m64nNk16, the canonical layouts of matrices in shared memory, and the matrix descriptor. The sum of a
// product is rounded once; how a GPU rounds within it is not documented.
//
// A product is computed at the wait that covers it, from what shared memory contains then. Until then its accumulators
// are NaN. Registers must not change between their fence and the product, nor until the wait; that is found by
// comparison.

#pragma once

#include "emulation.h"

#include <initializer_list>

namespace emulation {

struct Registers {
    const void *first;
    std::size_t bytes;
};

// A wgmma.fence for these registers of this thread.
void fence_registers(std::initializer_list<Registers> registers);
void commit_products();
void wait_for_products(unsigned pending);
// A fence.proxy.async: products and TMA may access what this thread has written so far.
void fence_async_proxy();

// A setmaxnreg.
void set_registers(unsigned count);
// A bar.sync of a warpgroup.
void sync_warpgroup();

// Operand A of a product: four registers, or a descriptor.
struct OperandA {
    const u32 *registers;
    u64 descriptor;
};

// Starts a product of 64 rows, `columns` columns and depth 16. `value_of` is that of an element. B has adjacent
// columns if A is in registers, and else, like A, adjacent elements along the depth: the two forms that kernels use.
void start_product(float *c, unsigned columns, OperandA a, u64 b, bool accumulate, float (*value_of)(u16));

template <typename T> float value_of_bits(u16 bits) { return widen(T{bits}); }

template <typename T> void multiply_shared(float *c, unsigned columns, u64 a, u64 b, bool accumulate) {
    start_product(c, columns, {nullptr, a}, b, accumulate, value_of_bits<T>);
}
template <typename T> void multiply_registers(float *c, unsigned columns, const u32 (&a)[4], u64 b) {
    start_product(c, columns, {a, 0}, b, true, value_of_bits<T>);
}

}  // namespace emulation
