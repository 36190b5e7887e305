// This project's kernels, run by kernels/cuda/emulation, and maps of the tensors that they read.

#include <memory>
#include <mutex>
#include <unordered_map>

#include "api.h"
#include "controls.h"
#include "modules.h"

extern "C" {
const char *ulysses_emulation_signature(const char *name);
const char *ulysses_emulation_launch(const char *name, const unsigned grid[3], unsigned threads,
                                     std::size_t shared_bytes, void **arguments);
const char *ulysses_emulation_encode_tensor(void *map, int type, unsigned rank, std::uint64_t address,
                                            const std::uint64_t *extents, const std::uint64_t *strides,
                                            const std::uint32_t *box, const std::uint32_t *element_strides, int interleave,
                                            int swizzle, int out_of_bounds);
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

FAKE_EXPORT CUresult cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const std::uint64_t *extents,
                                            const std::uint64_t *strides, const std::uint32_t *box,
                                            const std::uint32_t *element_strides, int interleave, int swizzle, int,
                                            int out_of_bounds) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (fake::context_of("cuTensorMapEncodeTiled") < 0) return CUDA_ERROR_INVALID_CONTEXT;
    const char *fault = ulysses_emulation_encode_tensor(map, type, rank, reinterpret_cast<std::uint64_t>(address), extents,
                                                        strides, box, element_strides, interleave, swizzle, out_of_bounds);
    if (fault == nullptr) return CUDA_SUCCESS;
    if (!fake::is_expected(fault)) fake::report("cuTensorMapEncodeTiled: %s", fault);
    return CUDA_ERROR_INVALID_VALUE;
}
