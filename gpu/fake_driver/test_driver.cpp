// One fault of a program per name on the command line, to test that the fake driver finds it; `none` is the same work
// without a fault. test_driver.py runs them all.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>

#include "stream.h"

extern "C" {
    CUresult cuInit(unsigned);
    CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
    CUresult cuCtxSetCurrent(CUcontext);
    CUresult cuStreamCreate(CUstream *, unsigned);
    CUresult cuStreamSynchronize(CUstream);
    CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned);
    CUresult cuEventCreate(CUevent *, unsigned);
    CUresult cuEventRecord(CUevent, CUstream);
    CUresult cuEventQuery(CUevent);
    CUresult cuMemAllocAsync(CUdeviceptr *, std::size_t, CUstream);
    CUresult cuMemFreeAsync(CUdeviceptr, CUstream);
    CUresult cuMemHostAlloc(void **, std::size_t, unsigned);
    CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, std::size_t, CUstream);
    CUresult cuMemcpyDtoHAsync_v2(void *, CUdeviceptr, std::size_t, CUstream);
    CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr, const void *, std::size_t, CUstream);
    CUresult cuModuleLoadData(CUmodule *, const void *);
    CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *);
    CUresult cuFuncSetAttribute(CUfunction, int, int);
    CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                            void **, void **);
    CUresult cuGraphLaunch(void *, CUstream);
}

namespace {

constexpr std::size_t kBytes = 10'000;

void require(bool holds, const char *what) {
    if (holds) return;
    std::fprintf(stderr, "test_driver: %s\n", what);
    std::exit(1);
}

void ok(CUresult result) { require(result == CUDA_SUCCESS, "a call failed"); }

// Two streams of a GPU, a tensor of the first, and page-locked memory.
struct Program {
    CUcontext context;
    CUstream first, second;
    CUevent event;
    CUdeviceptr tensor;
    unsigned char *host;

    explicit Program(int device = 0) {
        ok(cuInit(0));
        ok(cuDevicePrimaryCtxRetain(&context, device));
        ok(cuCtxSetCurrent(context));
        ok(cuStreamCreate(&first, 1));
        ok(cuStreamCreate(&second, 1));
        ok(cuEventCreate(&event, 2));
        ok(cuMemAllocAsync(&tensor, kBytes, first));
        ok(cuMemHostAlloc(reinterpret_cast<void **>(&host), kBytes, 0));
    }

    void fill() { ok(cuMemsetD8Async(tensor, 7, kBytes, first)); }
    void order() {
        ok(cuEventRecord(event, first));
        ok(cuStreamWaitEvent(second, event, 0));
    }
    void store(CUstream stream) { ok(cuMemcpyDtoHAsync_v2(host, tensor, kBytes, stream)); }
    void read() const { require(host[0] == 7 && host[kBytes - 1] == 7, "the host reads other bytes than were written"); }
};

void none() {
    Program p;
    p.fill();
    p.order();
    p.store(p.second);
    ok(cuEventRecord(p.event, p.second));
    while (cuEventQuery(p.event) == CUDA_ERROR_NOT_READY) continue;
    p.read();
    ok(cuMemFreeAsync(p.tensor, p.second));
    ok(cuStreamSynchronize(p.second));
}

// A kernel may use 48 KiB of dynamic shared memory, and with its consent as much as the GPU has for a block.
void shared_memory() {
    Program p;
    CUmodule module;
    CUfunction function;
    ok(cuModuleLoadData(&module, "fake cubin\nattention_zero\n"));
    ok(cuModuleGetFunction(&function, module, "attention_zero"));
    unsigned long long count = kBytes / sizeof(float);
    void *arguments[] = {&p.tensor, &count};
    const auto launch = [&](unsigned kib) {
        return cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, kib << 10, p.first, arguments, nullptr);
    };
    const auto allow = [&](int kib) { return cuFuncSetAttribute(function, 8, kib << 10); };
    ok(launch(48));
    require(launch(100) == CUDA_ERROR_INVALID_VALUE, "a launch with 100 KiB needs consent");
    ok(allow(100));
    ok(launch(100));
    require(launch(101) == CUDA_ERROR_INVALID_VALUE, "a launch has more than was allowed");
    require(allow(228) == CUDA_ERROR_INVALID_VALUE, "a GPU has 227 KiB");
    ok(cuStreamSynchronize(p.first));
}

