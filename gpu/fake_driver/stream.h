// What the fake libraries (cuBLAS, cuRAND, NCCL) use of the fake driver; libcuda.so.1 exports it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cuda_abi.h"

namespace fake {

// Bytes that an operation reads or writes.
struct Range {
    std::uintptr_t begin;
    std::size_t bytes;
    bool written;
};

// Appends an operation to a stream. It runs when the stream's order allows it and `ready` (if given) returns true: a
// collective waits for its peers. `ready` is first called when all earlier operations of the stream are done, and both
// functions are called without any lock of the driver, from any thread. Host threads that synchronize run operations
// of any stream of the process; while one is not ready they poll it. A thread of the driver does the same for
// operations with `ready` that have waited for some time, because a peer may be another process.
void enqueue(CUstream stream, std::string name, std::vector<Range> ranges, std::function<void()> run,
             std::function<bool()> ready = {});

// The GPU that a stream belongs to, or -1 with a report if there is no such stream.
int device_of(CUstream stream);

// Whether these bytes lie within one live allocation of the GPU, or within page-locked memory.
bool in_allocation(int device, std::uintptr_t begin, std::size_t bytes);

// The GPU of the calling thread's current context, or -1.
int current_device();

// A library loads this kernel on the current GPU, where the driver may wait for it. Reports if a collective is queued
// there: that may wait for another rank, whose thread may wait for the driver's loading lock.
void check_load(const char *kernel);

// Prints and counts a fault of the program. The process ends with exit code 97 if there was one.
void report(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Counts a call of a function or a launch of a kernel for FAKE_DRIVER_CALLS.
void count_call(const char *name);

// Counts this call of a function, and returns the error that it returns by FAKE_DRIVER_FAIL, `usual` unless that names
// another, or 0.
int injected_failure(const char *function, int usual);

// The fault that the environment asks for (FAKE_DRIVER_SEED_FAULT), to test that it is found.
bool is_seeded(const char *fault);

}  // namespace fake

// The first line of a function that may fail on request.
#define MAY_FAIL(usual) MAY_FAIL_AS(__func__, usual)

// The same for calls with a name of their own.
#define MAY_FAIL_AS(name, usual) \
    if (const int failure = fake::injected_failure(name, usual)) return static_cast<decltype(usual)>(failure)
