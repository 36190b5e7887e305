// Copies of strided blocks between tensors: the transposes of the exchange (`src/strided_copy`).

#include "common.cuh"

namespace {

// Units that a thread holds at a time, so that their loads are in flight together.
constexpr u32 kHeld = 4;
constexpr u32 kTile = kThreads * kHeld;
constexpr u32 kMaxBlocks = 48;

// batch × rows runs of `run` units, from one tensor to another. Strides are in bytes, counts below 2^31.
struct Block {
    u64 from, to;
    u64 from_batch, from_row, to_batch, to_row;
    u32 rows, run, units;
    // The first tile of the launch that belongs to this block.
    u32 first_tile;
    // kThreads = (step_batch · rows + step_row) · run + step_unit
    u32 step_batch, step_row, step_unit;
    u32 reserved;
};

// Passed by value: at most 4 KB.
struct Table {
    Block blocks[kMaxBlocks];
    u32 count, reserved;
};

// The position of a unit within a block. It advances by kThreads units without a division.
struct Place {
    u32 batch, row, unit;

    __device__ __forceinline__ Place(const Block &block, u32 index) {
        const u32 runs = index / block.run;
        unit = index - runs * block.run;
        batch = runs / block.rows;
        row = runs - batch * block.rows;
    }

    __device__ __forceinline__ void advance(const Block &block) {
        unit += block.step_unit;
        row += block.step_row;
        batch += block.step_batch;
        if (unit >= block.run) {
            unit -= block.run;
            ++row;
        }
        if (row >= block.rows) {
            row -= block.rows;
            ++batch;
        }
    }

    // An integer that comes straight from a parameter is known to be an address in global memory. A sum of integers
    // is not, and would be read with generic accesses.
    template <typename T> __device__ __forceinline__ const T *from(const Block &block) const {
        const u8 *first = reinterpret_cast<const u8 *>(block.from);
        return reinterpret_cast<const T *>(first + batch * block.from_batch + row * block.from_row) + unit;
    }

    template <typename T> __device__ __forceinline__ T *to(const Block &block) const {
        u8 *first = reinterpret_cast<u8 *>(block.to);
        return reinterpret_cast<T *>(first + batch * block.to_batch + row * block.to_row) + unit;
    }
};

// The block of a tile: the last one that does not begin after it.
__device__ __forceinline__ const Block &block_of(const Table &table, u32 tile) {
    u32 low = 0, high = table.count;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (table.blocks[middle].first_tile <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return table.blocks[low];
}

struct Copy {
    template <typename Unit> __device__ __forceinline__ static Unit merge(Unit, Unit value) { return value; }
    static constexpr bool kReads = false;
};

template <typename T> struct Add {
    template <typename Unit> __device__ __forceinline__ static Unit merge(Unit old, Unit value) {
        constexpr u32 count = sizeof(Unit) / sizeof(T);
        auto sum = bits_as<Pack<T, count>>(old);
        const auto more = bits_as<Pack<T, count>>(value);
#pragma unroll
        for (u32 i = 0; i < count; ++i) {
            sum.at[i] = Wide<T>::round(plus(Wide<T>::of(sum.at[i]), Wide<T>::of(more.at[i])));
        }
        return bits_as<Unit>(sum);
    }
    static constexpr bool kReads = true;
};

// Moves a tile of kTile adjacent units of one block: all loads, then all stores.
template <typename Unit, typename Merge> __device__ __forceinline__ void move_tile(const Table &table) {
    const Block &block = block_of(table, blockIdx.x);
    const u32 begin = (blockIdx.x - block.first_tile) * kTile + threadIdx.x;
    if (begin >= block.units) return;
    Unit values[kHeld], old[kHeld];
    const Place first(block, begin);
    Place place = first;
#pragma unroll
    for (u32 i = 0; i < kHeld; ++i) {
        if (begin + i * kThreads < block.units) {
            values[i] = *place.from<Unit>(block);
            if (Merge::kReads) old[i] = *place.to<Unit>(block);
        }
        place.advance(block);
    }
    place = first;
#pragma unroll
    for (u32 i = 0; i < kHeld; ++i) {
        if (begin + i * kThreads < block.units) *place.to<Unit>(block) = Merge::merge(old[i], values[i]);
        place.advance(block);
    }
}

}  // namespace

// Plain copies ignore the element type: the unit is the widest that all addresses, strides and runs allow.
#define COPY(bytes, type, count)                                                                               \
    KERNEL(strided_copy_##bytes, BY_VALUE(Table) table) {                                                      \
        move_tile<Pack<type, count>, Copy>(table);                                                             \
    }
COPY(16, u32, 4)
COPY(8, u32, 2)
COPY(4, u32, 1)
COPY(2, u16, 1)
COPY(1, u8, 1)

// Sums, in units of 16 bytes or of one element. Values are kept as words until they are added, since each
// small element would need a register of its own.
#define ADD(T, suffix)                                                                                         \
    KERNEL(strided_copy_add_packs_##suffix, BY_VALUE(Table) table) {                                           \
        move_tile<Pack<u32, 4>, Add<T>>(table);                                                                \
    }                                                                                                          \
    KERNEL(strided_copy_add_##suffix, BY_VALUE(Table) table) {                                                 \
        move_tile<Pack<T, 1>, Add<T>>(table);                                                                  \
    }
FOR_EACH_ELEMENT(ADD)
