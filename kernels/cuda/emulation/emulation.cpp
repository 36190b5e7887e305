// The scheduler of emulated blocks; see emulation.h.

#include "emulation.h"

#include <csetjmp>
#include <memory>
#include <stdexcept>
#include <ucontext.h>
#include <unordered_map>
#include <vector>

namespace emulation {
namespace {

constexpr unsigned kWarpSize = 32;
constexpr std::size_t kStackBytes = 64 * 1024;
constexpr std::size_t kMaxSharedBytes = 227 * 1024;  // what a block of sm_90 can have

enum class State { kReady, kAtWarp, kAtBlock, kDone };

struct Fiber {
    std::unique_ptr<char[]> stack;
    ucontext_t start;
    // Switches by setjmp, since swapcontext would make a system call for the signal mask each time.
    jmp_buf here;
    bool is_started = false;
    State state = State::kDone;
    // Shuffles alternate between two slots, because a lane may reach its next shuffle before others have read
    // this one.
    alignas(8) unsigned char slots[2][8];
    unsigned slot = 0;
};

struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;
    jmp_buf scheduler;
    unsigned current = 0;
    const Entry *entry = nullptr;
    void **arguments = nullptr;
    std::vector<unsigned char> shared;
};

thread_local Block block;

std::unordered_map<std::string, Entry> &entries() {
    static std::unordered_map<std::string, Entry> all;
    return all;
}

// Runs the kernel repeatedly, once each time the scheduler resumes this fiber.
void fiber_main() {
    for (;;) {
        block.entry->run(block.arguments);
        Fiber &fiber = *block.fibers[block.current];
        fiber.state = State::kDone;
        if (_setjmp(fiber.here) == 0) _longjmp(block.scheduler, 1);
    }
}

void stop(State state) {
    Fiber &fiber = *block.fibers[block.current];
    fiber.state = state;
    if (_setjmp(fiber.here) == 0) _longjmp(block.scheduler, 1);
}

void prepare(Fiber &fiber) {
    fiber.stack.reset(new char[kStackBytes]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, fiber_main, 0);
}

// Runs thread `index` until it stops.
void resume(unsigned index) {
    Fiber &fiber = *block.fibers[index];
    block.current = index;
    thread_index = {index, 0, 0};
    if (_setjmp(block.scheduler) != 0) return;
    if (fiber.is_started) _longjmp(fiber.here, 1);
    fiber.is_started = true;
    setcontext(&fiber.start);
}

unsigned count(unsigned begin, unsigned end, State state) {
    unsigned found = 0;
    for (unsigned i = begin; i < end; ++i) found += block.fibers[i]->state == state;
    return found;
}

void release(unsigned begin, unsigned end) {
    for (unsigned i = begin; i < end; ++i) block.fibers[i]->state = State::kReady;
}

// Releases the threads that have all reached the same barrier. Returns false once all threads have ended.
bool release_those_who_met() {
    const unsigned threads = block_size.x;
    if (count(0, threads, State::kDone) == threads) return false;
    if (count(0, threads, State::kAtBlock) == threads) {
        release(0, threads);
        return true;
    }
    bool released = false;
    for (unsigned begin = 0; begin < threads; begin += kWarpSize) {
        const unsigned end = begin + kWarpSize < threads ? begin + kWarpSize : threads;
        if (count(begin, end, State::kAtWarp) == end - begin) {
            release(begin, end);
            released = true;
        }
    }
    if (!released) throw std::runtime_error("a barrier or shuffle is not reached by all threads");
    return true;
}

void run_block() {
    // Shared memory starts as NaN, so that a read before a write shows.
    std::fill(block.shared.begin(), block.shared.end(), 0xff);
    release(0, block_size.x);
    do {
        for (unsigned i = 0; i < block_size.x; ++i) {
            if (block.fibers[i]->state == State::kReady) resume(i);
        }
    } while (release_those_who_met());
}

}  // namespace

void add_entry(const char *name, Entry entry) { entries().emplace(name, std::move(entry)); }

void sync_block() { stop(State::kAtBlock); }
void sync_warp() { stop(State::kAtWarp); }

void *exchange_slot() {
    Fiber &fiber = *block.fibers[block.current];
    fiber.slot ^= 1;
    return fiber.slots[fiber.slot];
}

const void *exchange_slot_of(unsigned lane) {
    const unsigned slot = block.fibers[block.current]->slot;
    const unsigned thread = block.current / kWarpSize * kWarpSize + lane;
    if (thread >= block_size.x) return block.fibers[block.current]->slots[slot];
    return block.fibers[thread]->slots[slot];
}

void *dynamic_shared() { return block.shared.data(); }

}  // namespace emulation

extern "C" {

// The parameters of a kernel, or null if there is no kernel of that name.
const char *ulysses_emulation_signature(const char *name) {
    const auto found = emulation::entries().find(name);
    return found == emulation::entries().end() ? nullptr : found->second.signature.c_str();
}

// Runs a kernel over a grid of one-dimensional blocks. Returns null, or an error message.
const char *ulysses_emulation_launch(const char *name, const unsigned grid[3], unsigned threads,
                                     std::size_t shared_bytes, void **arguments) {
    using namespace emulation;
    const auto found = entries().find(name);
    if (found == entries().end()) return "there is no kernel of this name";
    if (threads == 0 || threads > 1024) return "a block has 1 to 1024 threads";
    if (shared_bytes > kMaxSharedBytes) return "a block has at most 227 KiB of shared memory";
    while (block.fibers.size() < threads) {
        block.fibers.push_back(std::make_unique<Fiber>());
        prepare(*block.fibers.back());
    }
    block.entry = &found->second;
    block.arguments = arguments;
    block.shared.resize(shared_bytes);
    block_size = {threads, 1, 1};
    grid_size = {grid[0], grid[1], grid[2]};
    try {
        for (unsigned z = 0; z < grid[2]; ++z) {
            for (unsigned y = 0; y < grid[1]; ++y) {
                for (unsigned x = 0; x < grid[0]; ++x) {
                    block_index = {x, y, z};
                    run_block();
                }
            }
        }
    } catch (const std::exception &) {
        // The fibers are suspended in the middle of the kernel, so they are replaced by new ones.
        block.fibers.clear();
        return "a barrier or a shuffle is not reached by all threads it needs";
    }
    return nullptr;
}
}
