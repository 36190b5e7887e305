// The race detection, from vector clocks.

#pragma once

#include "queue.h"

namespace fake {

// Checks an operation that is ordered after `before`, and remembers its accesses. Returns false for a fault that
// must not run: memory of nobody, of another GPU, or freed.
bool check_accesses(const Stream &stream, const std::string &name, Tick tick, const Clock &before,
                    const std::vector<Range> &ranges, bool is_peer_copy);

// The clock of the host's threads, as one: whatever one of them has waited for, all later calls come after. Uses of
// page-locked memory by the host are legal for the copies it covers.
const Clock &host_clock();
void advance_host_clock(const Clock &to);

// Peer access of kernels.
void enable_peer_access(int from, int to);
bool has_peer_access(int from, int to);

}  // namespace fake
