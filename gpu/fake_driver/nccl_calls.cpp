// Collectives, messages, and groups of calls.

#include <algorithm>
#include <csignal>
#include <utility>
#include <unistd.h>

#include "nccl_communicator.h"

extern "C" CUresult cuEventCreate(CUevent *event, unsigned flags);
extern "C" CUresult cuEventRecord(CUevent event, CUstream stream);

using namespace fake::nccl;
using fake::report;

namespace {

// The first version whose ranks connect at their first collective, not at the creation.
constexpr int kConnectsLazily = 22'200;
constexpr unsigned kWithoutTime = 2;

// A collective, or a message, until its group of calls ends.
struct Request {
    ncclComm *communicator;
    CUstream stream;
    Call call;
    const void *send;
    void *recv;
    bool is_message = false;
    Message message{};
};

struct Group {
    int depth = 0;
    std::vector<Request> requests;
    std::vector<std::function<ncclResult_t()>> ends;

    ~Group() {
        if (depth > 0) report("NCCL: a thread ended within a group of calls");
    }
};

thread_local Group group;

bool is_valid(const Request &request, const char *function) {
    const Member &member = *request.communicator->member;
    const Call &call = request.call;
    const int type = request.is_message ? request.message.type : call.type;
    const int peer = request.is_message ? request.message.peer : call.root;
    if (element_bytes(type) == 0 || !is_operator(call.op) || peer < 0 || peer >= member.ranks) {
        report("NCCL: %s with type %d, operator %d and rank %d of %d", function, type, call.op, peer, member.ranks);
        return false;
    }
    const int device = fake::device_of(request.stream);
    if (device != member.device) {
        report("NCCL: %s on a stream of GPU %d, but the communicator's is %d", function, device, member.device);
        return false;
    }
    return true;
}

// NCCL allows a rank's part in place, but no other overlap.
bool do_ranges_overlap(const std::vector<fake::Range> &ranges) {
    for (std::size_t i = 0; i < ranges.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) {
            const bool overlap = ranges[i].begin < ranges[j].begin + ranges[j].bytes &&
                                 ranges[j].begin < ranges[i].begin + ranges[i].bytes;
            if (overlap && (ranges[i].written || ranges[j].written)) return true;
        }
    }
    return false;
}

bool is_part_in_place(const Request &request) {
    const Member &member = *request.communicator->member;
    const std::size_t bytes = request.call.count * element_bytes(request.call.type);
    const auto *send = static_cast<const char *>(request.send);
    const auto *recv = static_cast<const char *>(request.recv);
    return request.call.kind == Kind::ReduceScatter && recv == send + member.rank * bytes;
}

bool are_buffers_valid(const Operation &operation, const Request &request) {
    const int device = request.communicator->member->device;
    for (const fake::Range &range : operation.ranges()) {
        if (!fake::in_allocation(device, range.begin, range.bytes)) {
            report("NCCL: %s uses %zu bytes at %zx, which are outside of any allocation of GPU %d",
                   operation.describe().c_str(), range.bytes, static_cast<std::size_t>(range.begin), device);
            return false;
        }
    }
    if (do_ranges_overlap(operation.ranges()) && !is_part_in_place(request)) {
        report("NCCL: the buffers of %s overlap", operation.describe().c_str());
        return false;
    }
    return true;
}

// Names of the connections that operations need, each with the ranks that must take part.
using Connections = std::map<std::string, std::vector<int>>;

void add_connections(const Request &request, Connections &all) {
    const Member &member = *request.communicator->member;
    if (request.is_message) {
        const auto [low, high] = std::minmax(member.rank, request.message.peer);
        const std::string name = "pair-" + std::to_string(low) + "-" + std::to_string(high);
        if (low != high) all.insert({name, {low, high}});
    } else if (version() >= kConnectsLazily) {
        std::vector<int> ranks(member.ranks);
        for (int rank = 0; rank < member.ranks; ++rank) ranks[rank] = rank;
        all.insert({"ring", ranks});
    }
}

bool are_connected(ncclComm *communicator, const Connections &connections) {
    for (const auto &[name, ranks] : connections) {
        for (const int rank : ranks) {
            if (!communicator->member->board.has(name + "." + std::to_string(rank))) return false;
        }
        communicator->connections.insert(name);
    }
    return true;
}

