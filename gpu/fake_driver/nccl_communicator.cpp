// Creation, split and end of communicators, and the state of their calls.

#include "nccl_communicator.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <unistd.h>

extern "C" CUresult cuDeviceGetUuid_v2(unsigned char uuid[16], CUdevice device);
extern "C" CUresult cuEventSynchronize(CUevent event);
extern "C" CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device);
extern "C" CUresult cuMemPoolGetAccess(int *access, CUmemoryPool pool, const int *location);

using namespace fake::nccl;
using fake::report;

struct ncclUniqueId {
    char internal[128];
};

// The fields up to NCCL 2.17; later ones are integers and pointers that the check below reads by offset.
struct ncclConfig {
    std::size_t size;
    unsigned magic, version;
    int blocking;
};

namespace {

constexpr int kUndefined = INT_MIN;
constexpr unsigned kMagic = 0xcafebeef;
constexpr auto kPoll = std::chrono::microseconds(50);
constexpr auto kAbortTimeout = std::chrono::seconds(20);
// The first version that aborts a group of communicators together.
constexpr int kAbortsTogether = 22'200;
constexpr int kSharesGpus = 23'000;
// The first version that copies between GPUs of one process only where memory pools allow it.
constexpr int kKnowsPools = 22'300;

std::mutex registry_mutex;
std::set<ncclComm *> &registry() {
    static auto *all = new std::set<ncclComm *>();
    return *all;
}

ncclComm *create(std::shared_ptr<Member> member, bool is_blocking) {
    auto *communicator = new ncclComm();
    communicator->member = std::move(member);
    communicator->is_blocking = is_blocking;
    const std::lock_guard guard(registry_mutex);
    registry().insert(communicator);
    return communicator;
}

// The size of ncclConfig_t in the header of a version.
std::size_t config_bytes(unsigned version) {
    if (version < 22'700) return 48;  // since 2.26, trafficClass fills the padding
    if (version < 22'800) return 72;
    if (version < 22'900) return 80;
    return version < 23'000 ? 88 : 96;
}

// Fields that the caller leaves undefined, as this library's version would read them.
bool is_valid(const ncclConfig *config) {
    if (config->magic != kMagic || config->size != config_bytes(config->version)) {
        report("NCCL: ncclConfig_t has %zu bytes, magic %x and version %u, which do not fit together", config->size,
               config->magic, config->version);
        return false;
    }
    const bool is_blocking_valid = config->blocking == 0 || config->blocking == 1 || config->blocking == kUndefined;
    const auto *bytes = reinterpret_cast<const unsigned char *>(config);
    const auto is_undefined = [&](std::size_t offset) {
        int value;
        std::memcpy(&value, bytes + offset, sizeof value);
        return value == kUndefined;
    };
    bool are_others_undefined = true;
    const std::size_t last = version() >= 23'000 ? 88 : version() >= 22'900 ? 84 : version() >= 22'800 ? 76 : 68;
    for (const std::size_t offset : {20, 24, 28, 40, 44, 56, 60, 64, 68, 72, 76, 80, 84, 88}) {
        if (offset + 4 > config->size || offset > last) continue;
        are_others_undefined = are_others_undefined && is_undefined(offset);
    }
    if (!is_blocking_valid || !are_others_undefined) report("NCCL: a field of ncclConfig_t has an unexpected value");
    return is_blocking_valid && are_others_undefined;
}

// What a rank says of itself when it joins.
struct Joined {
    unsigned char uuid[16];
    int process, device;
};

bool is_enabled(const char *name) {
    const char *value = std::getenv(name);
    return value != nullptr && std::strcmp(value, "1") == 0;
}

// Old versions access the tensors of another GPU of this process directly.
void check_pool(const Member &member, int peer, const Joined &other) {
    constexpr int kGpu = 1, kReadWrite = 3;
    const int location[2] = {kGpu, other.device};
    CUmemoryPool pool;
    int access = 0;
    cuDeviceGetDefaultMemPool(&pool, member.device);
    cuMemPoolGetAccess(&access, pool, location);
    if (access != kReadWrite) {
        report("NCCL: rank %d accesses the memory pool of GPU %d, which does not allow it", peer, member.device);
    }
}

// As NCCL does: several ranks of a communicator on one GPU need version 2.30 and consent.
ncclResult_t check_peers(ncclComm *communicator) {
    const Member &member = *communicator->member;
    std::vector<Joined> all(member.ranks);
    for (int rank = 0; rank < member.ranks; ++rank) {
        const auto bytes = member.board.get("rank." + std::to_string(rank));
        if (bytes && bytes->size() == sizeof(Joined)) std::memcpy(&all[rank], bytes->data(), sizeof(Joined));
    }
    const Joined &own = all[member.rank];
    for (int peer = 0; peer < member.ranks; ++peer) {
        const bool is_own_gpu = std::memcmp(own.uuid, all[peer].uuid, sizeof own.uuid) == 0;
        const bool may_share = version() >= kSharesGpus && is_enabled("NCCL_MULTI_RANK_GPU_ENABLE");
        if (peer != member.rank && is_own_gpu && !may_share) {
            return communicator->fail(ncclInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(peer) +
                                                            " and rank " + std::to_string(member.rank));
        }
        const bool is_direct = version() < kKnowsPools && !is_enabled("NCCL_P2P_DIRECT_DISABLE");
        if (!is_own_gpu && is_direct && all[peer].process == own.process) check_pool(member, peer, all[peer]);
    }
    return ncclSuccess;
}

bool are_all_set(const Member &member, const std::string &what) {
    for (int rank = 0; rank < member.ranks; ++rank) {
        if (!member.board.has(what + "." + std::to_string(rank))) return false;
    }
    return true;
}

std::uint64_t hash(const std::string &text) { return std::hash<std::string>()(text) | 1; }

// Says that a rank uses the communicator no more; the last one removes its values.
void leave(const Member &member) {
    member.board.set("end." + std::to_string(member.rank), "", 0);
    if (are_all_set(member, "end")) member.board.clear();
}

}  // namespace

ncclResult_t ncclComm::fail(ncclResult_t failure, std::string message) {
    last_error = std::move(message);
    return failure;
}

ncclResult_t ncclComm::begin(Step call) {
    step = std::move(call);
    state = ncclInProgress;
    queries = is_blocking ? 0 : queries_in_progress();
    while (is_blocking && poll() == ncclInProgress) std::this_thread::sleep_for(kPoll);
    return poll();
}

ncclResult_t ncclComm::poll() {
    const std::lock_guard guard(mutex);
    if (step && queries-- <= 0) {
        const ncclResult_t result = step();
        if (result != ncclInProgress) {
            step = nullptr;
            state = result;
        }
    }
    if (member->is_faulty && !step && state == ncclSuccess) {
        state = fail(ncclRemoteError, "a remote process exited or there was a network error (injected)");
    }
    return state;
}

bool ncclComm::is_idle() {
    const auto is_done = [](const auto &operation) { return operation->is_done(); };
    in_flight.erase(std::remove_if(in_flight.begin(), in_flight.end(), is_done), in_flight.end());
    return in_flight.empty();
}

void ncclComm::wait_for_gpu() {
    if (newest_done != nullptr) cuEventSynchronize(newest_done);
}

ncclComm *fake::nccl::open_communicator(ncclComm *handle, const char *function) {
    const std::lock_guard guard(registry_mutex);
    if (handle == nullptr || registry().count(handle) == 0) {
        report("NCCL: %s on a handle that is no communicator", function);
        return nullptr;
    }
    if (handle->phase == ncclComm::Phase::Ended) {
        report("NCCL: %s on communicator %s after its end", function, handle->member->board.name().c_str());
        return nullptr;
    }
    return handle;
}

FAKE_EXPORT ncclResult_t ncclGetVersion(int *result) {
    MAY_FAIL(ncclSystemError);
    *result = version();
    return ncclSuccess;
}

FAKE_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    MAY_FAIL(ncclSystemError);
    std::random_device random;
    const std::uint64_t drawn = (static_cast<std::uint64_t>(random()) << 32) | random();
    const char *address = std::getenv("NCCL_COMM_ID");
    std::memset(id, 0, sizeof *id);
    std::snprintf(id->internal, sizeof id->internal, "%016lx", address != nullptr ? hash(address) : drawn);
    return ncclSuccess;
}

FAKE_EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm **created, int ranks, ncclUniqueId id, int rank,
                                                const ncclConfig *config) {
    MAY_FAIL(ncclSystemError);
    *created = nullptr;
    if (!is_valid(config)) return ncclInvalidArgument;
    const int device = fake::current_device();
    if (device < 0 || rank < 0 || rank >= ranks) {
        report("NCCL: rank %d of %d is created on GPU %d", rank, ranks, device);
        return ncclInvalidArgument;
    }
    const std::string name(id.internal, strnlen(id.internal, sizeof id.internal));
    const std::uint64_t identity = hash(name + std::to_string(rank));
    auto member = std::make_shared<Member>(Board(name), rank, ranks, rank, device, identity);
    ncclComm *communicator = create(member, config->blocking != 0 || is_blocking_forced());
    *created = communicator;
    const std::string own = "rank." + std::to_string(rank);
    if (member->board.has(own)) report("NCCL: rank %d joins communicator %s twice", rank, name.c_str());
    Joined joined{{}, getpid(), device};
    if (cuDeviceGetUuid_v2(joined.uuid, device) != CUDA_SUCCESS) return ncclUnhandledCudaError;
    member->board.set(own, &joined, sizeof joined);
    const std::lock_guard guard(communicator->mutex);
    return communicator->begin([communicator, member]() -> ncclResult_t {
        if (!are_all_set(*member, "rank")) return ncclInProgress;
        communicator->phase = ncclComm::Phase::Open;
        return check_peers(communicator);
    });
}

FAKE_EXPORT ncclResult_t ncclCommSplit(ncclComm *handle, int color, int key, ncclComm **created, const ncclConfig *config) {
    MAY_FAIL(ncclSystemError);
    ncclComm *parent = open_communicator(handle, __func__);
    if (parent == nullptr || !is_valid(config)) return ncclInvalidArgument;
    if (is_in_group()) report("NCCL: ncclCommSplit in a group of calls");
    const std::lock_guard guard(parent->mutex);
    if (parent->step || parent->phase != ncclComm::Phase::Open) {
        report("NCCL: ncclCommSplit while communicator %s is busy or ends", parent->member->board.name().c_str());
        return ncclInvalidArgument;
    }
    const std::string what = "split" + std::to_string(parent->splits++);
    const bool is_blocking = config->blocking != 0 || is_blocking_forced();
    const std::array<int, 2> own{color, key};
    parent->member->board.set(what + "." + std::to_string(parent->member->rank), own.data(), sizeof own);
    *created = nullptr;
    const ncclResult_t begun = parent->begin([=]() -> ncclResult_t {
        const Member &of = *parent->member;
        if (!are_all_set(of, what)) return ncclInProgress;
        std::vector<std::array<int, 2>> members;  // key and rank
        for (int rank = 0; rank < of.ranks; ++rank) {
            std::array<int, 2> asked{};
            const auto bytes = of.board.get(what + "." + std::to_string(rank));
            if (bytes && bytes->size() == sizeof asked) std::memcpy(asked.data(), bytes->data(), sizeof asked);
            if (asked[0] == color) members.push_back({asked[1], rank});
        }
        if (color < 0) return ncclSuccess;
        std::sort(members.begin(), members.end());
        const auto is_own = [&](const std::array<int, 2> &member) { return member[1] == of.rank; };
        const auto rank = std::find_if(members.begin(), members.end(), is_own) - members.begin();
        Board board(of.board.name() + "-" + what + "-" + std::to_string(color));
        auto member = std::make_shared<Member>(board, static_cast<int>(rank), static_cast<int>(members.size()),
                                               of.world_rank, of.device, of.identity);
        ncclComm *child = create(member, is_blocking);
        child->phase = ncclComm::Phase::Open;
        *created = child;
        return ncclSuccess;
    });
    // As NCCL does: whether the child exists, only the parent's state says.
    return begun == ncclInProgress ? ncclSuccess : begun;
}

FAKE_EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm *handle, ncclResult_t *state) {
    MAY_FAIL(ncclSystemError);
    ncclComm *communicator = open_communicator(handle, __func__);
    if (communicator == nullptr) return ncclInvalidArgument;
    *state = communicator->poll();
    return ncclSuccess;
}

