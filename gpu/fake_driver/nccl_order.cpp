// Whether ranks launch the operations of all their communicators in one order. NCCL's kernels wait on the GPU for
// their peers, so two ranks that launch two operations in different orders may wait for each other forever.

#include <algorithm>
#include <deque>

#include "nccl.h"

namespace fake::nccl {
namespace {

// How many of the launched operations are compared ahead of the stream.
constexpr std::size_t kAhead = 4;

struct Launched {
    std::uint64_t count = 0;
    std::deque<std::weak_ptr<Operation>> operations;
    // Per peer: its launch for each own launch that both take part in.
    std::map<std::uint64_t, std::map<std::uint64_t, std::uint64_t>> common;
    std::uint64_t reported = 0;
};

std::mutex mutex;

// Several ranks may share a GPU: each identity has an order of its own.
std::map<std::uint64_t, Launched> &of_identity() {
    static auto *all = new std::map<std::uint64_t, Launched>();
    return *all;
}

}  // namespace

std::uint64_t next_launch(std::uint64_t identity) {
    const std::lock_guard guard(mutex);
    return of_identity()[identity].count++;
}

void add_launched(std::uint64_t identity, const std::shared_ptr<Operation> &operation) {
    const std::lock_guard guard(mutex);
    of_identity()[identity].operations.push_back(operation);
}

void compare_launched(std::uint64_t identity) {
    std::vector<std::shared_ptr<Operation>> next;
    {
        const std::lock_guard guard(mutex);
        auto &operations = of_identity()[identity].operations;
        const auto is_over = [](const std::weak_ptr<Operation> &operation) {
            const auto held = operation.lock();
            return !held || held->is_done();
        };
        while (!operations.empty() && is_over(operations.front())) operations.pop_front();
        for (std::size_t i = 0; i < std::min(kAhead, operations.size()); ++i) {
            if (auto held = operations[i].lock()) next.push_back(std::move(held));
        }
    }
    for (const auto &operation : next) operation->compare();
}

void check_order(const Member &member, std::uint64_t own, const Call &other, const std::string &operation) {
    const std::lock_guard guard(mutex);
    Launched &launched = of_identity()[member.identity];
    auto &with_peer = launched.common[other.identity];
    const auto after = with_peer.upper_bound(own);
    const bool is_late = after != with_peer.end() && after->second < other.launch;
    const bool is_early = after != with_peer.begin() && std::prev(after)->first < own &&
                          std::prev(after)->second > other.launch;
    if ((is_late || is_early) && launched.reported++ == 0) {
        report("NCCL: two ranks launch operations in different orders, which can deadlock: %s",
               operation.c_str());
    }
    with_peer[own] = other.launch;
    if (with_peer.size() > 16 * kAhead) with_peer.erase(with_peer.begin());
}

}  // namespace fake::nccl
