// Allocations: addresses, red zones and poison. `page_locked.cpp` has what is special to the host's memory.

#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <sys/mman.h>
#include <unistd.h>

namespace fake {
namespace {

constexpr std::size_t kPage = 4096, kRedZone = 512;
constexpr unsigned char kPoison = 0xff;  // NaN in every floating-point type
constexpr std::size_t kAddressesPerGpu = std::size_t{2} << 40;
constexpr std::size_t kRememberedFrees = 200'000;
constexpr int kMaxGpus = 16;

struct Gpu {
    std::uintptr_t begin = 0, next = 0;
    std::size_t in_use = 0, most = 0;
};

Gpu gpus[kMaxGpus];
// By their begin. References stay valid when others come and go.
// Never destroyed: other threads may still run when the process ends.
auto &allocations = *new std::map<std::uintptr_t, std::unique_ptr<Allocation>>;
auto &freed = *new std::vector<std::uintptr_t>;

std::size_t round_up(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

Gpu &gpu(int device) {
    Gpu &found = gpus[device];
    if (found.begin == 0) {
        void *range = mmap(nullptr, kAddressesPerGpu, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (range == MAP_FAILED) {
            report("the machine has no address range for GPU %d", device);
            std::abort();
        }
        found.begin = found.next = reinterpret_cast<std::uintptr_t>(range);
    }
    return found;
}

// The red zone after an allocation reaches to the end of its last page.
std::size_t red_zone_after(const Allocation &allocation) {
    return round_up(kRedZone + allocation.bytes + kRedZone) - kRedZone - allocation.bytes;
}

unsigned char *at(std::uintptr_t address) { return reinterpret_cast<unsigned char *>(address); }

bool is_poison(const unsigned char *bytes, std::size_t count) {
    return bytes[0] == kPoison && std::memcmp(bytes, bytes + 1, count - 1) == 0;
}

Allocation *add(Allocation allocation) {
    const auto begin = allocation.begin;
    return (allocations[begin] = std::make_unique<Allocation>(std::move(allocation))).get();
}

}  // namespace

std::size_t total_bytes() {
    const char *mebibytes = std::getenv("FAKE_DRIVER_MEMORY_MIB");
    return (mebibytes ? std::strtoull(mebibytes, nullptr, 10) : 16 * 1024) << 20;
}

bool has_memory_pools() {
    const char *pools = std::getenv("FAKE_DRIVER_MEMORY_POOLS");
    return pools == nullptr || std::strcmp(pools, "0") != 0;
}

std::size_t bytes_in_use(int device) { return gpus[device].in_use; }
std::size_t most_bytes_in_use(int device) { return gpus[device].most; }
void forget_most_bytes_in_use(int device) { gpus[device].most = gpus[device].in_use; }
void give_back(const Allocation &allocation) { gpus[allocation.device].in_use -= allocation.bytes; }

Allocation *allocate(int device, std::size_t bytes) {
    Gpu &on = gpu(device);
    const std::size_t pages = round_up(kRedZone + bytes + kRedZone);
    if (on.in_use + bytes > total_bytes()) return nullptr;
    if (on.next + pages > on.begin + kAddressesPerGpu) {
        report("GPU %d has used all of its addresses", device);
        return nullptr;
    }
    const std::uintptr_t begin = on.next + kRedZone;
    on.next += pages;
    on.in_use += bytes;
    on.most = std::max(on.most, on.in_use);
    return add({begin, bytes, device, at(begin), {}, {}, {}});
}

Allocation *allocate_page_locked(std::size_t bytes) {
    const std::size_t pages = round_up(bytes + 1);  // its end is not the begin of another
    const int file = memfd_create("fake-driver", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, pages) != 0) return nullptr;
    void *views[2];
    for (void *&view : views) view = mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (views[0] == MAP_FAILED || views[1] == MAP_FAILED) return nullptr;
    std::memset(views[1], kPoison, pages);
    Allocation *made = add({reinterpret_cast<std::uintptr_t>(views[0]), bytes, kPageLocked,
                            static_cast<unsigned char *>(views[1]), {}, {}, {}});
    page_locked().push_back(made);
    return made;
}

Allocation *find(std::uintptr_t address) {
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin()) return nullptr;
    Allocation &found = *std::prev(after)->second;
    return address <= found.begin + found.bytes ? &found : nullptr;
}

void poison(const Allocation &allocation) {
    std::memset(at(allocation.begin) - kRedZone, kPoison, kRedZone + allocation.bytes + red_zone_after(allocation));
}

bool are_red_zones_intact(const Allocation &allocation) {
    return is_poison(at(allocation.begin) - kRedZone, kRedZone) &&
           is_poison(at(allocation.begin) + allocation.bytes, red_zone_after(allocation));
}

void release(Allocation &allocation) {
    if (allocation.device == kPageLocked) {
        auto &all = page_locked();
        all.erase(std::find(all.begin(), all.end(), &allocation));
        munmap(at(allocation.begin), round_up(allocation.bytes + 1));
        munmap(allocation.view, round_up(allocation.bytes + 1));
        allocations.erase(allocation.begin);  // the system may give the address to anyone
        return;
    }
    madvise(at(allocation.begin) - kRedZone, round_up(kRedZone + allocation.bytes + kRedZone), MADV_DONTNEED);
    allocation.accesses = {};
    freed.push_back(allocation.begin);
    if (freed.size() > kRememberedFrees) {
        for (std::size_t i = 0; i < kRememberedFrees / 2; ++i) allocations.erase(freed[i]);
        freed.erase(freed.begin(), freed.begin() + kRememberedFrees / 2);
    }
}

unsigned char *view_of(std::uintptr_t address) {
    const Allocation *found = find(address);
    return found ? found->view + (address - found->begin) : at(address);
}

bool is_device_address(std::uintptr_t address) {
    for (const Gpu &one : gpus) {
        if (one.begin != 0 && one.begin <= address && address < one.begin + kAddressesPerGpu) return true;
    }
    return false;
}

}  // namespace fake
