// Allocations and copies.

#include <cstring>

#include "api.h"
#include "races.h"

using namespace fake;

namespace {

std::uintptr_t address(const void *pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

Operation operation(std::string name, std::function<void()> run) {
    Operation made;
    made.name = std::move(name);
    made.run = std::move(run);
    return made;
}

std::string sized(const char *what, std::size_t bytes) { return std::string(what) + " of " + std::to_string(bytes) + " bytes"; }

bool is_page_locked(const void *pointer) {
    const Allocation *found = find(address(pointer));
    return found != nullptr && found->device == kPageLocked;
}

CUresult allocate_on(Stream *stream, CUdeviceptr *pointer, std::size_t bytes, Lock &lock) {
    Allocation *made = allocate(stream->device, bytes);
    if (made == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    *pointer = made->begin;
    // Uses on other streams must be ordered after it, like a write.
    submit(lock, stream, operation(sized("allocation", bytes), [made] { poison(*made); }),
           {{made->begin, bytes, true}});
    return CUDA_SUCCESS;
}

void check_red_zones(const Allocation &allocation, const std::string &name) {
    if (!are_red_zones_intact(allocation)) {
        report("something wrote next to the %zu bytes that %s gives back", allocation.bytes, name.c_str());
    }
}

CUresult free_on(Stream *stream, CUdeviceptr pointer, Lock &lock) {
    Allocation *found = find(pointer);
    if (found == nullptr || found->begin != pointer || found->device == kPageLocked) {
        report("a free of %#llx, which is no allocation", pointer);
        return CUDA_ERROR_INVALID_VALUE;
    }
    const std::string name = sized("free", found->bytes);
    const auto run = [found, name] {
        check_red_zones(*found, name);
        const Lock inner(lock_of_driver);
        release(*found);
    };
    const Allocation freed = {found->begin, found->bytes, found->device};
    if (!submit(lock, stream, operation(name, run), {{freed.begin, freed.bytes, true}}, true)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    give_back(freed);
    found->freed_by = name;
    return CUDA_SUCCESS;
}

struct Copy {
    const char *name;
    std::uintptr_t to, from;
    std::size_t bytes;
    bool to_host, from_host;
};

// Memory of the host that is not page-locked is copied before the call returns, and is no range.
CUresult copy_on(Stream *stream, const Copy &copy, Lock &lock) {
    std::vector<Range> ranges;
    const bool pageable_to = copy.to_host && !is_page_locked(reinterpret_cast<void *>(copy.to));
    const bool pageable_from = copy.from_host && !is_page_locked(reinterpret_cast<void *>(copy.from));
    if (!pageable_to) ranges.push_back({copy.to, copy.bytes, true});
    if (!pageable_from) ranges.push_back({copy.from, copy.bytes, false});
    unsigned char *to = view_of(copy.to);
    const unsigned char *from = view_of(copy.from);
    std::function<void()> run = [to, from, bytes = copy.bytes] { std::memcpy(to, from, bytes); };
    if (pageable_from) {
        run = [to, staged = std::vector<unsigned char>(from, from + copy.bytes)] {
            std::memcpy(to, staged.data(), staged.size());
        };
    }
    if (!submit(lock, stream, operation(sized(copy.name, copy.bytes), std::move(run)), ranges, true)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (pageable_to) finish(lock, point_of(*stream));
    return CUDA_SUCCESS;
}

CUresult copy_on(CUstream handle, const Copy &copy, bool waits = false) {
    if (copy.bytes == 0) return CUDA_SUCCESS;
    Lock lock(lock_of_driver);
    Stream *stream = stream_of(handle, copy.name);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    const CUresult result = copy_on(stream, copy, lock);
    if (result == CUDA_SUCCESS && waits) finish(lock, point_of(*stream));
    return result;
}

}  // namespace

bool __attribute__((visibility("default"))) fake::in_allocation(int device, std::uintptr_t begin, std::size_t bytes) {
    const Lock lock(lock_of_driver);
    const Allocation *found = find(begin);
    return found != nullptr && found->freed_by.empty() && begin + bytes <= found->begin + found->bytes &&
           (found->device == device || found->device == kPageLocked);
}

FAKE_EXPORT CUresult cuMemAllocAsync(CUdeviceptr *pointer, std::size_t bytes, CUstream handle) {
    MAY_FAIL(CUDA_ERROR_OUT_OF_MEMORY);
    if (!has_memory_pools()) return CUDA_ERROR_NOT_SUPPORTED;
    Lock lock(lock_of_driver);
    Stream *stream = stream_of(handle, "cuMemAllocAsync");
    return stream ? allocate_on(stream, pointer, bytes, lock) : CUDA_ERROR_INVALID_HANDLE;
}

FAKE_EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream handle) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    Lock lock(lock_of_driver);
    // Nothing of this program runs on the default stream, so nothing orders the seeded free.
    Stream *stream = stream_of(is_seeded("freed_early") ? nullptr : handle, "cuMemFreeAsync");
    return stream ? free_on(stream, pointer, lock) : CUDA_ERROR_INVALID_HANDLE;
}

FAKE_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, std::size_t bytes) {
    MAY_FAIL(CUDA_ERROR_OUT_OF_MEMORY);
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    Lock lock(lock_of_driver);
    Stream *stream = stream_of(nullptr, "cuMemAlloc");
    if (stream == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    const CUresult result = allocate_on(stream, pointer, bytes, lock);
    if (result == CUDA_SUCCESS) finish(lock, point_of(*stream));
    return result;
}

FAKE_EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (pointer == 0) return CUDA_SUCCESS;
    Lock lock(lock_of_driver);
    Stream *stream = stream_of(nullptr, "cuMemFree");
    if (stream == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    finish_device(lock, stream->device);
    const CUresult result = free_on(stream, pointer, lock);
    if (result == CUDA_SUCCESS) finish(lock, point_of(*stream));
    return result;
}

FAKE_EXPORT CUresult cuMemGetInfo_v2(std::size_t *free, std::size_t *total) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    const int device = context_of("cuMemGetInfo");
    if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    const Lock lock(lock_of_driver);
    *total = total_bytes();
    *free = *total - bytes_in_use(device);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuMemHostAlloc(void **pointer, std::size_t bytes, unsigned) {
    MAY_FAIL(CUDA_ERROR_OUT_OF_MEMORY);
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (context_of("cuMemHostAlloc") < 0) return CUDA_ERROR_INVALID_CONTEXT;
    const Lock lock(lock_of_driver);
    const Allocation *made = allocate_page_locked(bytes);
    if (made == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
    *pointer = reinterpret_cast<void *>(made->begin);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuMemFreeHost(void *pointer) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    const Lock lock(lock_of_driver);
    Allocation *found = find(address(pointer));
    if (found == nullptr || found->begin != address(pointer) || found->device != kPageLocked) {
        report("cuMemFreeHost of memory that is not page-locked");
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (!found->pending.empty()) {
        // The queued copies still use it, so it stays.
        report("cuMemFreeHost before the host has waited for: %s", found->pending.front().name.c_str());
        return CUDA_SUCCESS;
    }
    release(*found);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t bytes, CUstream handle) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (bytes == 0) return CUDA_SUCCESS;
    Lock lock(lock_of_driver);
    Stream *stream = stream_of(handle, "cuMemsetD8Async");
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    unsigned char *bytes_at = view_of(to);
    const auto run = [bytes_at, value, bytes] { std::memset(bytes_at, value, bytes); };
    const bool queued = submit(lock, stream, operation(sized("memset", bytes), run), {{to, bytes, true}}) != nullptr;
    return queued ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

FAKE_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, std::size_t bytes, CUstream stream) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    return copy_on(stream, {"copy from the host", to, address(from), bytes, false, true});
}

FAKE_EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    return copy_on(stream, {"copy to the host", address(to), from, bytes, true, false});
}

FAKE_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    return copy_on(stream, {"copy on the device", to, from, bytes, false, false});
}

