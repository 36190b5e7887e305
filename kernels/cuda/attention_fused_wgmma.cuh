// Parts of the fused attention kernels with products of warpgroups. A block has two of them, which own 64 of its kOwn
// rows each. A third one copies: one of its threads by TMA, or all by `cp.async`. A kernel includes this file after
// `wgmma.cuh`, `tma.cuh` and `attention_fused.cuh`.

#ifndef ULYSSES_ATTENTION_FUSED_WGMMA_CUH
#define ULYSSES_ATTENTION_FUSED_WGMMA_CUH

inline constexpr u32 kWgmmaThreads = 256, kOwn = 128;
static_assert(kOwn == kWgmmaThreads / kWarp * 16, "a warp has 16 rows");

// The third warpgroup, which copies, and its first thread, which does so alone where TMA does.
inline constexpr u32 kProducers = 128, kProducer = kWgmmaThreads, kThreadsWithProducer = kWgmmaThreads + kProducers;

// Registers of a thread: at the start, as ptxas allots 64 Ki, and later.
inline constexpr u32 kRegisters = 168, kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kProducers * kProducerRegisters + kWgmmaThreads * kConsumerRegisters <= kThreadsWithProducer * kRegisters,
              "what the producers give is enough for the others");

// Whether this thread is of the producer's warpgroup. ptxas must see that a whole warp takes the same path.
__device__ __forceinline__ bool is_in_warpgroup_of_producer() {
    return __shfl_sync(kFullWarp, threadIdx.x / 128, 0) == kProducer / 128;
}

// Arrives once for this warp, with all that its threads have read and written.
__device__ __forceinline__ void arrive_warp(u64 *barrier) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) mbarrier_arrive(barrier);
}

// The mbarriers of a pipeline of kStages stages. Each stage has one that is complete when its tile is filled, after
// `copiers` arrivals, and one that is complete when all consumer warps have released the tile.
template <u32 kStages> struct StageBarriers {
    static constexpr u32 kCount = 2 * kStages;
    u64 *first;

    __device__ __forceinline__ u64 *filled(u32 index) const { return first + index % kStages; }
    __device__ __forceinline__ u64 *used(u32 index) const { return first + kStages + index % kStages; }

    __device__ __forceinline__ void init(u32 copiers) const {
        for (u32 index = 0; index < kStages; ++index) {
            mbarrier_init(filled(index), copiers);
            mbarrier_init(used(index), kWgmmaThreads / kWarp);
        }
    }
    // Waits until the stage of the `index`-th tile is free.
    __device__ __forceinline__ void wait_for_place(u32 index) const {
        if (index >= kStages) mbarrier_wait(used(index), index / kStages - 1);
    }
    __device__ __forceinline__ void wait_for_tile(u32 index) const { mbarrier_wait(filled(index), index / kStages); }
    // This warp is past its reads of the `index`-th tile.
    __device__ __forceinline__ void release(u32 index) const { arrive_warp(used(index)); }
};

// Tiles of kRows keys or values in turns in shared memory.
template <typename T, u32 D, u32 kRows, u32 kStages> struct Ring {
    static constexpr u32 kTileElements = kRows * D, kRingElements = kStages * kTileElements;
    using Rows = Panels<T, D, kRows>;
    T *tiles;
    StageBarriers<kStages> barriers;

    // Two rings. The barriers of both are behind their tiles.
    static __device__ __forceinline__ Ring first_of_two(T *tiles) {
        return {tiles, {reinterpret_cast<u64 *>(tiles + 2 * kRingElements)}};
    }
    __device__ __forceinline__ Ring second() const {
        return {tiles + kRingElements, {barriers.first + barriers.kCount}};
    }

    __device__ __forceinline__ Rows tile(u32 index) const { return {tiles + index % kStages * kTileElements}; }
    __device__ __forceinline__ void init() const { barriers.init(1); }

    // Starts copies of the `index`-th tile, from `key` on, once the tile before it in its place is used.
    __device__ __forceinline__ void fill(u32 index, const TensorMap &tensor, u32 key, const FusedSizes &sizes) const {
        barriers.wait_for_place(index);
        mbarrier_arrive_expect_tx(barriers.filled(index), kTileElements * sizeof(T));
#pragma unroll
        for (u32 column = 0; column < D; column += kPanel) {
            tma_copy(tile(index).first + column * kRows, tensor, column, sizes.first_kv_head + block_place().kv_head, key,
                     blockIdx.z, barriers.filled(index));
        }
    }

    // Waits for the `index`-th tile.
    __device__ __forceinline__ Rows filled_tile(u32 index) const {
        barriers.wait_for_tile(index);
        return tile(index);
    }
    __device__ __forceinline__ void release(u32 index) const { barriers.release(index); }
};

// `wait_for_copies`, after which products may read what was copied.
__device__ __forceinline__ void wait_for_operands() {
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();
}

// Starts c = a · bᵀ for the rows of `a` that this warpgroup owns.
template <typename T, u32 D, u32 kRows>
__device__ __forceinline__ void start_multiply_transposed(float (&c)[1][kRows / 8][4], const Panels<T, D, kOwn> &a,
                                                          const Panels<T, D, kRows> &b) {
    const Panels<T, D, kOwn> own = a.from(threadIdx.x / 128 * 64);
#pragma unroll
    for (u32 step = 0; step < D / 16; ++step) {
        wgmma<T, kRows>(c[0], own.of_columns(step), b.of_columns(step), step > 0);
    }
    wgmma_commit();
}

// Starts c += a · b for `a` in registers.
template <typename T, u32 D, u32 kRows>
__device__ __forceinline__ void start_multiply(float (&c)[1][D / 8][4], const u32 (&a)[1][kRows / 16][4],
                                               const Panels<T, D, kRows> &b) {
#pragma unroll
    for (u32 step = 0; step < kRows / 16; ++step) wgmma<T, D>(c[0], a[0][step], b.of_rows(step));
    wgmma_commit();
}

#endif
