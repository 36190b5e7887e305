// What the files of the driver's interface share: the current context, and streams by their handles.

#pragma once

#include "queue.h"

namespace fake {

constexpr int kMaxGpus = 16;
int gpu_count();

// Shared memory that a block may have at most.
unsigned max_shared_bytes();

// The GPU of the thread's current context. Without one, -1 with a report that names the function.
int context_of(const char *function);

// The stream behind a handle, 0 for the current GPU's default stream. Null with a report if there is none, or if it
// belongs to another GPU than the current context.
Stream *stream_of(CUstream handle, const char *function);

}  // namespace fake
