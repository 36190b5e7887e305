// Runs this project's kernels on the host, as plain C++, to test their indexing, barriers and arithmetic.
//
// The host compiler reads every `kernels/*.cu` with this header before it. The blocks of a grid run one after
// another. The threads of a block are fibers that run in turn and stop where GPU threads would wait: at a
// barrier of the block, and at a shuffle of the warp. A barrier that not all threads reach is an error, and so
// is whatever `sanitizer.cpp` finds if it is linked in. A host cannot show coalescing, registers, and the
// rounding of fast intrinsics, nor races between blocks unless their order matters.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#define ULYSSES_EMULATION 1
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Functions of the emulation itself, whose accesses the sanitizer ignores.
#define NOT_SANITIZED __attribute__((no_sanitize("thread")))

struct Index3 {
    unsigned x, y, z;
};

namespace emulation {

// What a thread can ask about itself.
struct Position {
    Index3 thread, block, block_size, grid_size;
};
inline thread_local Position position{};

// Warp-wide instructions. All lanes of a warp must be in the same one; only kSync orders their accesses.
enum class WarpOp { kSync, kShuffle, kMma, kLoadMatrix };

// Stops this fiber until all threads of the block have reached this point.
void sync_block();
// Stops this fiber until all lanes of its warp have reached this point.
void sync_warp(WarpOp op = WarpOp::kSync);
// Slot of kSlotBytes in which this lane leaves a value for its warp, and the slot of lane `lane`.
inline constexpr std::size_t kSlotBytes = 32;
void *exchange_slot();
const void *exchange_slot_of(unsigned lane);
void *dynamic_shared();
// The static array in shared memory that is declared at `declaration`.
void *static_shared(const void *declaration, std::size_t bytes);

// Stops the launch with an error.
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
// Called when the arguments are read and the kernel itself begins.
void begin_kernel();

// Fails if this thread must not make the access. Does nothing in kernels that are compiled without sanitizer.
void check_access(const void *address, std::size_t bytes, bool is_write);
// Fails if the address is not in shared memory; otherwise returns its distance from the start, which determines
// the bank.
std::size_t shared_offset(const void *address);
void count_bank_conflicts(unsigned conflicts);

// Asynchronous copies to shared memory: the target is NaN until the wait. The first `source_bytes` of `bytes`
// are copied, the rest becomes 0.
void copy_async(void *to, const void *from, unsigned bytes, unsigned source_bytes);
// Makes a group of the copies since the last call.
void commit_copies();
// Completes all groups but the last `pending` ones.
void wait_for_copies(unsigned pending);

template <typename T> NOT_SANITIZED T shuffle(T value, unsigned source_lane) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    std::memcpy(exchange_slot(), &value, sizeof(T));
    const void *source = exchange_slot_of(source_lane);
    sync_warp(WarpOp::kShuffle);
    std::memcpy(&value, source, sizeof(T));
    return value;
}

// A kernel's parameters as text, which the launching side compares with its arguments. `W4` is a pointer to
// writable elements of 4 bytes, `R4` a read-only one, `u4` `U8` `i4` `f4` are scalars, and `s24` is a struct
// of 24 bytes passed by value.
template <typename T> struct Describe {
    static std::string text() { return "s" + std::to_string(sizeof(T)); }
};
template <> struct Describe<int> {
    static std::string text() { return "i4"; }
};
template <> struct Describe<unsigned> {
    static std::string text() { return "u4"; }
};
template <> struct Describe<unsigned long long> {
    static std::string text() { return "U8"; }
};
template <> struct Describe<float> {
    static std::string text() { return "f4"; }
};
template <typename T> struct Describe<T *> {
    static std::string text() { return "W" + std::to_string(sizeof(T)); }
};
template <typename T> struct Describe<const T *> {
    static std::string text() { return "R" + std::to_string(sizeof(T)); }
};

struct Entry {
    std::string signature;
    // Calls the kernel for one thread; `arguments` are pointers to the parameters, as for cuLaunchKernel.
    std::function<void(void **)> run;
};

void add_entry(const char *name, Entry entry);

template <typename... P, std::size_t... I>
NOT_SANITIZED void call(void (*kernel)(P...), void **arguments, std::index_sequence<I...>) {
    begin_kernel();
    kernel(*static_cast<P *>(arguments[I])...);
}

struct Registration {
    template <typename... P> Registration(const char *name, void (*kernel)(P...)) {
        std::string signature;
        ((signature += (signature.empty() ? "" : " ") + Describe<P>::text()), ...);
        add_entry(name, {signature, [kernel](void **arguments) {
                             call(kernel, arguments, std::index_sequence_for<P...>());
                         }});
    }
};

}  // namespace emulation

#define threadIdx (::emulation::position.thread)
#define blockIdx (::emulation::position.block)
#define blockDim (::emulation::position.block_size)
#define gridDim (::emulation::position.grid_size)

#define KERNEL(name, ...)                                                  \
    extern "C" void name(__VA_ARGS__);                                     \
    static const ::emulation::Registration register_##name(#name, &name); \
    extern "C" void name(__VA_ARGS__)
#define KERNEL_OF_THREADS(name, threads, ...) KERNEL(name, __VA_ARGS__)

#define DYNAMIC_SHARED(T, name) T *name = static_cast<T *>(::emulation::dynamic_shared())
#define SHARED(T, name, extents)           \
    static char name##_declaration;        \
    typedef T name##_array extents;        \
    name##_array &name =                   \
        *static_cast<name##_array *>(::emulation::static_shared(&name##_declaration, sizeof(name##_array)))

inline void __syncthreads() { ::emulation::sync_block(); }
inline void __syncwarp(unsigned = 0xffffffffu) { ::emulation::sync_warp(); }

template <typename T> T __shfl_sync(unsigned, T value, unsigned lane) {
    return ::emulation::shuffle(value, lane % 32);
}
template <typename T> T __shfl_xor_sync(unsigned, T value, unsigned mask) {
    return ::emulation::shuffle(value, (threadIdx.x % 32) ^ mask);
}
template <typename T> T __shfl_down_sync(unsigned, T value, unsigned delta) {
    const unsigned lane = threadIdx.x % 32;
    return ::emulation::shuffle(value, lane + delta < 32 ? lane + delta : lane);
}

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

#include "../common.cuh"

inline float bf16_to_float(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

// Rounds to nearest even, as `cvt.rn.bf16.f32` does; NaN stays NaN.
inline bf16 float_to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return {0x7fff};
    return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline float f16_to_float(f16 x) {
    _Float16 value;
    std::memcpy(&value, &x.bits, sizeof value);
    return static_cast<float>(value);
}

inline f16 float_to_f16(float x) {
    const auto value = static_cast<_Float16>(x);
    f16 y;
    std::memcpy(&y.bits, &value, sizeof value);
    return y;
}
