// Modules, functions and launches.

#include <cstring>
#include <memory>
#include <unordered_map>

#include "api.h"
#include "controls.h"
#include "modules.h"

using namespace fake;

namespace {

constexpr int kMaxSharedSizeAttribute = 8;
constexpr unsigned kDefaultSharedBytes = 48 * 1024;
constexpr unsigned kMaxGridYZ = 65535, kMaxThreads = 1024;

struct Function {
    const Kernel *kernel;
    int device;
    unsigned shared_limit = kDefaultSharedBytes;
};

// A module of this project's kernels has all of them. One of candle's is empty text (gpu/nvcc-for-check compiles
// nothing), and finds its kernels by name.
struct Module {
    int device;
    bool is_candle;
    std::unordered_map<std::string, std::unique_ptr<Function>> functions;
};

Module *module_of(CUmodule handle) { return reinterpret_cast<Module *>(handle); }
Function *function_of(CUfunction handle) { return reinterpret_cast<Function *>(handle); }

// The arguments of a queued launch, copied from the caller's.
struct Arguments {
    std::vector<std::vector<unsigned char>> bytes;
    std::vector<void *> pointers;
};

std::shared_ptr<Arguments> copy_arguments(const Kernel &kernel, void **given) {
    auto copied = std::make_shared<Arguments>();
    for (const std::size_t size : parameter_sizes(kernel)) {
        const auto *from = static_cast<const unsigned char *>(given[copied->bytes.size()]);
        copied->bytes.emplace_back(from, from + size);
    }
    for (auto &argument : copied->bytes) copied->pointers.push_back(argument.data());
    return copied;
}

}  // namespace

FAKE_EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    const int device = context_of("cuModuleLoadData");
    if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    check_load("a module");
    const char *text = static_cast<const char *>(image);
    auto made = std::make_unique<Module>();
    made->device = device;
    made->is_candle = text[0] == '\0';
    if (!made->is_candle) {
        const std::size_t header = sizeof kCubinHeader - 1;
        if (std::strncmp(text, kCubinHeader, header) != 0) return CUDA_ERROR_INVALID_IMAGE;
        text += header;
        const std::string call = "cuModuleLoadData(" + std::string(text, std::strcspn(text, "\n")) + ")";
        MAY_FAIL_AS(call.c_str(), CUDA_ERROR_INVALID_IMAGE);
        while (*text != '\0') {
            const char *end = std::strchr(text, '\n');
            const std::string name(text, end);
            text = end + 1;
            const Kernel *kernel = kernel_of_project(name);
            if (kernel == nullptr) {
                report("the emulation has no kernel %s", name.c_str());
                return CUDA_ERROR_INVALID_IMAGE;
            }
            made->functions[name] = std::make_unique<Function>(Function{kernel, device});
        }
    }
    *module = reinterpret_cast<CUmodule>(made.release());
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuModuleUnload(CUmodule module) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    // Queued launches may still use its kernels, so it stays.
    return module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

FAKE_EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule handle, const char *name) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    Lock lock(lock_of_driver);
    Module &module = *module_of(handle);
    auto found = module.functions.find(name);
    if (found == module.functions.end()) {
        lock.unlock();
        check_load(name);
        lock.lock();
        const Kernel *kernel = module.is_candle ? kernel_of_candle(name) : nullptr;
        if (kernel == nullptr) {
            report("cuModuleGetFunction: there is no kernel %s", name);
            return CUDA_ERROR_NOT_FOUND;
        }
        found = module.functions.emplace(name, std::make_unique<Function>(Function{kernel, module.device})).first;
    }
    *function = reinterpret_cast<CUfunction>(found->second.get());
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuModuleGetFunctionCount(unsigned *count, CUmodule module) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    *count = module_of(module)->functions.size();
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuModuleEnumerateFunctions(CUfunction *functions, unsigned count, CUmodule module) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    unsigned index = 0;
    for (const auto &[name, function] : module_of(module)->functions) {
        if (index < count) functions[index++] = reinterpret_cast<CUfunction>(function.get());
    }
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuFuncGetName(const char **name, CUfunction function) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    *name = function_of(function)->kernel->name.c_str();
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuFuncLoad(CUfunction) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (attribute != kMaxSharedSizeAttribute) {
        report("cuFuncSetAttribute: the fake driver does not know attribute %d", attribute);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (value < 0 || static_cast<unsigned>(value) > max_shared_bytes()) return CUDA_ERROR_INVALID_VALUE;
    function_of(function)->shared_limit = value;
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuLaunchKernel(CUfunction handle, unsigned x, unsigned y, unsigned z, unsigned threads,
                                    unsigned threads_y, unsigned threads_z, unsigned shared_bytes, CUstream stream_handle,
                                    void **parameters, void **extra) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    const Function &function = *function_of(handle);
    const Kernel &kernel = with_fault_of_thread(*function.kernel);
    if (extra != nullptr || threads_y != 1 || threads_z != 1) {
        report("%s: the fake driver launches one-dimensional blocks with an array of parameters", kernel.name.c_str());
        return CUDA_ERROR_INVALID_VALUE;
    }
    // What a driver refuses too.
    if (x == 0 || y == 0 || z == 0 || x > 0x7fffffffu || y > kMaxGridYZ || z > kMaxGridYZ || threads == 0 ||
        threads > kMaxThreads || shared_bytes > function.shared_limit) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Lock lock(lock_of_driver);
    Stream *stream = stream_of(stream_handle, kernel.name.c_str());
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (function.device != stream->device) {
        report("%s of GPU %d is launched on a stream of GPU %d", kernel.name.c_str(), function.device, stream->device);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    const auto arguments = copy_arguments(kernel, parameters);
    count_call(kernel.name.c_str());
    const auto ranges = accessed_ranges(kernel, arguments->pointers.data());
    const auto launch = with_controls_of_thread(ranges, [&kernel, arguments, x, y, z, threads, shared_bytes] {
        const unsigned grid[3] = {x, y, z};
        return kernel.run(grid, threads, shared_bytes, arguments->pointers.data());
    });
    Operation operation;
    operation.name = kernel.name;
    operation.run = [&kernel, launch] {
        const char *failure = launch();
        if (failure != nullptr) report("%s: %s", kernel.name.c_str(), failure);
    };
    return submit(lock, stream, std::move(operation), ranges) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}
