// Definitions that all kernels share: element types, vector accesses, reductions within a block.
//
// Kernels include only this file, and for tensor cores `mma.cuh`, `wgmma.cuh`, `tma.cuh` and `attention_*.cuh`. They do not need the
// CUDA toolkit's headers, so NVRTC compiles a kernel on any machine with a driver. The host compiler reads the same
// sources with `emulation/emulation.h` before them.
//
// Conventions
// - Elements are f32, bf16 or f16; all arithmetic is in f32 and rounded once, when it is stored.
// - Offsets into tensors are 64 bits wide: a tensor may have more than 2^32 elements.
// - Reductions have a fixed order. There are no atomics, so a kernel always gives the same bits.
// - Every entry point is declared with KERNEL(name, parameters...), outputs first; everything else in a `.cu`
//   file is in an anonymous namespace.

#ifndef ULYSSES_COMMON_CUH
#define ULYSSES_COMMON_CUH

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
    u16 bits;
};

struct f16 {
    u16 bits;
};

#ifndef ULYSSES_EMULATION
#define KERNEL(name, ...) extern "C" __global__ void name(__VA_ARGS__)
// A kernel whose blocks have so many threads, which bounds its registers.
#define KERNEL_OF_THREADS(name, threads, ...) extern "C" __global__ void __launch_bounds__(threads, 1) name(__VA_ARGS__)
// A struct that is read in place: without this, a reference may refer to a copy in local memory.
#define BY_VALUE(T) const __grid_constant__ T
// The block's dynamic shared memory as an array of T, aligned as `wgmma` needs it.
#define DYNAMIC_SHARED(T, name)                                     \
    extern __shared__ __align__(1024) unsigned char shared_bytes_[]; \
    T *name = reinterpret_cast<T *>(shared_bytes_)
// A static array of T in the block's shared memory: SHARED(float, scratch, [kWarp]).
#define SHARED(T, name, extents) __shared__ T name extents

__device__ __forceinline__ float bf16_to_float(bf16 x) {
    return __uint_as_float(static_cast<u32>(x.bits) << 16);
}

__device__ __forceinline__ bf16 float_to_bf16(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

__device__ __forceinline__ float f16_to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

__device__ __forceinline__ f16 float_to_f16(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
#else
#define BY_VALUE(T) const T
float bf16_to_float(bf16 x);
bf16 float_to_bf16(float x);
float f16_to_float(f16 x);
f16 float_to_f16(float x);
#endif

// Reads an element as f32.
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return bf16_to_float(x); }
__device__ __forceinline__ float widen(f16 x) { return f16_to_float(x); }

// Rounds an f32 to an element, to nearest even.
template <typename T> __device__ __forceinline__ T round_to(float x);
template <> __device__ __forceinline__ float round_to<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 round_to<bf16>(float x) { return float_to_bf16(x); }
template <> __device__ __forceinline__ f16 round_to<f16>(float x) { return float_to_f16(x); }

// N adjacent elements, read and written in as few accesses as possible, of up to 16 bytes.
template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
    T at[N];
};

// The same bytes as another type.
template <typename To, typename From> __device__ __forceinline__ To bits_as(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "of equal size");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

// Number of elements of T in 16 bytes.
template <typename T> constexpr int kPack = 16 / sizeof(T);

// Whether addresses allow accesses of 16 bytes.
template <typename... T> __device__ __forceinline__ bool is_aligned(const T *... pointers) {
    return (... && ((reinterpret_cast<u64>(pointers) & 15) == 0));
}

// Reads N elements as f32. The address is aligned to all of them, up to 16 bytes.
template <int N, typename T> __device__ __forceinline__ Pack<float, N> load(const T *from) {
    const Pack<T, N> elements = *reinterpret_cast<const Pack<T, N> *>(from);
    Pack<float, N> values;
    for (int k = 0; k < N; ++k) values.at[k] = widen(elements.at[k]);
    return values;
}

// Rounds N values to elements and writes them. The address is aligned as for `load`.
template <int N, typename T> __device__ __forceinline__ void store(T *to, const Pack<float, N> &values) {
    Pack<T, N> elements;
    for (int k = 0; k < N; ++k) elements.at[k] = round_to<T>(values.at[k]);
    *reinterpret_cast<Pack<T, N> *>(to) = elements;
}

// `load` at element i of a row of `size`, for any alignment: without alignment one element at a time, and 0
// past the row's end. So the elements that a thread sums, and their order, do not depend on alignment.
template <int N, typename T>
__device__ __forceinline__ Pack<float, N> load_in_row(const T *row, u32 i, u32 size, bool aligned) {
    if (aligned) return load<N>(row + i);
    Pack<float, N> values;
    for (int k = 0; k < N; ++k) values.at[k] = i + k < size ? widen(row[i + k]) : 0.0f;
    return values;
}

// The counterpart of `load_in_row`.
template <int N, typename T>
__device__ __forceinline__ void store_in_row(T *row, u32 i, u32 size, bool aligned, const Pack<float, N> &values) {
    if (aligned) return store<N>(row + i, values);
    for (int k = 0; k < N; ++k) {
        if (i + k < size) row[i + k] = round_to<T>(values.at[k]);
    }
}

