// Runs the operations of all streams, in an order that CUDA allows: as late as possible, as soon as possible, or at
// random (FAKE_DRIVER_ORDER).

#include "queue.h"

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <list>
#include <random>
#include <thread>

#include "races.h"

namespace fake {

std::mutex lock_of_driver;

namespace {

using std::chrono::milliseconds;

// How long an operation that waits for its peers is left to the host's threads.
constexpr milliseconds kPatience{20};
// After so many queries of an event, a host that polls it would otherwise wait forever.
constexpr unsigned kQueries = 64;

enum class Order { kLate, kEager, kRandom };

// A place in clocks. The streams that have it one after another go on counting.
struct Slot {
    bool is_used;
    std::uint32_t count;
};

// Never destroyed: other threads may still run when the process ends.
auto &streams = *new std::list<std::unique_ptr<Stream>>;
auto &slots = *new std::vector<Slot>;
auto &changed = *new std::condition_variable;
auto &demanded = *new std::vector<OperationPtr>;  // by queries

std::mt19937 &generator() {
    static std::mt19937 one;
    return one;
}

Order order() {
    static const Order chosen = [] {
        const char *name = std::getenv("FAKE_DRIVER_ORDER");
        if (name == nullptr || std::strcmp(name, "late") == 0) return Order::kLate;
        if (std::strcmp(name, "eager") == 0) return Order::kEager;
        if (std::strncmp(name, "random:", 7) != 0) {
            std::fprintf(stderr, "fake driver: FAKE_DRIVER_ORDER is late, eager or random:SEED, not %s\n", name);
            std::exit(2);
        }
        generator().seed(std::strtoul(name + 7, nullptr, 10));
        return Order::kRandom;
    }();
    return chosen;
}

bool is_done(const OperationPtr &operation) { return operation == nullptr || operation->state == Operation::kDone; }

// Forgets destroyed streams that have nothing left to run.
void sweep() {
    for (auto one = streams.begin(); one != streams.end();) {
        if ((*one)->is_destroyed && (*one)->queue.empty()) {
            slots[(*one)->slot] = {false, (*one)->count};
            one = streams.erase(one);
        } else {
            ++one;
        }
    }
}

// Runs the first operation of a stream, unless it waits for peers. The caller has checked that it may run.
bool try_run(Lock &lock, OperationPtr head) {
    head->state = Operation::kClaimed;
    lock.unlock();
    const bool runs = !head->ready || head->ready();
    if (runs && head->run) head->run();
    lock.lock();
    if (!runs) {
        head->state = Operation::kQueued;
        return false;
    }
    head->state = Operation::kDone;
    head->done_at = std::chrono::steady_clock::now();
    head->run = nullptr;
    head->ready = nullptr;
    head->after = nullptr;
    head->stream->queue.pop_front();
    if (head->stream->is_destroyed && head->stream->queue.empty()) sweep();
    changed.notify_all();
    return true;
}

bool may_run(const OperationPtr &head) { return head->state == Operation::kQueued && is_done(head->after); }

// The operation that must run next so that `target` can run later; null while another thread runs it.
OperationPtr next_toward(const Operation &target) {
    const Operation *goal = &target;
    for (;;) {
        const OperationPtr &head = goal->stream->queue.front();
        if (head->state == Operation::kClaimed) return nullptr;
        if (is_done(head->after)) return head;
        goal = head->after.get();
    }
}

bool run_at_random(Lock &lock) {
    std::vector<OperationPtr> heads;
    for (const auto &stream : streams) {
        if (!stream->queue.empty() && may_run(stream->queue.front())) heads.push_back(stream->queue.front());
    }
    std::shuffle(heads.begin(), heads.end(), generator());
    for (const OperationPtr &head : heads) {
        if (may_run(head) && try_run(lock, head)) return true;
    }
    return false;
}

// One step toward each operation of the process that waits for peers, the first of each stream.
bool run_for_peers(Lock &lock, milliseconds patience) {
    const auto now = std::chrono::steady_clock::now();
    std::vector<OperationPtr> goals;
    for (const auto &stream : streams) {
        for (const OperationPtr &operation : stream->queue) {
            if (!operation->ready) continue;
            if (now - operation->queued_at >= patience) goals.push_back(operation);
            break;
        }
    }
    bool ran = false;
    for (const OperationPtr &goal : goals) {
        if (goal->state == Operation::kDone) continue;
        const OperationPtr head = next_toward(*goal);
        ran |= head != nullptr && try_run(lock, head);
    }
    return ran;
}

// Runs one operation that `target` needs. Returns false if there is none that can run now.
bool run_one(Lock &lock, const OperationPtr &target) {
    if (order() == Order::kRandom) return run_at_random(lock);
    const OperationPtr head = next_toward(*target);
    if (head == nullptr) return false;
    return try_run(lock, head) || run_for_peers(lock, milliseconds{0});
}

void drive(Lock &lock, const OperationPtr &target) {
    while (!is_done(target)) {
        if (!run_one(lock, target) && !is_done(target)) changed.wait_for(lock, std::chrono::microseconds(100));
    }
}

// The GPU's own progress, where the host does not wait.
void keep_moving() {
    Lock lock(lock_of_driver);
    for (;;) {
        bool ran = run_for_peers(lock, kPatience);
        if (!demanded.empty()) {
            const OperationPtr target = demanded.back();
            if (is_done(target)) {
                demanded.erase(std::find(demanded.begin(), demanded.end(), target));
                continue;
            }
            ran |= run_one(lock, target);
        }
        if (!ran) changed.wait_for(lock, milliseconds(1));
    }
}

void start_moving() {
    static const bool started = [] {
        std::thread(keep_moving).detach();
        return true;
    }();
    (void)started;
}

// Runs what the order wants to have run when the host has queued something.
void after_submit(Lock &lock) {
    if (order() == Order::kLate) return;
    while (order() == Order::kEager || generator()() % 2 == 0) {
        if (!run_at_random(lock)) return;
    }
}

}  // namespace

__attribute__((visibility("default"))) void check_load(const char *kernel) {
    const int device = current_device();
    const Lock lock(lock_of_driver);
    for (const auto &stream : streams) {
        if (stream->device != device) continue;
        for (const OperationPtr &operation : stream->queue) {
            if (!operation->ready) continue;
            report("%s is loaded while %s waits for its peers", kernel, operation->name.c_str());
            return;
        }
    }
}

Stream *create_stream(int device) {
    std::size_t slot = 0;
    while (slot < slots.size() && slots[slot].is_used) ++slot;
    if (slot == slots.size()) slots.push_back({false, 0});
    slots[slot].is_used = true;
    auto stream = std::make_unique<Stream>();
    stream->device = device;
    stream->slot = slot;
    stream->count = slots[slot].count;
    streams.push_back(std::move(stream));
    return streams.back().get();
}

void destroy_stream(Stream *stream) {
    stream->is_destroyed = true;
    sweep();
}

OperationPtr submit(Lock &lock, Stream *stream, Operation operation, const std::vector<Range> &ranges,
                    bool is_peer_copy) {
    Clock before = stream->clock;
    before.join(host_clock());
    const Tick tick{stream->slot, ++stream->count};
    if (!check_accesses(*stream, operation.name, tick, before, ranges, is_peer_copy)) return nullptr;
    before.add(tick);
    stream->clock = std::move(before);
    operation.stream = stream;
    const bool waits_for_peers = static_cast<bool>(operation.ready);
    auto queued = std::make_shared<Operation>(std::move(operation));
    stream->queue.push_back(queued);
    stream->last = queued;
    if (waits_for_peers) start_moving();
    after_submit(lock);
    return queued;
}

Point point_of(const Stream &stream) { return {stream.last, stream.clock}; }

void wait(Lock &lock, Stream *stream, const Point &point) {
    stream->clock.join(point.clock);
    if (is_done(point.last) || point.last->stream == stream) return;
    Operation operation;
    operation.name = "wait for an event";
    operation.after = point.last;
    submit(lock, stream, std::move(operation), {});
}

void finish(Lock &lock, const Point &point) {
    drive(lock, point.last);
    advance_host_clock(point.clock);
}

void finish_device(Lock &lock, int device) {
    std::vector<Point> points;
    for (const auto &stream : streams) {
        if (stream->device == device) points.push_back(point_of(*stream));
    }
    for (const Point &point : points) finish(lock, point);
}

bool is_reached(Lock &lock, const Point &point, unsigned &times_asked) {
    if (!is_done(point.last) && order() == Order::kRandom) run_at_random(lock);
    if (is_done(point.last)) {
        advance_host_clock(point.clock);
        return true;
    }
    if (++times_asked == kQueries) {
        demanded.push_back(point.last);
        start_moving();
    }
    return false;
}

}  // namespace fake
