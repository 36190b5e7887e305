// GPUs, contexts and errors.

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "api.h"
#include "races.h"

namespace fake {
namespace {


// What kernels are chosen by.
struct Model {
    const char *capability;
    int major, minor, shared_kib;
};
constexpr Model kModels[] = {{"9.0", 9, 0, 228}, {"8.0", 8, 0, 164}};  // H100, A100

// So that little work fills a GPU.
constexpr int kOneMultiprocessor = 1;

// The GPUs' model, by FAKE_DRIVER_CAPABILITY.
const Model &model() {
    static const Model &chosen = []() -> const Model & {
        const char *asked = std::getenv("FAKE_DRIVER_CAPABILITY");
        if (asked == nullptr) return kModels[0];
        for (const Model &each : kModels) {
            if (std::strcmp(each.capability, asked) == 0) return each;
        }
        report("FAKE_DRIVER_CAPABILITY: expected 9.0 or 8.0, found `%s`", asked);
        return kModels[0];
    }();
    return chosen;
}

enum Attribute {
    kMaxThreadsPerBlock = 1,
    kMaxBlockX = 2,
    kMaxGridX = 5,
    kMaxGridY = 6,
    kMaxGridZ = 7,
    kMaxSharedBytes = 8,
    kWarpSize = 10,
    kMultiprocessors = 16,
    kUnifiedAddressing = 41,
    kCapabilityMajor = 75,
    kCapabilityMinor = 76,
    kMaxSharedBytesPerMultiprocessor = 81,
    kMaxSharedBytesOptIn = 97,
    kMemoryPools = 115,
};

bool is_initialized = false;
thread_local CUcontext current = nullptr;

// A context is its GPU's primary one, so its handle only has to tell GPUs apart.
struct Primary {
    int device;
    int users;
} primaries[kMaxGpus];

bool is_device(CUdevice device) { return is_initialized && 0 <= device && device < gpu_count(); }

struct ErrorText {
    CUresult code;
    const char *name, *text;
};
constexpr ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText *error_text(CUresult code) {
    for (const ErrorText &error : kErrors) {
        if (error.code == code) return &error;
    }
    return nullptr;
}

}  // namespace

unsigned max_shared_bytes() { return (model().shared_kib - 1) * 1024; }

int gpu_count() {
    static const int count = [] {
        const char *asked = std::getenv("FAKE_DRIVER_GPUS");
        const int gpus = asked ? std::atoi(asked) : 1;
        return gpus < 0 ? 0 : gpus > kMaxGpus ? kMaxGpus : gpus;
    }();
    return count;
}

__attribute__((visibility("default"))) int current_device() {
    return current ? reinterpret_cast<Primary *>(current)->device : -1;
}

int context_of(const char *function) {
    const int device = current_device();
    if (device < 0) report("%s without a current context", function);
    return device;
}

}  // namespace fake

using namespace fake;

FAKE_EXPORT CUresult cuInit(unsigned flags) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (gpu_count() == 0) return CUDA_ERROR_NO_DEVICE;
    is_initialized = true;
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDriverGetVersion(int *version) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    const char *asked = std::getenv("FAKE_DRIVER_VERSION");
    *version = asked ? std::atoi(asked) : 13000;
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceGetCount(int *count) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (!is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    *count = gpu_count();
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (!is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, length, "Fake H100");
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceGetUuid_v2(unsigned char uuid[16], CUdevice device) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    std::memset(uuid, 0xfa, 16);
    uuid[15] = static_cast<unsigned char>(device);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceGetUuid(unsigned char uuid[16], CUdevice device) {
    return cuDeviceGetUuid_v2(uuid, device);
}

FAKE_EXPORT CUresult cuDeviceTotalMem_v2(std::size_t *bytes, CUdevice device) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = total_bytes();
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
    case kMaxThreadsPerBlock:
    case kMaxBlockX: *value = 1024; break;
    case kMaxGridX: *value = 0x7fffffff; break;
    case kMaxGridY:
    case kMaxGridZ: *value = 65535; break;
    case kMaxSharedBytes: *value = 48 * 1024; break;
    case kWarpSize: *value = 32; break;
    case kMultiprocessors: *value = kOneMultiprocessor; break;
    case kUnifiedAddressing: *value = 1; break;
    case kMemoryPools: *value = has_memory_pools(); break;
    case kCapabilityMajor: *value = model().major; break;
    case kCapabilityMinor: *value = model().minor; break;
    case kMaxSharedBytesPerMultiprocessor: *value = model().shared_kib * 1024; break;
    case kMaxSharedBytesOptIn: *value = max_shared_bytes(); break;
    default:
        report("cuDeviceGetAttribute: the fake driver does not know attribute %d", attribute);
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (!is_device(device) || !is_device(peer)) return CUDA_ERROR_INVALID_DEVICE;
    *can = device != peer;
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    const Lock lock(lock_of_driver);
    Primary &primary = primaries[device];
    primary.device = device;
    ++primary.users;
    *context = reinterpret_cast<CUcontext>(&primary);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    const Lock lock(lock_of_driver);
    if (primaries[device].users == 0) return CUDA_ERROR_INVALID_CONTEXT;
    --primaries[device].users;
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    *context = current;
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    current = context;
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    *device = context_of("cuCtxGetDevice");
    return *device < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuCtxSetFlags(unsigned) { return CUDA_SUCCESS; }

FAKE_EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuCtxSynchronize() {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    const int device = context_of("cuCtxSynchronize");
    if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    Lock lock(lock_of_driver);
    finish_device(lock, device);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    const int device = context_of("cuCtxEnablePeerAccess");
    if (device < 0 || peer == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    const Lock lock(lock_of_driver);
    const int to = reinterpret_cast<Primary *>(peer)->device;
    if (has_peer_access(device, to)) return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    enable_peer_access(device, to);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuGetErrorName(CUresult code, const char **text) {
    const ErrorText *error = error_text(code);
    *text = error ? error->name : nullptr;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

FAKE_EXPORT CUresult cuGetErrorString(CUresult code, const char **text) {
    const ErrorText *error = error_text(code);
    *text = error ? error->text : nullptr;
    return error ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
