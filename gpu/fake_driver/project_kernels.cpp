// This project's kernels, run by kernels/cuda/emulation.

#include <memory>
#include <mutex>
#include <unordered_map>

#include "modules.h"

extern "C" {
const char *ulysses_emulation_signature(const char *name);
const char *ulysses_emulation_launch(const char *name, const unsigned grid[3], unsigned threads,
                                     std::size_t shared_bytes, void **arguments);
}

namespace fake {

const Kernel *kernel_of_project(const std::string &name) {
    static std::mutex lock;
    static auto &known = *new std::unordered_map<std::string, std::unique_ptr<Kernel>>;
    const std::lock_guard<std::mutex> guard(lock);
    auto &found = known[name];
    if (found == nullptr) {
        const char *signature = ulysses_emulation_signature(name.c_str());
        if (signature == nullptr) return nullptr;
        const auto run = [name](const unsigned grid[3], unsigned threads, unsigned shared_bytes, void **arguments) {
            return ulysses_emulation_launch(name.c_str(), grid, threads, shared_bytes, arguments);
        };
        found = std::make_unique<Kernel>(Kernel{name, signature, run});
    }
    return found.get();
}

}  // namespace fake
