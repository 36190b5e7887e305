// The state of a host thread that runs emulated blocks, for the scheduler and the sanitizer.

#pragma once

#include "emulation.h"
#include "shared_memory.h"

#include <array>
#include <deque>
#include <memory>
#include <stdexcept>
#include <ucontext.h>
#include <vector>

namespace emulation {

inline constexpr unsigned kWarpSize = 32, kWarpgroupSize = 128;

enum class State : unsigned char { kReady, kAtWarp, kAtWarpgroup, kAtMbarrier, kAtBlock, kDone };

// Where a switch between stacks continues. The compiler's setjmp saves what a switch needs; that of the C library takes
// several times as long, and swapcontext makes a system call for the signal mask.
using Jump = void *[5];

struct AsyncCopy {
    void *to;
    const void *from;
    unsigned bytes, source_bytes, group;
};

// A wgmma.mma_async in flight, of the thread whose accumulators are `c`.
struct Product {
    float *c;
    // Operand A in registers: this thread's, and those of the four lanes that share its rows; else a descriptor.
    const u32 *registers;
    u64 a, b;
    u32 own[4], fragments[4][4];
    unsigned columns, group;
    bool has_a_in_registers, accumulate;
    float (*value_of)(u16);
    // Of this thread's products, from 1 on: the same in all threads of the warpgroup.
    unsigned number;
};

// Operand B of a product by its number, for all threads of a warpgroup.
struct DecodedOperand {
    unsigned number = 0;
    std::vector<float> values;
};
inline constexpr unsigned kMaxDecoded = 64;

// Accumulators in flight: where they are, their values so far, and the number of products that are to be added.
struct Accumulators {
    float *registers;
    std::vector<float> values;
    unsigned in_flight;
};

// What registers contained at a wgmma.fence.
struct FencedRegisters {
    const char *first;
    std::vector<char> content;
};

// A warpgroup's instruction, with a number that is the same in all threads.
struct WarpgroupCall {
    const char *instruction;
    u64 operands;
};

// A barrier in shared memory: the arrivals that a phase has and that the current one still waits for; how many phases are
// complete; the thread that counts as the writer of its copies; the bytes that the phase waits for; and what the arrivals
// and copies of the current phase and of the last one made visible.
struct Mbarrier {
    const u64 *address;
    unsigned count, missing, phase, writer;
    long long bytes;
    WarpTimes seen_by_arrivals, seen;
};

// What a tensor map of the emulation contains, in elements; strides in bytes.
inline constexpr unsigned kTensorRank = 4;
struct EncodedTensor {
    u64 mark, address, extents[kTensorRank], strides[kTensorRank - 1];
    u32 box[kTensorRank], reserved;
};
static_assert(sizeof(EncodedTensor) <= 128, "the size of a CUtensorMap");

// A cp.async.bulk.tensor in flight.
struct TileCopy {
    void *to;
    EncodedTensor tensor;
    std::array<unsigned, kTensorRank> indices;
    Mbarrier *barrier;
};

// A stack on which threads run, one after another unless they wait.
struct Fiber {
    // Not a power of two: else the tops of all stacks would compete for a few sets of the caches.
    static constexpr std::size_t kStackBytes = 64 * 1024 + 17 * 64;

    std::unique_ptr<char[]> stack;
    ucontext_t start;
    Jump here;
    bool is_started = false;
};

struct Thread {
    Fiber *fiber = nullptr;  // once it has begun
    WarpOp op = WarpOp::kSync;
    // Exchanges of a warp alternate between two slots, because a lane may reach its next one before others have
    // read this one.
    alignas(8) unsigned char slots[2][kSlotBytes];
    unsigned slot = 0;
    // Asynchronous copies in order of issue, and the number of groups committed so far.
    std::vector<AsyncCopy> copies;
    unsigned groups = 0;
    // The same for products of the warpgroup.
    std::vector<Product> products;
    unsigned product_groups = 0, num_products = 0;
    std::vector<Accumulators> accumulators;
    std::vector<FencedRegisters> fenced;
    WarpgroupCall call = {};
    // What it waits for.
    const Mbarrier *mbarrier = nullptr;
    unsigned phase = 0;
};

// Memory that a kernel may access, as `Memory` in `src/device/cuda/fake_driver.rs`.
struct Memory {
    std::uint64_t begin, end;
    std::uint32_t is_writable, reserved;
};

struct Block {
    Block();
    std::uint64_t draw();

    // As many as the largest block has had threads, and those of them that run none.
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Fiber *> idle;
    std::vector<Thread> threads;
    // Apart from the threads, because the scheduler reads all of them at every barrier.
    std::vector<State> states;
    Jump scheduler;
    unsigned current = 0;
    // The threads of the current warp in the order in which they run, and how many had their turn.
    unsigned turns[kWarpSize], num_turns = 0, next_turn = 0;
    const Entry *entry = nullptr;
    void **arguments = nullptr;
    SharedMemory shared;
    std::vector<Memory> memory;
    DecodedOperand decoded[1024 / kWarpgroupSize][kMaxDecoded];
    std::deque<Mbarrier> mbarriers;
    std::deque<TileCopy> tile_copies;
    std::string failure;
    std::uint64_t seed = 0, random = 0, bank_conflicts = 0;
};

extern thread_local Block block;

// Stops this fiber until the scheduler wakes it.
void wait_at(State state);

// The instruction that orders accesses of a warpgroup.
inline constexpr const char *kWarpgroupBarrier = "bar.sync";
// Stops this fiber until all threads of its warpgroup have reached the same instruction.
void meet_warpgroup(const char *instruction, u64 operands);

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
