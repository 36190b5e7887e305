// Finds accesses that conflict and that no order of streams, events and the host's waits separates.

#include "races.h"

#include <set>

namespace fake {
namespace {

// Never destroyed: other threads may still run when the process ends.
auto &host = *new Clock;
auto &peers = *new std::set<std::pair<int, int>>;

bool overlap(const Range &a, const Range &b) {
    return a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
}

bool contains(const Range &outer, const Range &inner) {
    return outer.begin <= inner.begin && inner.begin + inner.bytes <= outer.begin + outer.bytes;
}

const char *verb(bool written) { return written ? "writes" : "reads"; }

// Whether the range may be used at all.
bool is_legal(const Stream &stream, const std::string &name, const Range &range, bool is_peer_copy) {
    const Allocation *found = find(range.begin);
    if (found == nullptr || range.begin + range.bytes > found->begin + found->bytes) {
        report("%s %s %zu bytes at %#zx, which do not lie in an allocation", name.c_str(), verb(range.written),
               range.bytes, static_cast<std::size_t>(range.begin));
        return false;
    }
    if (!found->freed_by.empty()) {
        report("%s %s %zu bytes after the free by %s", name.c_str(), verb(range.written), range.bytes,
               found->freed_by.c_str());
        return false;
    }
    const int device = found->device;
    if (device != kPageLocked && device != stream.device && !is_peer_copy && !has_peer_access(stream.device, device)) {
        report("%s on GPU %d %s memory of GPU %d", name.c_str(), stream.device, verb(range.written), device);
        return false;
    }
    return true;
}

// Compares an access with the earlier ones of its allocation, and drops those that later ones need not know.
void compare(std::vector<Access> &earlier, const Access &access, const Clock &before) {
    std::size_t kept = 0;
    for (Access &old : earlier) {
        const bool ordered = before.covers(old.tick);
        if (!ordered && (old.range.written || access.range.written) && overlap(old.range, access.range)) {
            report("no order between: %s %s, and %s %s the same memory", old.name.c_str(), verb(old.range.written),
                   access.name.c_str(), verb(access.range.written));
        }
        // The new access stands for the old one, or everything later is ordered after the old one.
        const bool replaced = ordered && contains(access.range, old.range) &&
                              (access.range.written || (!old.range.written && old.tick.stream == access.tick.stream));
        if (!replaced && !host.covers(old.tick)) {
            if (&earlier[kept] != &old) earlier[kept] = std::move(old);
            ++kept;
        }
    }
    earlier.resize(kept);
}

}  // namespace

bool check_accesses(const Stream &stream, const std::string &name, Tick tick, const Clock &before,
                    const std::vector<Range> &ranges, bool is_peer_copy) {
    for (const Range &range : ranges) {
        if (range.bytes > 0 && !is_legal(stream, name, range, is_peer_copy)) return false;
    }
    // First all comparisons: the ranges of one operation do not conflict.
    for (const Range &range : ranges) {
        if (range.bytes == 0) continue;
        Allocation &allocation = *find(range.begin);
        compare(allocation.accesses, {range, tick, name}, before);
    }
    for (const Range &range : ranges) {
        if (range.bytes == 0) continue;
        Allocation &allocation = *find(range.begin);
        allocation.accesses.push_back({range, tick, name});
        if (allocation.device == kPageLocked) {
            allocation.pending.push_back({range, tick, name});
            protect(allocation);
        }
    }
    return true;
}

const Clock &host_clock() { return host; }

void advance_host_clock(const Clock &to) {
    host.join(to);
    for (Allocation *allocation : page_locked()) {
        auto &pending = allocation->pending;
        const auto is_done = [](const Access &access) { return host.covers(access.tick); };
        const auto end = std::remove_if(pending.begin(), pending.end(), is_done);
        if (end == pending.end()) continue;
        pending.erase(end, pending.end());
        protect(*allocation);
    }
}

void enable_peer_access(int from, int to) { peers.emplace(from, to); }
bool has_peer_access(int from, int to) { return from == to || peers.count({from, to}) > 0; }

}  // namespace fake
