// Kernels: what the fake NVRTC and the fake driver agree on.

#pragma once

#include <string>
#include <vector>

#include "stream.h"

namespace fake {

// A "cubin" is this line, then the names of its kernels, one per line.
constexpr char kCubinHeader[] = "fake cubin\n";

// What a launch runs, on arguments that were copied when it was queued.
struct Kernel {
    std::string name;
    // As in emulation.h: `W4` `R2` `u4` `U8` `i4` `f4` `s24`.
    std::string signature;
    // Runs the grid. Returns null or what went wrong.
    std::function<const char *(const unsigned grid[3], unsigned threads, unsigned shared_bytes, void **arguments)> run;
};

// A kernel of this project, run by its emulation, or one of candle's, written by hand. Null if there is none.
const Kernel *kernel_of_project(const std::string &name);
const Kernel *kernel_of_candle(const std::string &name);

// What a launch accesses: per pointer, from it to the end of its allocation. Called with the driver's lock held.
std::vector<Range> accessed_ranges(const Kernel &kernel, void *const *arguments);

// The size in bytes of each parameter.
std::vector<std::size_t> parameter_sizes(const Kernel &kernel);

}  // namespace fake
