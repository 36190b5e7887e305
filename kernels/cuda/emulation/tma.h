// Models of the instructions of `tma.cuh`.
//
// Written after the PTX ISA ("mbarrier", "Tensors", "cp.async.bulk.tensor") and the CUDA driver API
// (cuTensorMapEncodeTiled). A copy is made as late as possible: when no thread can go on and one waits for it. With a
// seed, such copies are made in random order. Until then the target is NaN. Only maps of 16-bit floats with four dimensions and a swizzle of 128 bytes are modeled.

#pragma once

#include "emulation.h"

#include <array>

namespace emulation {

// An mbarrier.init for phases of `count` arrivals.
void mbarrier_init(u64 *barrier, unsigned count);
// An arrival at the current phase, which then also waits for `bytes` of copies.
void mbarrier_arrive(u64 *barrier, unsigned bytes);
// Stops this fiber until the phase is complete. It fails if the phase is neither the current one nor the last one: a GPU
// knows only its parity.
void mbarrier_wait(u64 *barrier, unsigned phase);

// A cp.async.bulk.tensor of the tile at these indices, the innermost first.
void tma_copy(void *to, const u64 (&map)[16], std::array<unsigned, 4> indices, u64 *barrier);

// Wakes the threads whose phases are complete; else makes the oldest copy. Returns whether there was something to do.
bool advance_copies();

}  // namespace emulation