FAKE_EXPORT ncclResult_t ncclCommFinalize(ncclComm *handle) {
    MAY_FAIL(ncclSystemError);
    ncclComm *communicator = open_communicator(handle, __func__);
    if (communicator == nullptr) return ncclInvalidArgument;
    const std::lock_guard guard(communicator->mutex);
    if (communicator->poll() != ncclSuccess) return communicator->state;
    if (communicator->phase != ncclComm::Phase::Open) return ncclInvalidArgument;
    communicator->phase = ncclComm::Phase::Finalized;
    return communicator->begin([communicator] {
        if (!communicator->is_idle()) return ncclInProgress;
        communicator->wait_for_gpu();
        return ncclSuccess;
    });
}

FAKE_EXPORT ncclResult_t ncclCommDestroy(ncclComm *handle) {
    MAY_FAIL(ncclSystemError);
    ncclComm *communicator = open_communicator(handle, __func__);
    if (communicator == nullptr) return ncclInvalidArgument;
    const std::lock_guard guard(communicator->mutex);
    if (communicator->step || communicator->phase != ncclComm::Phase::Finalized || !communicator->is_idle()) {
        report("NCCL: communicator %s is destroyed before it is finalized", communicator->member->board.name().c_str());
    }
    communicator->phase = ncclComm::Phase::Ended;
    leave(*communicator->member);
    return ncclSuccess;
}