FAKE_EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, std::size_t bytes,
                                       CUstream stream) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    return copy_on(stream, {"copy between devices", to, from, bytes, false, false});
}

FAKE_EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, std::size_t bytes) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    return copy_on(nullptr, {"copy from the host", to, address(from), bytes, false, true}, true);
}

FAKE_EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, std::size_t bytes) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    return copy_on(nullptr, {"copy to the host", address(to), from, bytes, true, false}, true);
}

// A GPU has one pool, which is never trimmed, or none (FAKE_DRIVER_MEMORY_POOLS=0).

FAKE_EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (!has_memory_pools()) return CUDA_ERROR_NOT_SUPPORTED;
    *pool = reinterpret_cast<CUmemoryPool>(static_cast<std::uintptr_t>(device) + 1);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    return cuDeviceGetDefaultMemPool(pool, device);
}

FAKE_EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    constexpr int kReservedMost = 6, kUsedMost = 8;
    const Lock lock(lock_of_driver);
    if (attribute == kReservedMost || attribute == kUsedMost) forget_most_bytes_in_use(static_cast<int>(address(pool)) - 1);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    constexpr int kReservedNow = 5, kReservedMost = 6, kUsedNow = 7, kUsedMost = 8;
    const Lock lock(lock_of_driver);
    const int device = static_cast<int>(address(pool)) - 1;
    std::uint64_t bytes;
    switch (attribute) {
    case kReservedNow:
    case kUsedNow: bytes = bytes_in_use(device); break;
    case kReservedMost:
    case kUsedMost: bytes = most_bytes_in_use(device); break;
    default:
        report("cuMemPoolGetAttribute: the fake driver does not know attribute %d", attribute);
        return CUDA_ERROR_INVALID_VALUE;
    }
    std::memcpy(value, &bytes, sizeof bytes);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const int *locations, std::size_t count) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    // A location has its kind (1: a GPU), its number, and the kind of access (0: none, 3: read and write).
    const Lock lock(lock_of_driver);
    for (std::size_t i = 0; i < count; ++i) {
        const int *location = locations + 3 * i;
        if (location[0] == 1 && location[2] == 3) enable_peer_access(location[1], static_cast<int>(address(pool)) - 1);
    }
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuMemPoolGetAccess(int *access, CUmemoryPool pool, const int *location) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    const Lock lock(lock_of_driver);
    *access = has_peer_access(location[1], static_cast<int>(address(pool)) - 1) ? 3 : 0;
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool, std::size_t) { return CUDA_SUCCESS; }