// cap · tanh(x / cap), or x if `cap` is 0. The derivative at the result y is `softcap_slope`.
__device__ __forceinline__ float softcap(float x, float cap) { return cap == 0.0f ? x : cap * tanhf(x / cap); }

__device__ __forceinline__ float softcap_slope(float y, float cap) {
    const float t = cap == 0.0f ? 0.0f : y / cap;
    return 1.0f - t * t;
}

inline constexpr u32 kWarp = 32;
inline constexpr u32 kFullWarp = 0xffffffffu;

#define kNegativeInfinity __int_as_float(0xff800000)

struct Sum {
    __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
    __device__ __forceinline__ static float identity() { return 0.0f; }
};

struct Max {
    __device__ __forceinline__ float operator()(float a, float b) const { return a > b ? a : b; }
    __device__ __forceinline__ static float identity() { return kNegativeInfinity; }
};

// Combines one value per lane; every lane gets the result. All 32 lanes of the warp must call it.
template <typename Op> __device__ __forceinline__ float warp_reduce(float value) {
    const Op combine;
    for (u32 distance = kWarp / 2; distance > 0; distance /= 2) {
        value = combine(value, __shfl_xor_sync(kFullWarp, value, distance));
    }
    return value;
}

// Combines one value per thread; every thread gets the result. All threads of the block must call it: a whole
// number of warps, at most 1024 threads. `scratch` holds 32 floats, and may be reused after it returns.
template <typename Op> __device__ __forceinline__ float block_reduce(float value, float *scratch) {
    const u32 lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    value = warp_reduce<Op>(value);
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    value = warp_reduce<Op>(lane < warps ? scratch[lane] : Op::identity());
    __syncthreads();
    return value;
}

// Index of this thread in the grid, and the number of threads of the grid, for grid-stride loops.
__device__ __forceinline__ u64 global_thread() {
    return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ u64 global_threads() { return static_cast<u64>(gridDim.x) * blockDim.x; }

// Threads per block, and elements per tile, in kernels over flat tensors: `Grid::tiles`.
inline constexpr u32 kThreads = 256;
inline constexpr u32 kTile = 4096;

// Runs a body for the packs of N elements in a tile of a flat tensor of `size`, and for single elements at
// the end of the last tile. A body is a struct with `template <int N> __device__ void at(u64 i)`, which
// processes the elements from i to i + N. A thread has kTile / (N · kThreads) packs; for a full tile the loop
// is unrolled, so that all loads are in flight before the first value is needed.
template <int N, typename Body> __device__ __forceinline__ void for_each_in_tile(u64 tile, u64 size, Body &body) {
    constexpr u32 kStride = kThreads * N;
    const u64 first = tile * kTile + threadIdx.x * N;
    if ((tile + 1) * kTile <= size) {
#pragma unroll
        for (u32 offset = 0; offset < kTile; offset += kStride) body.template at<N>(first + offset);
        return;
    }
#pragma unroll 1
    for (u64 i = first; i < size; i += kStride) {
        if (i + N <= size) {
            body.template at<N>(i);
        } else {
#pragma unroll 1
            for (u64 rest = i; rest < size; ++rest) body.template at<1>(rest);
        }
    }
}

// As above for the whole tensor, one tile per block, with packs of N if `aligned`.
template <int N, typename Body> __device__ __forceinline__ void for_each_pack(u64 size, bool aligned, Body body) {
    if (aligned) {
        for_each_in_tile<N>(blockIdx.x, size, body);
    } else {
        for_each_in_tile<1>(blockIdx.x, size, body);
    }
}

// Expands `macro(type, suffix)` for every element type.
#define FOR_EACH_FLOAT(macro) \
    macro(float, f32)         \
    macro(bf16, bf16)         \
    macro(f16, f16)

// The type of sums of T: f32 for the 16-bit floats, otherwise T. For transposes and reductions over ranks,
// which support every element type of communication.
template <typename T> struct Wide {
    typedef T type;
    __device__ __forceinline__ static T of(T x) { return x; }
    __device__ __forceinline__ static T round(T x) { return x; }
};
template <typename T> struct WideFloat {
    typedef float type;
    __device__ __forceinline__ static float of(T x) { return widen(x); }
    __device__ __forceinline__ static T round(float x) { return round_to<T>(x); }
};
template <> struct Wide<bf16> : WideFloat<bf16> {};
template <> struct Wide<f16> : WideFloat<f16> {};

// Sums of integers wrap, as on the CPU.
template <typename T> __device__ __forceinline__ T plus(T a, T b) { return static_cast<T>(a + b); }
template <> __device__ __forceinline__ i64 plus<i64>(i64 a, i64 b) {
    return static_cast<i64>(static_cast<u64>(a) + static_cast<u64>(b));
}

// Expands `macro(type, suffix)` for every element type of communication.
#define FOR_EACH_ELEMENT(macro) \
    FOR_EACH_FLOAT(macro)       \
    macro(double, f64)          \
    macro(i64, i64)             \
    macro(u32, u32)             \
    macro(u8, u8)

#endif