// Waits until the GPU has ended all operations, as NCCL does before it frees what their kernels use.
static ncclResult_t finish_abort(ncclComm *communicator) {
    const auto started = std::chrono::steady_clock::now();
    const std::lock_guard guard(communicator->mutex);
    while (!communicator->is_idle()) {
        if (std::chrono::steady_clock::now() - started > kAbortTimeout) {
            report("NCCL: the abort of communicator %s waits for %s, which does not end",
                   communicator->member->board.name().c_str(), communicator->in_flight.front()->describe().c_str());
            break;
        }
        std::this_thread::sleep_for(kPoll);
    }
    if (communicator->in_flight.empty()) communicator->wait_for_gpu();
    leave(*communicator->member);
    return ncclSuccess;
}

FAKE_EXPORT ncclResult_t ncclCommAbort(ncclComm *handle) {
    MAY_FAIL(ncclSystemError);
    ncclComm *communicator = open_communicator(handle, __func__);
    if (communicator == nullptr) return ncclInvalidArgument;
    {
        const std::lock_guard guard(communicator->mutex);
        communicator->step = nullptr;
        communicator->state = ncclSuccess;
        communicator->phase = ncclComm::Phase::Ended;
        communicator->member->is_aborted = true;
    }
    if (version() < kAbortsTogether) return finish_abort(communicator);
    return at_end_of_group([communicator] { return finish_abort(communicator); });
}

FAKE_EXPORT const char *ncclGetErrorString(ncclResult_t result) {
    constexpr const char *texts[] = {
        "no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument",
        "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress",
    };
    return result >= 0 && result <= ncclInProgress ? texts[result] : "unknown result code";
}

FAKE_EXPORT const char *ncclGetLastError(ncclComm *handle) {
    const std::lock_guard guard(registry_mutex);
    return handle != nullptr && registry().count(handle) != 0 ? handle->last_error.c_str() : "";
}
