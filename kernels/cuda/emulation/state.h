// The state of a host thread that runs emulated blocks, for the scheduler and the sanitizer.

#pragma once

#include "emulation.h"
#include "shared_memory.h"

#include <csetjmp>
#include <memory>
#include <ucontext.h>
#include <vector>

namespace emulation {

inline constexpr unsigned kWarpSize = 32;

enum class State { kReady, kAtWarp, kAtBlock, kDone };

struct AsyncCopy {
    void *to;
    const void *from;
    unsigned bytes, source_bytes, group;
};

struct Fiber {
    static constexpr std::size_t kStackBytes = 64 * 1024;

    std::unique_ptr<char[]> stack;
    ucontext_t start;
    // Switches by setjmp, since swapcontext would make a system call for the signal mask each time.
    jmp_buf here;
    bool is_started = false;
    State state = State::kDone;
    WarpOp op = WarpOp::kSync;
    // Exchanges of a warp alternate between two slots, because a lane may reach its next one before others have
    // read this one.
    alignas(8) unsigned char slots[2][kSlotBytes];
    unsigned slot = 0;
    // Asynchronous copies in order of issue, and the number of groups committed so far.
    std::vector<AsyncCopy> copies;
    unsigned groups = 0;
};

// Memory that a kernel may access, as `Memory` in `src/device/emulation.rs`.
struct Memory {
    std::uint64_t begin, end;
    std::uint32_t is_writable, reserved;
};

struct Block {
    Block();
    std::uint64_t draw();

    std::vector<std::unique_ptr<Fiber>> fibers;
    jmp_buf scheduler;
    unsigned current = 0;
    const Entry *entry = nullptr;
    void **arguments = nullptr;
    SharedMemory shared;
    std::vector<Memory> memory;
    std::string failure;
    std::uint64_t seed = 0, random = 0, bank_conflicts = 0;
};

extern thread_local Block block;

// What the sanitizer asks at every access.
struct Running {
    // Not while a fiber reads the kernel's arguments, nor in the scheduler.
    bool is_in_kernel;
    const char *stack;
    // The tensor that was last accessed.
    Memory tensor;
};
inline thread_local Running running{};

// Whether kernels are compiled with the sanitizer.
inline bool is_sanitized = false;

}  // namespace emulation
