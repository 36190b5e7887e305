// Fused attention, backward, for sm_90a (`src/attention/fused/backward.rs`): `attention_fused_backward.cu` with
// products of warpgroups. A third warpgroup copies, in `queries` by TMA.
//
// A block owns kOwn rows of two tensors in shared memory, and a warpgroup 64 of them as operand A of its first two
// products. Tiles of the two other tensors are operand B of all products. p and ds become operands A in registers.
//
// dout·vᵀ runs while lanes compute p, and the last products of a tile while the next one begins. So there are three stages
// of tiles: one whose products end, one that is computed, one that arrives. Inside of the condition that there is a tile,
// ptxas sees that products of one pass of the loop end in the next, and does not serialize them.

#include "common.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "tma.cuh"
#include "attention_fused.cuh"
#include "attention_fused_wgmma.cuh"
#include "attention_fused_backward.cuh"

namespace {

// Packed rows of a tile of `keys`, and keys of a tile of `queries`, as many as registers permit.
constexpr u32 kRows = 64, kStages = 3;
template <u32 D> constexpr u32 kKeys = D == 64 ? 128 : 64;

// The rows that a block owns.
template <typename T, u32 D> using Own = Stage<Panels<T, D, kOwn>, kOwn>;

// Shared memory of a block of `keys`: the rows that it owns, tiles of packed rows, and barriers.
template <typename T, u32 D> struct SharedOfKeys {
    using Tile = Stage<Panels<T, D, kRows>, kRows>;
    static_assert(Own<T, D>::kBytes % 1024 == 0 && Tile::kBytes % 1024 == 0, "panels begin at multiples of 1024 bytes");
    u8 *first;

    __device__ __forceinline__ Own<T, D> own() const { return {first, 0}; }
    // The `index`-th tile of the loop.
    __device__ __forceinline__ Tile tile(u32 index) const { return {first + Own<T, D>::kBytes, index % kStages}; }
    __device__ __forceinline__ StageBarriers<kStages> barriers() const {
        return {reinterpret_cast<u64 *>(first + Own<T, D>::kBytes + kStages * Tile::kBytes)};
    }
};

// Shared memory of a block of `queries`.
template <typename T, u32 D> struct SharedOfQueries {
    using Tiles = Ring<T, D, kKeys<D>, kStages>;
    static_assert(Own<T, D>::kBytes % 1024 == 0, "panels begin at multiples of 1024 bytes");
    Own<T, D> own;
    Tiles keys, values;

    __device__ __forceinline__ explicit SharedOfQueries(u8 *first)
        : own(first, 0),
          keys(Tiles::first_of_two(reinterpret_cast<T *>(first + Own<T, D>::kBytes))),
          values(keys.second()) {}
};

// Arrives at a barrier with what this warp has copied, except by its last kPending groups of copies.
template <u32 kPending> __device__ __forceinline__ void arrive_with_copies(u64 *barrier) {
    cp_async_wait<kPending>();
    fence_async_proxy();
    arrive_warp(barrier);
}

// Copies everything that a block of `keys` reads, by all producers: packed rows are in general no tile of a tensor.
template <typename T, u32 D>
__device__ __forceinline__ void copy_for_keys(const SharedOfKeys<T, D> &shared, const Operands<T, D> &of, u32 first_key,
                                              RowRange rows) {
    // They arrive with the first tile.
    copy_keys<kProducers>(shared.own(), of, first_key);
    const auto barriers = shared.barriers();
    u32 index = 0;
#pragma unroll 1
    for (u32 row = rows.row; row < rows.past; row += kRows, ++index) {
        barriers.wait_for_place(index);
        copy_queries<kProducers>(shared.tile(index), of, row, rows.past);
        cp_async_commit();
        if (index > 0) arrive_with_copies<1>(barriers.filled(index - 1));
    }
    arrive_with_copies<0>(barriers.filled(index - 1));
}

// dk and dv of kOwn keys. The warpgroups wait for tiles, and not for each other.
template <typename T, u32 D>
__device__ __forceinline__ void keys(T *dk, T *dv, const Operands<T, D> &of, float scale) {
    DYNAMIC_SHARED(u8, bytes);
    const SharedOfKeys<T, D> shared = {bytes};
    const auto own = shared.own();
    const u32 first_key = block_place().part * kOwn, past_key = first_key + kOwn, warp_row = threadIdx.x / kWarp * 16;
    const RowRange rows = rows_that_see(of, first_key, past_key);
    if (threadIdx.x == kProducer) shared.barriers().init(kProducers / kWarp);
    __syncthreads();
    if (is_in_warpgroup_of_producer()) {
        lower_registers<kProducerRegisters>();
        if (rows.row < rows.past) copy_for_keys(shared, of, first_key, rows);
        return;
    }
    raise_registers<kConsumerRegisters>();

    float of_k[1][D / 8][4] = {}, of_v[1][D / 8][4] = {};
    // Without aliases for these arrays: the front end of NVRTC 12.4 crashes on them.
    float s[1][kRows / 8][4] = {}, dp[1][kRows / 8][4] = {};
    u32 p[1][kRows / 16][4] = {}, ds[1][kRows / 16][4] = {};
    if (rows.row < rows.past) {
        const OwnKeys at = {0, first_key + warp_row};
        u32 index = 0;
#pragma unroll 1
        for (u32 row = rows.row; row < rows.past; row += kRows, ++index) {
            const auto queries = shared.tile(index);
            shared.barriers().wait_for_tile(index);
            wgmma_fence(s[0]);
            start_multiply_transposed(s, own.left, queries.left);
            // The products of the last tile end: p and ds need no registers while dp is computed.
            wgmma_wait<1>(of_k[0], of_v[0], p[0], ds[0]);
            if (index > 0) shared.barriers().release(index - 1);
            wgmma_fence(dp[0]);
            start_multiply_transposed(dp, own.right, queries.right);
            wgmma_wait<1>(s[0]);
            const bool no_mask = all_see(*queries.terms, rows.past - row, first_key, past_key);
            exponentiate(s, s, *queries.terms, at, scale * kLog2E, no_mask);
            wgmma_wait<0>(dp[0]);
            differentiate(dp, s, *queries.terms, at);
            round_to_a<T>(p, s);
            round_to_a<T>(ds, dp);
            wgmma_fence(of_k[0], of_v[0], p[0], ds[0]);
            start_multiply(of_v, p, queries.right);
            start_multiply(of_k, ds, queries.left);
        }
        wgmma_wait<0>(of_k[0], of_v[0], p[0], ds[0]);
    }
    // All warps of the warpgroup have waited for their products with its rows.
    sync_warpgroup();
    store_rows(key_rows<D>(dk, of.sizes), first_key + warp_row, own.left, warp_row, of_k, {{scale, scale}});
    store_rows(key_rows<D>(dv, of.sizes), first_key + warp_row, own.right, warp_row, of_v, {{1.0f, 1.0f}});
}

// dq of kOwn packed rows. The warpgroups wait for tiles, and not for each other.
template <typename T, u32 D>
__device__ __forceinline__ void queries(T *dq, const TensorMap &k_map, const TensorMap &v_map,
                                        const Operands<T, D> &of, float scale) {
    constexpr u32 kTileKeys = kKeys<D>;
    DYNAMIC_SHARED(u8, bytes);
    const SharedOfQueries<T, D> shared(bytes);
    const auto &own = shared.own;
    // The last rows first: they see the most keys.
    const u32 first_row = (gridDim.x - 1 - block_place().part) * kOwn, warp_row = threadIdx.x / kWarp * 16;
    const u32 past_row = first_row + kOwn < of.sizes.rows() ? first_row + kOwn : of.sizes.rows();
    const Visible first = of.visible_to_token(first_row / of.sizes.group);
    const Visible last = of.visible_to_token((past_row - 1) / of.sizes.group);
    const u32 first_key = first.begin / kTileKeys * kTileKeys;
    const u32 tiles = first_key < last.end ? (last.end - first_key + kTileKeys - 1) / kTileKeys : 0;

    // Fills the tiles of these indices.
    const auto fill = [&](u32 begin, u32 end) {
#pragma unroll 1
        for (u32 index = begin; index < end; ++index) {
            shared.keys.fill(index, k_map, first_key + index * kTileKeys, of.sizes);
            shared.values.fill(index, v_map, first_key + index * kTileKeys, of.sizes);
        }
    };
    if (threadIdx.x == kProducer) {
        shared.keys.init();
        shared.values.init();
        fence_async_proxy();
        fill(0, tiles < kStages ? tiles : kStages);
    }
    const bool is_producer = is_in_warpgroup_of_producer();
    if (!is_producer) copy_queries<kWgmmaThreads>(own, of, first_row, past_row);
    cp_async_commit();
    wait_for_operands();
    if (is_producer) {
        lower_registers<kProducerRegisters>();
        if (threadIdx.x == kProducer) fill(kStages, tiles);
        return;
    }
    raise_registers<kConsumerRegisters>();

    float of_q[1][D / 8][4] = {};
    float s[1][kTileKeys / 8][4] = {}, dp[1][kTileKeys / 8][4] = {};
    u32 ds[1][kTileKeys / 16][4] = {};
    const RowTerms<2> terms = own_terms(*own.terms);
    if (tiles > 0) {
#pragma unroll 1
        for (u32 index = 0; index < tiles; ++index) {
            const u32 key = first_key + index * kTileKeys;
            const OwnRows at = {key};
            const auto keys = shared.keys.filled_tile(index);
            wgmma_fence(s[0]);
            start_multiply_transposed(s, own.left, keys);
            const auto values = shared.values.filled_tile(index);
            wgmma_wait<1>(of_q[0], ds[0]);
            if (index > 0) shared.keys.release(index - 1);
            wgmma_fence(dp[0]);
            start_multiply_transposed(dp, own.right, values);
            wgmma_wait<1>(s[0]);
            exponentiate(s, s, terms, at, scale * kLog2E, last.begin <= key && key + kTileKeys <= first.end);
            wgmma_wait<0>(dp[0]);
            shared.values.release(index);
            differentiate(dp, s, terms, at);
            round_to_a<T>(ds, dp);
            wgmma_fence(of_q[0], ds[0]);
            start_multiply(of_q, ds, keys);
        }
        wgmma_wait<0>(of_q[0], ds[0]);
    }
    // All warps of the warpgroup have waited for their products with its rows.
    sync_warpgroup();
    store_rows(packed_rows<D>(dq, of.heads, of.sizes), first_row + warp_row, own.left, warp_row, of_q,
               {{scale, scale}});
}

}  // namespace

// `queries` does not read k and v, only their maps: both kernels have one list of parameters.
#define INSTANTIATE(T, suffix, D)                                                                                 \
    KERNEL_OF_THREADS(attention_fused_backward_wgmma_keys_##suffix##_##D, kThreadsWithProducer, T *dk, T *dv,     \
                      PARAMETERS(T)) {                                                                            \
        keys<T, D>(dk, dv, OPERANDS, scale);                                                                      \
    }                                                                                                             \
    KERNEL_OF_THREADS(attention_fused_backward_wgmma_queries_##suffix##_##D, kThreadsWithProducer, T *dq,         \
                      BY_VALUE(TensorMap) k_map, BY_VALUE(TensorMap) v_map, PARAMETERS(T)) {                      \
        queries<T, D>(dq, k_map, v_map, OPERANDS, scale);                                                         \
    }
INSTANTIATE(bf16, bf16, 64)
INSTANTIATE(bf16, bf16, 128)
INSTANTIATE(f16, f16, 64)
INSTANTIATE(f16, f16, 128)
