// What a test sets for the launches that its thread makes from then on. They may run later and on another thread, so
// each launch keeps what was set when it was queued.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "modules.h"

namespace fake {

// As `Memory` of kernels/cuda/emulation/state.h.
struct KernelMemory {
    std::uint64_t begin, end;
    std::uint32_t is_writable, reserved;
};

// The kernel with the fault of this thread, if it has one, or the given one.
const Kernel &with_fault_of_thread(const Kernel &kernel);

// Whether this thread expects a failure. Then it gets the message.
bool is_expected(const char *failure);

// Wraps a launch: it runs in the order of blocks and threads that this thread has set, and may access only the memory
// that this thread has set or, without that, `ranges`. The result is null, or what went wrong and is not expected.
std::function<const char *()> with_controls_of_thread(const std::vector<Range> &ranges, std::function<const char *()> launch);

}  // namespace fake
