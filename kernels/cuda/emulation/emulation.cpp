// The scheduler of emulated blocks; see emulation.h.

#include "state.h"
#include "tma.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <numeric>
#include <stdexcept>
#include <unordered_map>

namespace emulation {

thread_local Block block;

namespace {

constexpr std::size_t kMaxFailureBytes = 512;

// Never destroyed: when a process ends, its other threads may still launch kernels.
std::unordered_map<std::string, Entry> &entries() {
    static auto &all = *new std::unordered_map<std::string, Entry>;
    return all;
}

Thread &current() { return block.threads[block.current]; }

// Makes the next thread of the warp that is ready the current one. Returns false if none is left.
bool take_turn() {
    while (block.next_turn < block.num_turns) {
        const unsigned thread = block.turns[block.next_turn++];
        if (block.states[thread] != State::kReady) continue;
        block.current = thread;
        position.thread = {thread, 0, 0};
        return true;
    }
    return false;
}

// The next three functions stay apart: a jump must not lead into the function that makes it.
[[noreturn, gnu::noinline]] void go_to_scheduler() { __builtin_longjmp(block.scheduler, 1); }

// Goes on with the next thread of the warp, or with the scheduler if none is ready.
[[noreturn, gnu::noinline]] void go_on() {
    if (!take_turn()) go_to_scheduler();
    if (current().fiber == nullptr) {
        current().fiber = block.idle.back();
        block.idle.pop_back();
    }
    Fiber &fiber = *current().fiber;
    running.is_in_kernel = false;
    running.stack = fiber.stack.get();
    if (fiber.is_started) __builtin_longjmp(fiber.here, 1);
    fiber.is_started = true;
    setcontext(&fiber.start);
    std::abort();
}

// Lets others run until this fiber has its turn again.
[[gnu::noinline]] void stop(Fiber &fiber) {
    if (__builtin_setjmp(fiber.here) == 0) go_on();
}

// Runs the kernel repeatedly, each time for the current thread.
void fiber_main() {
    for (;;) {
        current().copies.clear();
        current().groups = 0;
        current().products.clear();
        current().product_groups = current().num_products = 0;
        current().accumulators.clear();
        current().fenced.clear();
        block.entry->run(block.arguments);
        running.is_in_kernel = false;
        block.states[block.current] = State::kDone;
        Fiber &fiber = *current().fiber;
        block.idle.push_back(&fiber);
        stop(fiber);
    }
}

void prepare(Fiber &fiber) {
    fiber.stack.reset(new char[Fiber::kStackBytes]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = Fiber::kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, fiber_main, 0);
}

unsigned count(unsigned begin, unsigned end, State state) {
    return std::count(block.states.begin() + begin, block.states.begin() + end, state);
}

void release(unsigned begin, unsigned end) {
    std::fill(block.states.begin() + begin, block.states.begin() + end, State::kReady);
}

// Releases a warp if all its lanes have reached the same instruction.
bool release_warp(unsigned begin, unsigned end) {
    if (count(begin, end, State::kAtWarp) != end - begin) return false;
    const WarpOp op = block.threads[begin].op;
    for (unsigned i = begin; i < end; ++i) {
        if (block.threads[i].op != op) throw std::runtime_error("the lanes of a warp are at different instructions");
    }
    if (op == WarpOp::kSync) block.shared.warp_barrier(begin / kWarpSize);
    release(begin, end);
    return true;
}

// Releases the warpgroups all of whose threads have reached the same instruction. Returns whether there is one.
bool release_warpgroups() {
    bool is_any = false;
    for (unsigned begin = 0; begin + kWarpgroupSize <= position.block_size.x; begin += kWarpgroupSize) {
        const unsigned end = begin + kWarpgroupSize;
        if (count(begin, end, State::kAtWarpgroup) != kWarpgroupSize) continue;
        const WarpgroupCall &call = block.threads[begin].call;
        for (unsigned i = begin; i < end; ++i) {
            const WarpgroupCall &other = block.threads[i].call;
            if (other.instruction != call.instruction || other.operands != call.operands) {
                throw std::runtime_error("the threads of a warpgroup are at different instructions or operands");
            }
        }
        if (call.instruction == kWarpgroupBarrier) block.shared.warpgroup_barrier(begin / kWarpSize);
        release(begin, end);
        is_any = true;
    }
    return is_any;
}

// Releases the threads of a block if all have reached its barrier. Returns false once all threads have ended.
bool release_block() {
    const unsigned threads = position.block_size.x;
    if (count(0, threads, State::kDone) == threads) return false;
    if (count(0, threads, State::kAtBlock) != threads) {
        throw std::runtime_error("a barrier, a shuffle or a product is not reached by all threads it needs, or a phase of an mbarrier never ends");
    }
    block.shared.block_barrier();
    release(0, threads);
    return true;
}

// Calls `run` with 0 … n − 1: ascending with seed 0, otherwise in another order each time.
template <typename F> void in_order(std::uint64_t n, F run) {
    if (block.seed == 0) {
        for (std::uint64_t i = 0; i < n; ++i) run(i);
        return;
    }
    std::vector<std::uint64_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    for (std::uint64_t i = n; i > 1; --i) std::swap(order[i - 1], order[block.draw() % i]);
    for (const std::uint64_t i : order) run(i);
}

// Runs each thread of a warp until it waits or ends.
[[gnu::noinline]] void run_warp(unsigned begin, unsigned end) {
    block.num_turns = block.next_turn = 0;
    in_order(end - begin, [begin](std::uint64_t lane) { block.turns[block.num_turns++] = begin + lane; });
    if (__builtin_setjmp(block.scheduler) == 0) go_on();
    if (!block.failure.empty()) throw std::runtime_error(block.failure);
}

// Warps run one after another up to a barrier of the block, so that their stacks stay in the cache.
void run_block() {
    const unsigned threads = position.block_size.x;
    block.shared.begin_block();
    block.mbarriers.clear();
    for (auto &of_warpgroup : block.decoded) {
        for (DecodedOperand &decoded : of_warpgroup) decoded.number = 0;
    }
    release(0, threads);
    for (unsigned i = 0; i < threads; ++i) block.threads[i].fiber = nullptr;
    do {
        in_order((threads + kWarpSize - 1) / kWarpSize, [threads](std::uint64_t warp) {
            const unsigned begin = warp * kWarpSize, end = std::min(begin + kWarpSize, threads);
            do run_warp(begin, end);
            while (release_warp(begin, end));
        });
    } while (release_warpgroups() || advance_copies() || release_block());
}

void run_grid(const unsigned grid[3]) {
    in_order(static_cast<std::uint64_t>(grid[0]) * grid[1] * grid[2], [grid](std::uint64_t at) {
        position.block = {static_cast<unsigned>(at % grid[0]), static_cast<unsigned>(at / grid[0] % grid[1]),
                          static_cast<unsigned>(at / grid[0] / grid[1])};
        run_block();
    });
}

std::uint64_t seed_of_environment() {
    const char *text = std::getenv("ULYSSES_EMULATION_SEED");
    return text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
}

}  // namespace

Block::Block() {
    static const std::uint64_t from_environment = seed_of_environment();
    seed = random = from_environment;
}

// SplitMix64 (Steele, Lea & Flood 2014).
std::uint64_t Block::draw() {
    std::uint64_t x = random += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

void add_entry(const char *name, Entry entry) { entries().emplace(name, std::move(entry)); }

void begin_kernel() { running.is_in_kernel = true; }

void wait_at(State state) {
    block.states[block.current] = state;
    stop(*current().fiber);
    running.is_in_kernel = true;
}

void sync_block() { wait_at(State::kAtBlock); }

void sync_warp(WarpOp op) {
    current().op = op;
    wait_at(State::kAtWarp);
}

void meet_warpgroup(const char *instruction, u64 operands) {
    current().call = {instruction, operands};
    wait_at(State::kAtWarpgroup);
}

void sync_warpgroup() { meet_warpgroup(kWarpgroupBarrier, 0); }

void *exchange_slot() {
    current().slot ^= 1;
    return current().slots[current().slot];
}

const void *exchange_slot_of(unsigned lane) {
    const unsigned slot = current().slot;
    const unsigned thread = block.current / kWarpSize * kWarpSize + lane;
    return thread < position.block_size.x ? block.threads[thread].slots[slot] : current().slots[slot];
}

void *dynamic_shared() { return block.shared.dynamic(); }

void *static_shared(const void *declaration, std::size_t bytes) {
    void *array = block.shared.array(declaration, bytes);
    if (array == nullptr) {
        fail("a block has at most %zu KiB of static arrays, and %zu KiB with its dynamic ones",
             SharedMemory::kMaxStaticBytes / 1024, SharedMemory::kMaxBytes / 1024);
    }
    return array;
}

void fail(const char *format, ...) {
    char text[kMaxFailureBytes];
    const int used = std::snprintf(text, sizeof text, "thread %u of block (%u, %u, %u): ", position.thread.x,
                                   position.block.x, position.block.y, position.block.z);
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text + used, sizeof text - used, format, arguments);
    va_end(arguments);
    block.failure = text;
    running.is_in_kernel = false;
    // No destructor of the kernel runs: kernels own nothing.
    go_to_scheduler();
}

void check_access(const void *address, std::size_t bytes, bool is_write) {
    if (!is_sanitized) return;
    const char *verb = is_write ? "writes" : "reads";
    if (block.shared.contains(address)) {
        int other = -1;
        const char *fault = block.shared.access(position.thread.x, address, bytes, is_write, other);
        if (fault == nullptr) return;
        const std::size_t offset = block.shared.offset_of(address);
        if (other < 0) fail("%s %zu bytes of shared memory at %zu, %s", verb, bytes, offset, fault);
        fail("%s %zu bytes of shared memory at %zu, %s thread %d", verb, bytes, offset, fault, other);
    }
    const auto begin = reinterpret_cast<std::uint64_t>(address);
    const Memory *nearest = nullptr;
    for (const Memory &tensor : block.memory) {
        if (begin < tensor.begin || begin > tensor.end) continue;
        nearest = &tensor;
        if (begin + bytes <= tensor.end && (tensor.is_writable || !is_write)) {
            running.tensor = tensor;
            return;
        }
    }
    Dl_info constant;
    if (block.memory.empty() || (!is_write && dladdr(address, &constant) != 0)) return;
    if (nearest == nullptr) fail("%s %zu bytes outside of the tensors", verb, bytes);
    const bool is_outside = begin + bytes > nearest->end;
    fail("%s %zu bytes at byte %llu of a tensor of %llu bytes%s", verb, bytes,
         static_cast<unsigned long long>(begin - nearest->begin),
         static_cast<unsigned long long>(nearest->end - nearest->begin), is_outside ? "" : " that is read-only");
}

std::size_t shared_offset(const void *address) {
    if (!block.shared.contains(address)) fail("the address is not in shared memory");
    return block.shared.offset_of(address);
}

void count_bank_conflicts(unsigned conflicts) { block.bank_conflicts += conflicts; }

void copy_async(void *to, const void *from, unsigned bytes, unsigned source_bytes) {
    if (shared_offset(to) % bytes != 0 || reinterpret_cast<std::uint64_t>(from) % bytes != 0) {
        fail("cp.async of %u bytes at an address that is not a multiple of that", bytes);
    }
    if (source_bytes > bytes) fail("cp.async of %u bytes that reads %u", bytes, source_bytes);
    check_access(to, bytes, true);
    if (source_bytes > 0) check_access(from, source_bytes, false);
    std::memset(to, 0xff, bytes);
    if (is_sanitized) block.shared.begin_copy(to, bytes);
    current().copies.push_back({to, from, bytes, source_bytes, current().groups});
}

void commit_copies() { ++current().groups; }

void wait_for_copies(unsigned pending) {
    std::vector<AsyncCopy> &copies = current().copies;
    auto copy = copies.begin();
    for (; copy != copies.end() && copy->group + pending < current().groups; ++copy) {
        if (is_sanitized) block.shared.end_copy(copy->to, copy->bytes);
        // The target is written now, so other threads need a barrier after the wait.
        check_access(copy->to, copy->bytes, true);
        std::memset(copy->to, 0, copy->bytes);
        std::memcpy(copy->to, copy->from, copy->source_bytes);
    }
    copies.erase(copies.begin(), copy);
}

}  // namespace emulation

