// Uses NCCL rightly, or wrongly in one way: test_nccl.py checks what the fake NCCL reports.
//
//     test_nccl CASE

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "cuda_abi.h"

extern "C" {
CUresult cuInit(unsigned);
CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuStreamCreate(CUstream *, unsigned);
CUresult cuStreamSynchronize(CUstream);
CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *, CUdevice);
CUresult cuMemPoolSetAccess(CUmemoryPool, const int *, std::size_t);
CUresult cuModuleLoadData(CUmodule *, const void *);
CUresult cuMemAllocAsync(CUdeviceptr *, std::size_t, CUstream);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr, const void *, std::size_t, CUstream);
CUresult cuMemcpyDtoHAsync_v2(void *, CUdeviceptr, std::size_t, CUstream);
CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, std::size_t, CUstream);

struct Id {
    char bytes[128];
};
struct Config {
    std::size_t size;
    unsigned magic, version;
    int blocking, counts[3];
    void *net;
    int share, traffic;
};
typedef struct ncclComm *Comm;
int ncclGetUniqueId(Id *);
int ncclCommInitRankConfig(Comm *, int, Id, int, Config *);
int ncclCommSplit(Comm, int, int, Comm *, Config *);
int ncclCommGetAsyncError(Comm, int *);
int ncclCommFinalize(Comm);
int ncclCommDestroy(Comm);
int ncclCommAbort(Comm);
int ncclGroupStart();
int ncclGroupEnd();
int ncclAllReduce(const void *, void *, std::size_t, int, int, Comm, CUstream);
int ncclReduceScatter(const void *, void *, std::size_t, int, int, Comm, CUstream);
int ncclAllGather(const void *, void *, std::size_t, int, Comm, CUstream);
int ncclBroadcast(const void *, void *, std::size_t, int, int, Comm, CUstream);
int ncclSend(const void *, std::size_t, int, int, Comm, CUstream);
int ncclRecv(void *, std::size_t, int, int, Comm, CUstream);
}

