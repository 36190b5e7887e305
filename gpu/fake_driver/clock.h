// Vector clocks: what is ordered before what.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fake {

// An operation: the n-th of its stream.
struct Tick {
    std::size_t stream;
    std::uint32_t count;
};

// Per stream, how many of its operations are known to be done.
struct Clock {
    std::vector<std::uint32_t> counts;

    bool covers(Tick tick) const { return tick.stream < counts.size() && tick.count <= counts[tick.stream]; }

    void join(const Clock &other) {
        if (counts.size() < other.counts.size()) counts.resize(other.counts.size());
        for (std::size_t i = 0; i < other.counts.size(); ++i) counts[i] = std::max(counts[i], other.counts[i]);
    }

    void add(Tick tick) {
        if (counts.size() <= tick.stream) counts.resize(tick.stream + 1);
        counts[tick.stream] = std::max(counts[tick.stream], tick.count);
    }
};

}  // namespace fake
