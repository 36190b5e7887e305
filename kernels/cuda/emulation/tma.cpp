// Copies by TMA; see tma.h.

#include "tma.h"

#include "state.h"

#include <algorithm>

namespace emulation {

namespace {

constexpr unsigned kRank = kTensorRank, kElementBytes = 2, kChunkBytes = 16, kSwizzleBytes = 128;
constexpr u64 kMark = 0x756c79737365735full;
// Of arrivals, and of bytes of copies.
constexpr unsigned kMaxCount = (1u << 20) - 1;

Mbarrier &find(const u64 *barrier) {
    check_access(barrier, sizeof *barrier, false);
    for (Mbarrier &each : block.mbarriers) {
        if (each.address == barrier) return each;
    }
    fail("the mbarrier at %zu of shared memory is not initialized", shared_offset(barrier));
}

void complete_if_due(Mbarrier &barrier) {
    if (barrier.missing > 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.missing = barrier.count;
    barrier.seen = std::exchange(barrier.seen_by_arrivals, {});
}

// Calls `run` with each chunk of a tile: its offset in the tile, and its address in the tensor, or null outside.
template <typename F> void for_each_chunk(const TileCopy &copy, F run) {
    const EncodedTensor &tensor = copy.tensor;
    unsigned offset = 0, at[kRank];
    for (at[3] = 0; at[3] < tensor.box[3]; ++at[3])
        for (at[2] = 0; at[2] < tensor.box[2]; ++at[2])
            for (at[1] = 0; at[1] < tensor.box[1]; ++at[1])
                for (at[0] = 0; at[0] < tensor.box[0]; at[0] += kChunkBytes / kElementBytes, offset += kChunkBytes) {
                    bool exists = true;
                    u64 address = tensor.address + (u64{copy.indices[0]} + at[0]) * kElementBytes;
                    for (unsigned i = 0; i < kRank; ++i) {
                        const u64 index = u64{copy.indices[i]} + at[i];
                        exists = exists && index < tensor.extents[i];
                        if (i > 0) address += index * tensor.strides[i - 1];
                    }
                    run(offset, exists ? reinterpret_cast<const void *>(address) : nullptr);
                }
}

unsigned tile_bytes(const TileCopy &copy) {
    const u32 *box = copy.tensor.box;
    return box[0] * box[1] * box[2] * box[3] * kElementBytes;
}

bool is_waited_for(const TileCopy &copy) {
    for (unsigned thread = 0; thread < position.block_size.x; ++thread) {
        if (block.states[thread] == State::kAtMbarrier && block.threads[thread].mbarrier == copy.barrier) return true;
    }
    return false;
}

void complete(const TileCopy &copy) {
    const std::size_t first = block.shared.offset_of(copy.to);
    for_each_chunk(copy, [&](unsigned offset, const void *from) {
        // The swizzle of `warpgroup.cpp`.
        const std::size_t plain = first + offset, swizzled = plain ^ (plain >> 7 & 7) << 4;
        void *to = static_cast<unsigned char *>(copy.to) + (swizzled - first);
        std::memset(to, 0, kChunkBytes);
        if (from != nullptr) std::memcpy(to, from, kChunkBytes);
    });
    std::uint32_t &seen = copy.barrier->seen_by_arrivals[copy.barrier->writer / kWarpSize];
    seen = std::max(seen, block.shared.end_tile(copy.to, tile_bytes(copy), copy.barrier->writer));
    copy.barrier->bytes -= tile_bytes(copy);
    complete_if_due(*copy.barrier);
}

// Wakes the threads whose phases are complete.
bool wake_threads() {
    bool is_any = false;
    for (unsigned thread = 0; thread < position.block_size.x; ++thread) {
        if (block.states[thread] != State::kAtMbarrier) continue;
        const Thread &waiting = block.threads[thread];
        if (waiting.mbarrier->phase == waiting.phase) continue;
        block.states[thread] = State::kReady;
        is_any = true;
    }
    return is_any;
}

}  // namespace

void mbarrier_init(u64 *barrier, unsigned count) {
    check_access(barrier, sizeof *barrier, true);
    block.shared.track_warps();
    if (shared_offset(barrier) % sizeof *barrier != 0) fail("an mbarrier at an address that is not a multiple of 8");
    if (count == 0 || count > kMaxCount) fail("an mbarrier of %u arrivals", count);
    const std::size_t index = block.mbarriers.size();
    if (index == kMaxMbarriers) fail("at most %u mbarriers of a block are modeled", kMaxMbarriers);
    for (const Mbarrier &other : block.mbarriers) {
        if (other.address == barrier) fail("an mbarrier is initialized twice");
    }
    const auto writer = static_cast<unsigned>(SharedMemory::kMaxThreads + index * kWarpSize);
    block.mbarriers.push_back({barrier, count, count, 0, writer, 0, {}, {}});
}

void mbarrier_arrive(u64 *barrier, unsigned bytes) {
    Mbarrier &at = find(barrier);
    const WarpTimes seen = block.shared.seen_by(position.thread.x);
    for (unsigned warp = 0; warp < seen.size(); ++warp) {
        at.seen_by_arrivals[warp] = std::max(at.seen_by_arrivals[warp], seen[warp]);
    }
    if (at.missing == 0) fail("more arrivals at an mbarrier than its %u", at.count);
    at.bytes += bytes;
    if (at.bytes > kMaxCount) fail("an mbarrier that expects %lld bytes, at most %u are possible", at.bytes, kMaxCount);
    --at.missing;
    complete_if_due(at);
}

void mbarrier_wait(u64 *barrier, unsigned phase) {
    const Mbarrier &at = find(barrier);
    if (phase == at.phase) {
        Thread &thread = block.threads[block.current];
        thread.mbarrier = &at;
        thread.phase = phase;
        wait_at(State::kAtMbarrier);
    }
    if (at.phase != phase + 1) {
        fail("waits for phase %u of an mbarrier that is in phase %u: their parities are taken for others", phase, at.phase);
    }
    block.shared.see(position.thread.x, at.seen);
}

void tma_copy(void *to, const u64 (&map)[16], std::array<unsigned, 4> indices, u64 *barrier) {
    Mbarrier &at = find(barrier);
    if (is_sanitized && !block.shared.is_fenced(barrier, sizeof *barrier)) {
        fail("TMA with an mbarrier that was initialized without a fence for it");
    }
    // The swizzle repeats every 1024 bytes.
    if (shared_offset(to) % (8 * kSwizzleBytes) != 0) fail("TMA to an address that is not a multiple of 1024");
    TileCopy copy = {to, {}, indices, &at};
    std::memcpy(&copy.tensor, map, sizeof copy.tensor);
    if (copy.tensor.mark != kMark) fail("TMA of a tensor map that cuTensorMapEncodeTiled has not made");
    for (const unsigned index : indices) {
        if (index > 0x7fffffff) fail("TMA of a tile that begins at %d", static_cast<int>(index));
    }
    for_each_chunk(copy, [](unsigned, const void *from) {
        if (from != nullptr) check_access(from, kChunkBytes, false);
    });
    check_access(to, tile_bytes(copy), true);
    std::memset(to, 0xff, tile_bytes(copy));
    if (is_sanitized) block.shared.begin_copy(to, tile_bytes(copy));
    block.tile_copies.push_back(copy);
}

bool advance_copies() {
    if (wake_threads()) return true;
    if (block.tile_copies.empty()) return false;
    const auto end = block.states.begin() + position.block_size.x;
    if (std::all_of(block.states.begin(), end, [](State state) { return state == State::kDone; })) {
        throw std::runtime_error("a block ended before its copies by TMA");
    }
    std::vector<std::size_t> needed;
    for (std::size_t i = 0; i < block.tile_copies.size(); ++i) {
        if (is_waited_for(block.tile_copies[i])) needed.push_back(i);
    }
    if (needed.empty()) return false;
    const std::size_t next = needed[block.seed == 0 ? 0 : block.draw() % needed.size()];
    complete(block.tile_copies[next]);
    block.tile_copies.erase(block.tile_copies.begin() + static_cast<std::ptrdiff_t>(next));
    wake_threads();
    return true;
}

}  // namespace emulation

extern "C" {

// cuTensorMapEncodeTiled. Returns null, or what is wrong.
const char *ulysses_emulation_encode_tensor(void *map, int type, unsigned rank, std::uint64_t address,
                                            const std::uint64_t *extents, const std::uint64_t *strides,
                                            const std::uint32_t *box, const std::uint32_t *element_strides, int interleave,
                                            int swizzle, int out_of_bounds) {
    using namespace emulation;
    constexpr int kF16 = 6, kBf16 = 9, kSwizzle128 = 3;
    if (reinterpret_cast<std::uintptr_t>(map) % 64 != 0) return "the map's address is not a multiple of 64";
    if ((type != kF16 && type != kBf16) || rank != kRank || interleave != 0 || swizzle != kSwizzle128 || out_of_bounds != 0) {
        return "only 16-bit floats of four dimensions, swizzled by 128 bytes, are modeled";
    }
    if (address == 0 || address % 16 != 0) return "the tensor's address is not a multiple of 16";
    EncodedTensor tensor = {kMark, address, {}, {}, {}, 0};
    for (unsigned i = 0; i < kRank; ++i) {
        if (extents[i] == 0 || extents[i] > std::uint64_t{1} << 32) return "a dimension is not from 1 to 2^32";
        if (box[i] == 0 || box[i] > 256) return "a dimension of the tile is not from 1 to 256";
        if (element_strides[i] != 1) return "only adjacent elements are modeled";
        tensor.extents[i] = extents[i];
        tensor.box[i] = box[i];
        if (i == 0) continue;
        if (strides[i - 1] % 16 != 0 || strides[i - 1] >= std::uint64_t{1} << 40) {
            return "a stride is not a multiple of 16 below 2^40";
        }
        tensor.strides[i - 1] = strides[i - 1];
    }
    if (box[0] * kElementBytes != kSwizzleBytes || extents[0] % 8 != 0) return "only whole rows of 128 bytes are modeled";
    std::memset(map, 0, 128);
    std::memcpy(map, &tensor, sizeof tensor);
    return nullptr;
}

// The address of a map's tensor, or 0 if it is no map.
std::uint64_t ulysses_emulation_address_of_tensor(const void *map) {
    emulation::EncodedTensor tensor;
    std::memcpy(&tensor, map, sizeof tensor);
    return tensor.mark == emulation::kMark ? tensor.address : 0;
}
}
