// Streams and events.

#include <cstdio>
#include <unordered_map>
#include <unordered_set>

#include "api.h"

namespace fake {
namespace {

constexpr unsigned kNonBlocking = 1, kDisableTiming = 2;

struct Event {
    int device;
    bool is_timed;
    Point point;
    unsigned times_asked = 0;
};

// Never destroyed: other threads may still run when the process ends.
auto &known_streams = *new std::unordered_set<Stream *>;
auto &known_events = *new std::unordered_set<Event *>;
auto &default_streams = *new std::unordered_map<int, Stream *>;

Event *event_of(CUevent handle, const char *function) {
    auto *event = reinterpret_cast<Event *>(handle);
    if (known_events.count(event)) return event;
    report("%s with an event that does not exist", function);
    return nullptr;
}

// The stream behind a handle, of any GPU.
Stream *any_stream_of(CUstream handle, const char *function) {
    // 0, 1 and 2 are CUDA's default streams.
    if (reinterpret_cast<std::uintptr_t>(handle) <= 2) {
        const int device = context_of(function);
        if (device < 0) return nullptr;
        Stream *&found = default_streams[device];
        if (found == nullptr) found = create_stream(device);
        return found;
    }
    auto *stream = reinterpret_cast<Stream *>(handle);
    if (known_streams.count(stream)) return stream;
    report("%s on a stream that does not exist", function);
    return nullptr;
}

}  // namespace

Stream *stream_of(CUstream handle, const char *function) {
    const int device = context_of(function);
    if (device < 0) return nullptr;
    Stream *stream = any_stream_of(handle, function);
    if (stream != nullptr && stream->device != device) {
        report("%s on a stream of GPU %d while the context of GPU %d is current", function, stream->device, device);
        return nullptr;
    }
    return stream;
}

__attribute__((visibility("default"))) int device_of(CUstream handle) {
    const Lock lock(lock_of_driver);
    const Stream *stream = any_stream_of(handle, "a library call");
    return stream ? stream->device : -1;
}

__attribute__((visibility("default"))) void enqueue(CUstream handle, std::string name, std::vector<Range> ranges,
                                                    std::function<void()> run, std::function<bool()> ready) {
    Lock lock(lock_of_driver);
    Stream *stream = any_stream_of(handle, name.c_str());
    if (stream == nullptr) return;
    Operation operation;
    operation.name = std::move(name);
    operation.run = std::move(run);
    operation.ready = std::move(ready);
    submit(lock, stream, std::move(operation), ranges);
}

}  // namespace fake

using namespace fake;

FAKE_EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    const int device = context_of("cuStreamCreate");
    if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (flags != kNonBlocking) report("cuStreamCreate: streams that wait for the default stream are not implemented");
    const Lock lock(lock_of_driver);
    Stream *made = create_stream(is_seeded("wrong_device") ? (device + 1) % gpu_count() : device);
    known_streams.insert(made);
    *stream = reinterpret_cast<CUstream>(made);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int) {
    return cuStreamCreate(stream, flags);
}

FAKE_EXPORT CUresult cuStreamDestroy_v2(CUstream handle) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    const Lock lock(lock_of_driver);
    Stream *stream = any_stream_of(handle, "cuStreamDestroy");
    if (stream == nullptr || !known_streams.erase(stream)) return CUDA_ERROR_INVALID_HANDLE;
    destroy_stream(stream);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuStreamSynchronize(CUstream handle) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    Lock lock(lock_of_driver);
    const Stream *stream = any_stream_of(handle, "cuStreamSynchronize");
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    finish(lock, point_of(*stream));
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuStreamQuery(CUstream handle) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    Lock lock(lock_of_driver);
    const Stream *stream = any_stream_of(handle, "cuStreamQuery");
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    static auto &times_asked = *new std::unordered_map<const Stream *, unsigned>;
    unsigned &asked = times_asked[stream];
    const bool reached = is_reached(lock, point_of(*stream), asked);
    if (reached) asked = 0;
    return reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

FAKE_EXPORT CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    Lock lock(lock_of_driver);
    Stream *stream = any_stream_of(stream_handle, "cuStreamWaitEvent");
    const Event *event = event_of(handle, "cuStreamWaitEvent");
    if (stream == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (is_seeded("forgotten_event")) return CUDA_SUCCESS;
    const Point point = event->point;
    wait(lock, stream, point);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuStreamIsCapturing(CUstream, int *status) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    *status = 0;
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuEventCreate(CUevent *event, unsigned flags) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    const int device = context_of("cuEventCreate");
    if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
    const Lock lock(lock_of_driver);
    auto *made = new Event{device, !(flags & kDisableTiming), {}};
    known_events.insert(made);
    *event = reinterpret_cast<CUevent>(made);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuEventDestroy_v2(CUevent handle) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    const Lock lock(lock_of_driver);
    Event *event = event_of(handle, "cuEventDestroy");
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    known_events.erase(event);
    delete event;
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    Lock lock(lock_of_driver);
    Event *event = event_of(handle, "cuEventRecord");
    Stream *stream = any_stream_of(stream_handle, "cuEventRecord");
    if (stream == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (event->device != stream->device) {
        report("cuEventRecord of an event of GPU %d on a stream of GPU %d", event->device, stream->device);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (event->is_timed) {
        // Its time is that of an operation of its own.
        Operation mark;
        mark.name = "record an event";
        submit(lock, stream, std::move(mark), {});
    }
    event->point = point_of(*stream);
    event->times_asked = 0;
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuEventQuery(CUevent handle) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    if (context_of("cuEventQuery") < 0) return CUDA_ERROR_INVALID_CONTEXT;
    Lock lock(lock_of_driver);
    Event *event = event_of(handle, "cuEventQuery");
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (is_seeded("host_too_early")) return CUDA_SUCCESS;
    const Point point = event->point;
    return is_reached(lock, point, event->times_asked) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

FAKE_EXPORT CUresult cuEventSynchronize(CUevent handle) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    Lock lock(lock_of_driver);
    const Event *event = event_of(handle, "cuEventSynchronize");
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (is_seeded("host_too_early")) return CUDA_SUCCESS;
    const Point point = event->point;
    finish(lock, point);
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent begin, CUevent end) {
    MAY_FAIL(CUDA_ERROR_UNKNOWN);
    Lock lock(lock_of_driver);
    const Event *first = event_of(begin, "cuEventElapsedTime"), *last = event_of(end, "cuEventElapsedTime");
    if (first == nullptr || last == nullptr || !first->is_timed || !last->is_timed || !first->point.last ||
        !last->point.last) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    for (const Event *event : {first, last}) {
        if (event->point.last->state != Operation::kDone) return CUDA_ERROR_NOT_READY;
    }
    const std::chrono::duration<float, std::milli> elapsed =
        last->point.last->done_at - first->point.last->done_at;
    *milliseconds = elapsed.count() < 0 ? 0 : elapsed.count();
    return CUDA_SUCCESS;
}

FAKE_EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent begin, CUevent end) {
    return cuEventElapsedTime_v2(milliseconds, begin, end);
}
