// Streams of operations and when they run. `queue.cpp` runs them, `races.cpp` checks what they access.

#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>

#include "clock.h"
#include "memory.h"

namespace fake {

struct Stream;

struct Operation {
    std::string name;
    std::function<void()> run;
    std::function<bool()> ready;
    Stream *stream;
    std::shared_ptr<Operation> after;  // of another stream
    enum { kQueued, kClaimed, kDone } state = kQueued;
    std::chrono::steady_clock::time_point queued_at = std::chrono::steady_clock::now(), done_at;
};
using OperationPtr = std::shared_ptr<Operation>;

struct Stream {
    int device;
    std::size_t slot;  // in clocks
    std::uint32_t count = 0;
    Clock clock;
    std::deque<OperationPtr> queue;
    OperationPtr last;
    bool is_destroyed = false;
};

// A point in a stream's order: what an event records.
struct Point {
    OperationPtr last;
    Clock clock;
};

// Protects all state of the driver but the bytes of allocations.
extern std::mutex lock_of_driver;
using Lock = std::unique_lock<std::mutex>;

Stream *create_stream(int device);
void destroy_stream(Stream *stream);

// Appends an operation. Its ranges are checked (`races.h`) and the program's faults reported; then it does not run,
// and the result is null. `is_peer_copy` allows ranges on other GPUs.
OperationPtr submit(Lock &lock, Stream *stream, Operation operation, const std::vector<Range> &ranges,
                    bool is_peer_copy = false);

Point point_of(const Stream &stream);

// Orders all later operations of the stream after the point.
void wait(Lock &lock, Stream *stream, const Point &point);

// Makes the host wait for the point: runs operations until it is reached.
void finish(Lock &lock, const Point &point);

// Whether the point is reached. Asked often enough, the GPU moves on by itself.
bool is_reached(Lock &lock, const Point &point, unsigned &times_asked);

// Makes the host wait for all that is queued on a GPU.
void finish_device(Lock &lock, int device);

}  // namespace fake