Connections connect(ncclComm *communicator, const std::vector<Request> &requests) {
    Connections all;
    for (const Request &request : requests) add_connections(request, all);
    for (auto next = all.begin(); next != all.end();) {
        next = communicator->connections.count(next->first) != 0 ? all.erase(next) : std::next(next);
    }
    const Member &member = *communicator->member;
    for (const auto &[name, ranks] : all) member.board.set(name + "." + std::to_string(member.rank), "", 0);
    return all;
}

std::uint64_t next_number(ncclComm *communicator, const Message &message) {
    return (message.is_send ? communicator->sent : communicator->received)[message.peer]++;
}

// The operations of a group of calls: all messages together, and each collective.
std::vector<std::shared_ptr<Operation>> operations(ncclComm *communicator, std::vector<Request> &requests) {
    const auto &member = communicator->member;
    std::vector<std::shared_ptr<Operation>> all;
    std::vector<Message> messages;
    for (Request &request : requests) {
        request.call.identity = member->identity;
        if (request.is_message) {
            request.message.number = next_number(communicator, request.message);
            messages.push_back(request.message);
            continue;
        }
        request.call.launch = next_launch(member->identity);
        all.push_back(std::make_shared<Operation>(member, request.call, communicator->collectives++, request.send,
                                                  request.recv));
        all.back()->injected = injected(member->world_rank, request.call.launch);
    }
    if (!messages.empty()) {
        Call call{Kind::Messages, 0, 0, 0, 0, member->identity, next_launch(member->identity)};
        all.push_back(std::make_shared<Operation>(member, call, std::move(messages)));
        all.back()->injected = injected(member->world_rank, call.launch);
    }
    return all;
}

void enqueue(ncclComm *communicator, CUstream stream, const std::shared_ptr<Operation> &operation) {
    operation->previous = std::exchange(communicator->newest, operation);
    communicator->is_idle();  // forgets what is done
    communicator->in_flight.push_back(operation);
    fake::enqueue(stream, operation->describe(), operation->ranges(), [operation] { operation->run(); },
                  [operation] { return operation->is_ready(); });
    if (communicator->newest_done == nullptr) cuEventCreate(&communicator->newest_done, kWithoutTime);
    if (communicator->newest_done != nullptr) cuEventRecord(communicator->newest_done, stream);
    if (operation->injected.kind == Fault::Error) communicator->member->is_faulty = true;
}

// Launches the calls of one group on one communicator.
ncclResult_t launch(ncclComm *communicator, std::vector<Request> requests) {
    const std::lock_guard guard(communicator->mutex);
    const ncclResult_t state = communicator->poll();
    if (state == ncclInProgress) {
        report("NCCL: communicator %s is used before its last call is over", communicator->member->board.name().c_str());
        return ncclInvalidArgument;
    }
    if (state != ncclSuccess) return state;
    if (communicator->phase != ncclComm::Phase::Open) {
        report("NCCL: an operation on communicator %s, which is being finalized", communicator->member->board.name().c_str());
        return ncclInvalidArgument;
    }
    const auto all = operations(communicator, requests);
    const CUstream stream = requests.front().stream;
    for (const auto &operation : all) {
        if (operation->injected.kind == Fault::Exit) kill(getpid(), SIGKILL);
        if (operation->injected.kind == Fault::Freeze) kill(getpid(), SIGSTOP);
        if (operation->injected.kind == Fault::Refuse) {
            return communicator->state = communicator->fail(ncclInternalError, "refused (injected)");
        }
        if (!are_buffers_valid(*operation, requests.front())) return ncclInvalidArgument;
        operation->announce();
        add_launched(communicator->member->identity, operation);
    }
    compare_launched(communicator->member->identity);
    const Connections missing = connect(communicator, requests);
    return communicator->begin([=]() -> ncclResult_t {
        const auto is_stalled = [](const auto &operation) { return operation->injected.kind == Fault::Stall; };
        if (std::any_of(all.begin(), all.end(), is_stalled)) return ncclInProgress;
        if (!are_connected(communicator, missing)) return ncclInProgress;
        for (const auto &operation : all) enqueue(communicator, stream, operation);
        return ncclSuccess;
    });
}