// FAKE_DRIVER_FAIL=cuMemAllocAsync:3,cuEventRecord:2+=700
void injected() {
    Program p;
    CUdeviceptr memory;
    ok(cuMemAllocAsync(&memory, kBytes, p.first));
    require(cuMemAllocAsync(&memory, kBytes, p.first) == CUDA_ERROR_OUT_OF_MEMORY, "the third call fails");
    ok(cuMemAllocAsync(&memory, kBytes, p.first));
    ok(cuEventRecord(p.event, p.first));
    for (int call = 0; call < 2; ++call) {
        require(cuEventRecord(p.event, p.first) == CUDA_ERROR_ILLEGAL_ADDRESS, "all calls from the second on fail");
    }
}

void forgotten_event() {
    Program p;
    p.fill();
    p.store(p.second);
    ok(cuStreamSynchronize(p.second));
}

void freed_early() {
    Program p;
    p.fill();
    p.order();
    p.store(p.second);
    ok(cuMemFreeAsync(p.tensor, p.first));
}

void used_after_free() {
    Program p;
    ok(cuMemFreeAsync(p.tensor, p.first));
    cuMemsetD8Async(p.tensor, 7, kBytes, p.first);
}

void host_read_too_early() {
    Program p;
    p.fill();
    p.store(p.first);
    const volatile unsigned char byte = p.host[5];
    (void)byte;
}

void host_write_too_early() {
    Program p;
    std::memset(p.host, 7, kBytes);
    ok(cuMemcpyHtoDAsync_v2(p.tensor, p.host, kBytes, p.first));
    p.read();
    p.host[5] = 8;
}

void wrong_device() {
    Program p;
    Program other(1);
    cuMemsetD8Async(p.tensor, 7, kBytes, p.first);
}

void memory_of_another_device() {
    Program p;
    Program other(1);
    cuMemsetD8Async(p.tensor, 7, kBytes, other.first);
}

void function_of_another_device() {
    Program p;
    CUmodule module;
    CUfunction function;
    ok(cuModuleLoadData(&module, "fake cubin\nattention_zero\n"));
    ok(cuModuleGetFunction(&function, module, "attention_zero"));
    Program other(1);
    unsigned long long count = kBytes / sizeof(float);
    void *arguments[] = {&other.tensor, &count};
    cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, other.first, arguments, nullptr);
}

void event_of_another_device() {
    Program p;
    Program other(1);
    cuEventRecord(p.event, other.first);
}

void past_the_end() {
    Program p;
    cuMemsetD8Async(p.tensor, 7, kBytes + 1, p.first);
}

void write_into_the_red_zone() {
    Program p;
    fake::enqueue(p.first, "a faulty kernel", {{p.tensor, kBytes, true}},
                  [&p] { reinterpret_cast<unsigned char *>(p.tensor)[kBytes] = 7; });
    ok(cuMemFreeAsync(p.tensor, p.first));
    ok(cuStreamSynchronize(p.first));
}

void no_context() {
    Program p;
    ok(cuCtxSetCurrent(nullptr));
    CUdeviceptr memory;
    cuMemAllocAsync(&memory, kBytes, p.first);
}

void unknown_function() {
    Program p;
    cuGraphLaunch(nullptr, p.first);
}

// Two operations that wait for each other, as ranks in a collective do.
void collective() {
    Program p;
    int arrived = 0;
    const auto ready = [&arrived, seen = std::make_shared<bool>(false)] {
        if (!*seen) ++arrived;
        *seen = true;
        return arrived == 2;
    };
    const auto other = [&arrived, seen = std::make_shared<bool>(false)] {
        if (!*seen) ++arrived;
        *seen = true;
        return arrived == 2;
    };
    fake::enqueue(p.first, "rank 0", {}, [] {}, ready);
    fake::enqueue(p.second, "rank 1", {}, [] {}, other);
    ok(cuStreamSynchronize(p.first));
    ok(cuStreamSynchronize(p.second));
}

}  // namespace

int main(int, char **arguments) {
    const std::map<std::string, void (*)()> all = {
        {"none", none},
        {"collective", collective},
        {"shared_memory", shared_memory},
        {"injected", injected},
        {"forgotten_event", forgotten_event},
        {"freed_early", freed_early},
        {"used_after_free", used_after_free},
        {"host_read_too_early", host_read_too_early},
        {"host_write_too_early", host_write_too_early},
        {"wrong_device", wrong_device},
        {"memory_of_another_device", memory_of_another_device},
        {"function_of_another_device", function_of_another_device},
        {"event_of_another_device", event_of_another_device},
        {"past_the_end", past_the_end},
        {"write_into_the_red_zone", write_into_the_red_zone},
        {"no_context", no_context},
        {"unknown_function", unknown_function},
    };
    all.at(arguments[1])();
}
