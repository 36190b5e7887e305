// A communicator's handle: the state of its creation, calls and end.

#pragma once

#include "nccl.h"

// The call in progress returns ncclInProgress until it is over.
using Step = std::function<ncclResult_t()>;

// Never freed, so that every use after the end is found.
struct ncclComm {
    enum class Phase { Creating, Open, Finalized, Ended };

    std::shared_ptr<fake::nccl::Member> member;
    bool is_blocking = false;
    Phase phase = Phase::Creating;
    ncclResult_t state = ncclSuccess;
    Step step;
    int queries = 0;
    std::string last_error;
    std::uint64_t collectives = 0, splits = 0;
    std::map<int, std::uint64_t> sent, received;  // messages per peer
    std::set<std::string> connections;            // that all their ranks have made
    std::shared_ptr<fake::nccl::Operation> newest;
    std::vector<std::shared_ptr<fake::nccl::Operation>> in_flight;
    CUevent newest_done = nullptr;
    // Recursive, because a blocking call polls itself.
    std::recursive_mutex mutex;

    // Starts a call. A blocking communicator returns when it is over.
    ncclResult_t begin(Step call);
    // The state, after a step of the call in progress.
    ncclResult_t poll();
    ncclResult_t fail(ncclResult_t failure, std::string message);
    // Whether all operations are done. The driver runs those that wait for peers by itself.
    bool is_idle();
    // As NCCL does before it frees what its kernels use.
    void wait_for_gpu();
};

namespace fake::nccl {

// The communicator, or null with a report if there is none or it has ended.
ncclComm *open_communicator(ncclComm *handle, const char *function);

// Runs a function at the end of this thread's group of calls, or at once if there is none.
ncclResult_t at_end_of_group(std::function<ncclResult_t()> end);
bool is_in_group();

}  // namespace fake::nccl