// Launches all calls of the group that has ended, per communicator.
ncclResult_t end_group() {
    std::vector<Request> requests = std::move(group.requests);
    auto ends = std::move(group.ends);
    group.requests.clear();
    group.ends.clear();
    ncclResult_t result = ncclSuccess;
    const auto note = [&](ncclResult_t outcome) {
        if (outcome != ncclSuccess && (result == ncclSuccess || result == ncclInProgress)) result = outcome;
    };
    while (!requests.empty()) {
        ncclComm *communicator = requests.front().communicator;
        const auto is_own = [&](const Request &request) { return request.communicator == communicator; };
        std::vector<Request> own;
        std::copy_if(requests.begin(), requests.end(), std::back_inserter(own), is_own);
        requests.erase(std::remove_if(requests.begin(), requests.end(), is_own), requests.end());
        note(launch(communicator, std::move(own)));
    }
    for (const auto &end : ends) note(end());
    return result;
}

ncclResult_t submit(Request request, const char *function) {
    request.communicator = open_communicator(request.communicator, function);
    if (request.communicator == nullptr || !is_valid(request, function)) return ncclInvalidArgument;
    if (request.call.count == 0 && request.message.count == 0) return ncclSuccess;
    group.requests.push_back(request);
    return group.depth > 0 ? ncclSuccess : end_group();
}

Call collective(Kind kind, std::size_t count, int type, int op, int root) {
    return {kind, type, op, root, count, 0, 0};
}

}  // namespace

bool fake::nccl::is_in_group() { return group.depth > 0; }

ncclResult_t fake::nccl::at_end_of_group(std::function<ncclResult_t()> end) {
    if (group.depth == 0) return end();
    group.ends.push_back(std::move(end));
    return ncclSuccess;
}

FAKE_EXPORT ncclResult_t ncclGroupStart() {
    ++group.depth;
    return ncclSuccess;
}

FAKE_EXPORT ncclResult_t ncclGroupEnd() {
    if (group.depth == 0) {
        report("NCCL: ncclGroupEnd without ncclGroupStart");
        return ncclInvalidUsage;
    }
    return --group.depth > 0 ? ncclSuccess : end_group();
}

FAKE_EXPORT ncclResult_t ncclAllReduce(const void *send, void *recv, std::size_t count, int type, int op,
                                       ncclComm *communicator, CUstream stream) {
    MAY_FAIL(ncclSystemError);
    return submit({communicator, stream, collective(Kind::AllReduce, count, type, op, 0), send, recv}, __func__);
}

FAKE_EXPORT ncclResult_t ncclReduceScatter(const void *send, void *recv, std::size_t count, int type, int op,
                                           ncclComm *communicator, CUstream stream) {
    MAY_FAIL(ncclSystemError);
    return submit({communicator, stream, collective(Kind::ReduceScatter, count, type, op, 0), send, recv}, __func__);
}

FAKE_EXPORT ncclResult_t ncclAllGather(const void *send, void *recv, std::size_t count, int type,
                                       ncclComm *communicator, CUstream stream) {
    MAY_FAIL(ncclSystemError);
    return submit({communicator, stream, collective(Kind::AllGather, count, type, 0, 0), send, recv}, __func__);
}

FAKE_EXPORT ncclResult_t ncclReduce(const void *send, void *recv, std::size_t count, int type, int op, int root,
                                    ncclComm *communicator, CUstream stream) {
    MAY_FAIL(ncclSystemError);
    return submit({communicator, stream, collective(Kind::Reduce, count, type, op, root), send, recv}, __func__);
}

FAKE_EXPORT ncclResult_t ncclBroadcast(const void *send, void *recv, std::size_t count, int type, int root,
                                       ncclComm *communicator, CUstream stream) {
    MAY_FAIL(ncclSystemError);
    return submit({communicator, stream, collective(Kind::Broadcast, count, type, 0, root), send, recv}, __func__);
}

FAKE_EXPORT ncclResult_t ncclSend(const void *send, std::size_t count, int type, int peer, ncclComm *communicator,
                                  CUstream stream) {
    MAY_FAIL(ncclSystemError);
    auto *buffer = static_cast<unsigned char *>(const_cast<void *>(send));
    return submit({communicator, stream, {}, nullptr, nullptr, true, {true, peer, type, count, buffer, 0}}, __func__);
}

FAKE_EXPORT ncclResult_t ncclRecv(void *recv, std::size_t count, int type, int peer, ncclComm *communicator,
                                  CUstream stream) {
    MAY_FAIL(ncclSystemError);
    auto *buffer = static_cast<unsigned char *>(recv);
    return submit({communicator, stream, {}, nullptr, nullptr, true, {false, peer, type, count, buffer, 0}}, __func__);
}
