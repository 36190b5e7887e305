// Functions that this project's tests look up in the fake libcuda: a real one has none of them. Each is for the launches
// that the calling thread makes from then on.

#include "controls.h"

#include <cstdlib>
#include <mutex>
#include <string>
#include <utility>

extern "C" {
void ulysses_emulation_set_memory(const fake::KernelMemory *memory, std::size_t count);
void ulysses_emulation_set_seed(std::uint64_t seed);
std::uint64_t ulysses_emulation_bank_conflicts();
}

namespace fake {
namespace {

// What launches of a thread leave behind.
struct Results {
    std::mutex lock;
    std::uint64_t bank_conflicts = 0;
    bool expects_failure = false;
    std::string failure;

    bool take(const char *message) {
        const std::lock_guard<std::mutex> guard(lock);
        if (expects_failure && failure.empty()) failure = message;
        return expects_failure;
    }
};

std::uint64_t seed_of_environment() {
    const char *text = std::getenv("ULYSSES_EMULATION_SEED");
    return text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
}

struct Controls {
    std::uint64_t seed = seed_of_environment(), launches = 0;
    std::string fault;
    std::vector<KernelMemory> memory;
    std::shared_ptr<Results> results = std::make_shared<Results>();
    std::string failure;  // that the caller has taken
};
thread_local Controls controls;

// 0 is ascending order. Else each launch has another order, and the same one again after the same seed is set.
std::uint64_t next_seed() {
    return controls.seed == 0 ? 0 : controls.seed + 0x9e3779b97f4a7c17u * ++controls.launches;
}

std::vector<KernelMemory> memory_of(const std::vector<Range> &ranges) {
    if (!controls.memory.empty()) return controls.memory;
    std::vector<KernelMemory> memory;
    for (const Range &range : ranges) memory.push_back({range.begin, range.begin + range.bytes, range.written, 0});
    return memory;
}

}  // namespace

const Kernel &with_fault_of_thread(const Kernel &kernel) {
    const Kernel *faulty = controls.fault.empty() ? nullptr : kernel_of_project(controls.fault + "_" + kernel.name);
    return faulty == nullptr ? kernel : *faulty;
}

bool is_expected(const char *failure) { return controls.results->take(failure); }

std::function<const char *()> with_controls_of_thread(const std::vector<Range> &ranges, std::function<const char *()> launch) {
    return [seed = next_seed(), memory = memory_of(ranges), results = controls.results, launch]() -> const char * {
        ulysses_emulation_set_seed(seed);
        ulysses_emulation_set_memory(memory.data(), memory.size());
        const char *failure = launch();
        const bool is_expected = failure != nullptr && results->take(failure);
        const std::lock_guard<std::mutex> guard(results->lock);
        results->bank_conflicts += ulysses_emulation_bank_conflicts();
        return is_expected ? nullptr : failure;
    };
}

}  // namespace fake

using fake::controls;

// The order of blocks and threads: 0 is ascending, others are random.
FAKE_EXPORT void ulysses_fake_set_seed(std::uint64_t seed) {
    controls.seed = seed;
    controls.launches = 0;
}

// The name of a fault of kernels/cuda/tests/attention_faults.txt, or nothing.
FAKE_EXPORT void ulysses_fake_set_fault(const char *fault) { controls.fault = fault; }

// The memory that kernels may access. None means the allocations that their parameters point to.
FAKE_EXPORT void ulysses_fake_set_memory(const fake::KernelMemory *memory, std::size_t count) {
    controls.memory.assign(memory, memory + count);
}

// The parameters of a kernel in the notation of emulation.h, or null if there is no kernel of this name.
FAKE_EXPORT const char *ulysses_fake_signature(const char *kernel) {
    const fake::Kernel *found = fake::kernel_of_project(kernel);
    return found == nullptr ? nullptr : found->signature.c_str();
}

// Bank conflicts of tensor-core instructions in the launches that have run since the last call.
FAKE_EXPORT std::uint64_t ulysses_fake_bank_conflicts() {
    const std::lock_guard<std::mutex> guard(controls.results->lock);
    return std::exchange(controls.results->bank_conflicts, 0);
}

// From now on, a failure of a kernel is no fault of the program.
FAKE_EXPORT void ulysses_fake_expect_failure() {
    const std::lock_guard<std::mutex> guard(controls.results->lock);
    controls.results->expects_failure = true;
}

// Ends that, and returns the message of the first failure of a launch that has run, or nothing. It lives until the next
// call of this thread.
FAKE_EXPORT const char *ulysses_fake_take_failure() {
    const std::lock_guard<std::mutex> guard(controls.results->lock);
    controls.results->expects_failure = false;
    controls.failure = std::exchange(controls.results->failure, {});
    return controls.failure.c_str();
}