namespace {

constexpr int kInProgress = 7, kInt32 = 2, kF16 = 6, kF32 = 7, kF64 = 8, kBf16 = 9, kSum = 0, kMax = 2;
constexpr std::size_t kCount = 6;

void expect(bool is_true, const char *what) {
    if (is_true) return;
    std::fprintf(stderr, "test_nccl: %s\n", what);
    std::_Exit(1);
}

Config config() {
    constexpr int undefined = std::numeric_limits<int>::min();
    return {sizeof(Config), 0xcafebeef, 22'200, 0, {undefined, undefined, undefined}, nullptr, undefined, undefined};
}

bool allows_peers = true;

// Until the call in progress is over.
int settle(Comm comm) {
    int state = kInProgress;
    while (ncclCommGetAsyncError(comm, &state) == 0 && state == kInProgress) usleep(50);
    return state;
}

struct Rank {
    int rank, ranks;
    Comm comm = nullptr;
    CUstream stream = nullptr, other = nullptr;

    Rank(int rank, int ranks, const Id &id) : rank(rank), ranks(ranks) {
        CUcontext context;
        cuDevicePrimaryCtxRetain(&context, rank);
        cuCtxSetCurrent(context);
        cuStreamCreate(&stream, 1);
        cuStreamCreate(&other, 1);
        if (allows_peers) allow_peers();
        Config settings = config();
        ncclCommInitRankConfig(&comm, ranks, id, rank, &settings);
        expect(settle(comm) == 0, "the communicator is not created");
    }

    void allow_peers() const {
        CUmemoryPool pool;
        cuDeviceGetDefaultMemPool(&pool, rank);
        for (int peer = 0; peer < ranks; ++peer) {
            const int access[] = {1, peer, 3};
            if (peer != rank) cuMemPoolSetAccess(pool, access, 1);
        }
    }

    // Without waiting for the GPU.
    void end(Comm ended) const {
        ncclCommFinalize(ended);
        settle(ended);
        ncclCommDestroy(ended);
    }

    template <typename T>
    T *upload(const std::vector<T> &values) const {
        CUdeviceptr memory;
        cuMemAllocAsync(&memory, values.size() * sizeof(T), stream);
        cuMemcpyHtoDAsync_v2(memory, values.data(), values.size() * sizeof(T), stream);
        return reinterpret_cast<T *>(memory);
    }

    template <typename T>
    std::vector<T> download(T *memory, std::size_t count) const {
        std::vector<T> values(count);
        cuMemcpyDtoHAsync_v2(values.data(), reinterpret_cast<CUdeviceptr>(memory), count * sizeof(T), stream);
        cuStreamSynchronize(stream);
        return values;
    }

    float *floats(std::size_t count) const { return upload(std::vector<float>(count, static_cast<float>(rank + 1))); }

    // The sum over ranks of values that all have exactly.
    template <typename T>
    void check_sum(int type, T (*value)(int)) const {
        T *memory = upload(std::vector<T>(kCount, value(rank + 1)));
        ncclAllReduce(memory, memory, kCount, type, kSum, comm, stream);
        settle(comm);
        expect(download(memory, kCount) == std::vector<T>(kCount, value(ranks * (ranks + 1) / 2)), "a sum is wrong");
    }
};

void use_everything(Rank &own) {
    own.check_sum<float>(kF32, [](int value) { return static_cast<float>(value); });
    own.check_sum<double>(kF64, [](int value) { return static_cast<double>(value); });
    own.check_sum<int>(kInt32, [](int value) { return value; });
    // Bits of 1, 2, 3 and 6 in 16 bits.
    own.check_sum<unsigned short>(kF16, [](int value) -> unsigned short {
        return value == 1 ? 0x3c00 : value == 2 ? 0x4000 : value == 3 ? 0x4200 : 0x4600;
    });
    own.check_sum<unsigned short>(kBf16, [](int value) -> unsigned short {
        return value == 1 ? 0x3f80 : value == 2 ? 0x4000 : value == 3 ? 0x4040 : 0x40c0;
    });
    const int ranks = own.ranks;
    float *one = own.floats(2), *all = own.floats(2 * ranks);
    ncclAllGather(one, all, 2, kF32, own.comm, own.stream);
    settle(own.comm);
    expect(own.download(all, 2 * ranks) == std::vector<float>({1, 1, 2, 2, 3, 3}), "a gathered value is wrong");
    ncclReduceScatter(all, one, 2, kF32, kMax, own.comm, own.stream);
    settle(own.comm);
    expect(own.download(one, 2) == std::vector<float>(2, own.rank + 1.0f), "a scattered value is wrong");
    ncclBroadcast(one, one, 2, kF32, 2, own.comm, own.stream);
    settle(own.comm);
    expect(own.download(one, 2) == std::vector<float>(2, 3.0f), "a broadcast value is wrong");
    float *sent = own.floats(1), *received = own.floats(1);
    ncclGroupStart();
    ncclSend(sent, 1, kF32, (own.rank + 1) % ranks, own.comm, own.stream);
    ncclRecv(received, 1, kF32, (own.rank + ranks - 1) % ranks, own.comm, own.stream);
    ncclGroupEnd();
    settle(own.comm);
    expect(own.download(received, 1)[0] == static_cast<float>((own.rank + ranks - 1) % ranks + 1), "a message is wrong");
    Comm child = nullptr;
    Config settings = config();
    ncclCommSplit(own.comm, own.rank == 1 ? -1 : 0, -own.rank, &child, &settings);
    expect(settle(own.comm) == 0 && (child == nullptr) == (own.rank == 1), "a split is wrong");
    if (child != nullptr) {
        float *pair = own.floats(2);
        ncclAllGather(sent, pair, 1, kF32, child, own.stream);
        settle(child);
        expect(own.download(pair, 2) == std::vector<float>({3, 1}), "a child's order is wrong");
        own.end(child);
    }
}

void sum(Rank &own, Comm comm, float *memory, std::size_t count) {
    ncclAllReduce(memory, memory, count, kF32, kSum, comm, own.stream);
    settle(comm);
}

Comm twin(Rank &own) {
    Comm made = nullptr;
    Config settings = config();
    ncclCommSplit(own.comm, 0, own.rank, &made, &settings);
    settle(own.comm);
    return made;
}

// Time for the driver to run what is queued, where waiting would never end.
void let_run() { usleep(300'000); }

const std::map<std::string, std::function<void(Rank &)>> cases = {
    {"right", use_everything},
    {"out_of_order",
     [](Rank &own) {
         float *memory = own.floats(kCount);
         if (own.rank == 1) ncclBroadcast(memory, memory, kCount, kF32, 0, own.comm, own.stream);
         else ncclAllReduce(memory, memory, kCount, kF32, kSum, own.comm, own.stream);
         let_run();
     }},
    {"other_count",
     [](Rank &own) {
         float *memory = own.floats(kCount);
         ncclAllReduce(memory, memory, own.rank == 1 ? kCount - 1 : kCount, kF32, kSum, own.comm, own.stream);
         let_run();
     }},
    {"other_message",
     [](Rank &own) {
         float *memory = own.floats(kCount);
         if (own.rank == 0) ncclSend(memory, kCount, kF32, 1, own.comm, own.stream);
         if (own.rank == 1) ncclRecv(memory, kCount - 1, kF32, 0, own.comm, own.stream);
         settle(own.comm);
         let_run();
     }},
    {"two_orders",
     [](Rank &own) {
         Comm second = twin(own);
         float *memory = own.floats(kCount);
         sum(own, own.comm, memory, 1);
         sum(own, second, memory, 1);
         for (Comm comm : own.rank == 1 ? std::vector{second, own.comm} : std::vector{own.comm, second}) {
             ncclAllReduce(memory, memory, kCount, kF32, kSum, comm, own.stream);
             settle(comm);
         }
         let_run();
     }},
    {"message_order",
     [](Rank &own) {
         float *memory = own.floats(kCount), *message = own.floats(kCount);
         const auto pass_on = [&] {
             if (own.rank == 0) ncclSend(message, kCount, kF32, 1, own.comm, own.stream);
             if (own.rank == 1) ncclRecv(message, kCount, kF32, 0, own.comm, own.stream);
             settle(own.comm);
         };
         sum(own, own.comm, memory, kCount);
         pass_on();
         if (own.rank == 0) pass_on();
         ncclAllReduce(memory, memory, kCount, kF32, kSum, own.comm, own.stream);
         settle(own.comm);
         if (own.rank == 1) pass_on();
         let_run();
     }},
    {"outside", [](Rank &own) { sum(own, own.comm, own.floats(kCount), kCount + 1); }},
    {"other_gpu",
     [](Rank &own) {
         static float *first = nullptr;
         if (own.rank == 0) first = own.floats(kCount);
         let_run();
         if (own.rank == 1) sum(own, own.comm, first, kCount);
     }},
    {"other_stream",
     [](Rank &own) {
         static CUstream first = nullptr;
         if (own.rank == 0) first = own.stream;
         let_run();
         float *memory = own.floats(kCount);
         if (own.rank == 1) ncclAllReduce(memory, memory, kCount, kF32, kSum, own.comm, first);
     }},
    {"overlap",
     [](Rank &own) {
         float *memory = own.floats(kCount + 1);
         ncclAllReduce(memory, memory + 1, kCount, kF32, kSum, own.comm, own.stream);
     }},
    {"race",
     [](Rank &own) {
         float *memory = own.floats(kCount);
         sum(own, own.comm, memory, kCount);
         cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(memory), 0, sizeof(float), own.other);
     }},
    {"busy",
     [](Rank &own) {
         float *memory = own.floats(kCount);
         for (int i = 0; i < 8; ++i) ncclAllReduce(memory, memory, kCount, kF32, kSum, own.comm, own.stream);
     }},
    {"after_end",
     [](Rank &own) {
         float *memory = own.floats(kCount);
         own.end(own.comm);
         ncclAllReduce(memory, memory, kCount, kF32, kSum, own.comm, own.stream);
     }},
    {"not_finalized", [](Rank &own) { ncclCommDestroy(own.comm); }},
    {"load",
     [](Rank &own) {
         float *memory = own.floats(kCount);
         CUmodule module;
         sum(own, own.comm, memory, kCount);  // connects
         if (own.rank != 1) let_run();
         sum(own, own.comm, memory, kCount);
         if (own.rank == 1) cuModuleLoadData(&module, "");
     }},
    {"pool", [](Rank &) {}},
    {"group_end", [](Rank &) { ncclGroupEnd(); }},
    {"group_open", [](Rank &) { ncclGroupStart(); }},
    {"config",
     [](Rank &own) {
         Config settings = config();
         settings.version = 23'000;
         Comm made = nullptr;
         ncclCommSplit(own.comm, 0, 0, &made, &settings);
     }},
};

}  // namespace

int main(int, char **arguments) {
    constexpr int ranks = 3;
    const std::string name = arguments[1];
    const bool are_processes = name == "processes";
    allows_peers = name != "pool";
    const auto &run = cases.at(are_processes ? "right" : name);
    Id id;
    ncclGetUniqueId(&id);
    if (are_processes) {
        for (int rank = 0; rank < ranks; ++rank) {
            if (fork() != 0) continue;
            cuInit(0);
            Rank own(rank, ranks, id);
            run(own);
            own.end(own.comm);
            std::exit(0);
        }
        int status = 0, failed = 0;
        while (wait(&status) > 0) failed += status != 0;
        return failed;
    }
    cuInit(0);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
            Rank own(rank, ranks, id);
            run(own);
            if (name == "right") own.end(own.comm);
        });
    }
    for (std::thread &thread : threads) thread.join();
    return 0;
}