extern "C" {

// The parameters of a kernel, or null if there is no kernel of that name.
const char *ulysses_emulation_signature(const char *name) {
    const auto found = emulation::entries().find(name);
    return found == emulation::entries().end() ? nullptr : found->second.signature.c_str();
}

// Sets the memory that the next launches of this thread may access. Without, all memory may be accessed.
void ulysses_emulation_set_memory(const emulation::Memory *memory, std::size_t count) {
    emulation::block.memory.assign(memory, memory + count);
    emulation::running.tensor = {};
}

// Sets the order of blocks and threads in this thread's launches: 0 is ascending, others are random.
void ulysses_emulation_set_seed(std::uint64_t seed) { emulation::block.seed = emulation::block.random = seed; }

// Number of bank conflicts of the tensor-core instructions in this thread's launches since the last call.
std::uint64_t ulysses_emulation_bank_conflicts() { return std::exchange(emulation::block.bank_conflicts, 0); }

// Runs a kernel over a grid of one-dimensional blocks. Returns null, or an error message that lives until the
// next launch of this thread.
const char *ulysses_emulation_launch(const char *name, const unsigned grid[3], unsigned threads,
                                     std::size_t shared_bytes, void **arguments) {
    using namespace emulation;
    const auto found = entries().find(name);
    if (found == entries().end()) return "there is no kernel of this name";
    if (threads == 0 || threads > 1024) return "a block has 1 to 1024 threads";
    if (shared_bytes > SharedMemory::kMaxBytes) return "a block has at most 227 KiB of shared memory";
    while (block.fibers.size() < threads) {
        block.fibers.push_back(std::make_unique<Fiber>());
        prepare(*block.fibers.back());
        block.idle.push_back(block.fibers.back().get());
    }
    block.threads.resize(block.fibers.size());
    block.states.resize(block.fibers.size());
    block.entry = &found->second;
    block.arguments = arguments;
    block.failure.clear();
    block.shared.begin_launch(shared_bytes);
    position.block_size = {threads, 1, 1};
    position.grid_size = {grid[0], grid[1], grid[2]};
    try {
        run_grid(grid);
    } catch (const std::exception &failure) {
        block.failure = failure.what();
        // The fibers are suspended in the middle of the kernel, so they are replaced by new ones.
        block.fibers.clear();
        block.idle.clear();
        block.tile_copies.clear();
        return block.failure.c_str();
    }
    return nullptr;
}
}
