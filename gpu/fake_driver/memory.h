// Memory of the simulated GPUs and page-locked memory of the host.
//
// Every GPU has an address range of its own, in which addresses are never used twice, so that every use of freed
// memory is found. All functions are called with the driver's lock held, except where they say otherwise.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "clock.h"
#include "stream.h"

namespace fake {

constexpr int kPageLocked = -1;

// A use of an allocation that later uses must be ordered after.
struct Access {
    Range range;
    Tick tick;
    std::string name;
};

struct Allocation {
    std::uintptr_t begin;
    std::size_t bytes;
    int device;  // or kPageLocked
    // Where the driver reads and writes page-locked memory while the host may not.
    unsigned char *view;
    std::string freed_by;  // the operation, once the free is queued
    std::vector<Access> accesses;
    // Of page-locked memory: copies that the host has not waited for.
    std::vector<Access> pending;
    bool is_protected = false;
};

// Reserves memory; poison() fills it when the stream reaches the allocation. Null if the GPU has no room.
Allocation *allocate(int device, std::size_t bytes);
Allocation *allocate_page_locked(std::size_t bytes);

// The allocation that contains an address (also its end), freed or not, or null.
Allocation *find(std::uintptr_t address);

// Called without the lock, when a stream reaches the allocation or the free.
void poison(const Allocation &allocation);
bool are_red_zones_intact(const Allocation &allocation);

// Gives the bytes back. The address stays known as freed.
void release(Allocation &allocation);

// Sets which pages of page-locked memory the host may use, from `pending`.
void protect(Allocation &allocation);

// All page-locked allocations.
std::vector<Allocation *> &page_locked();

// Where the driver finds the bytes at an address: another view of page-locked memory, else the address itself.
unsigned char *view_of(std::uintptr_t address);

// Bytes of a GPU that are not freed, and the most there were. As in a pool, a free counts once it is in a stream.
std::size_t bytes_in_use(int device);
std::size_t most_bytes_in_use(int device);
// The most is what is in use now.
void forget_most_bytes_in_use(int device);
void give_back(const Allocation &allocation);
std::size_t total_bytes();
bool has_memory_pools();
bool is_device_address(std::uintptr_t address);

}  // namespace fake
