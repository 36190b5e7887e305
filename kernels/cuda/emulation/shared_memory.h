// Shared memory of an emulated block, with a record of the last accesses to each byte.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulation {

// A time for each warp of a block, and for the copies of each of its mbarriers.
inline constexpr unsigned kMaxWarps = 32, kMaxMbarriers = 32;
using WarpTimes = std::array<std::uint32_t, kMaxWarps + kMaxMbarriers>;

// The dynamic array and the static arrays lie in one piece of memory, with unused bytes between them. All bytes
// are NaN when a block starts.
//
// Two accesses to a byte race if they are by different threads, at least one writes, and nothing orders them: a
// barrier of the block, `__syncwarp` for threads of the same warp, or a phase of an mbarrier. Shuffles order nothing. Time
// advances at barriers, so an access is ordered before all that follow the next barrier.
class SharedMemory {
  public:
    static constexpr std::size_t kMaxBytes = 227 * 1024;  // of a block of sm_90
    static constexpr std::size_t kMaxStaticBytes = 48 * 1024;
    static constexpr unsigned kMaxThreads = 1024;

    void begin_launch(std::size_t dynamic_bytes) {
        bytes_.resize(dynamic_bytes + kRedZone + 2 * kMaxStaticBytes + kAlignment);
        const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
        base_ = bytes_.data() + (kAlignment - address % kAlignment) % kAlignment;
        arrays_.assign(1, {nullptr, 0, dynamic_bytes});
        record_.assign(dynamic_bytes, {});
        static_bytes_ = 0;
        now_ = 1;
        std::fill(warp_barriers_, warp_barriers_ + 32, 0);
        std::fill(async_fences_, async_fences_ + kMaxThreads, 0);
        seen_.clear();
        reads_.clear();
    }

    void begin_block() {
        for (const Array &array : arrays_) std::fill_n(base_ + array.begin, array.bytes, 0xff);
        block_start_ = block_barrier_ = now_++;
    }

    void block_barrier() { block_barrier_ = now_++; }
    void warp_barrier(unsigned warp) { warp_barriers_[warp] = now_++; }

    // Makes what a thread has written visible to asynchronous instructions.
    void fence_async_proxy(unsigned thread) { async_fences_[thread] = now_++; }
    bool is_fenced(const void *address, std::size_t bytes) const {
        const auto first = record_.begin() + static_cast<std::ptrdiff_t>(offset_of(address));
        return std::all_of(first, first + static_cast<std::ptrdiff_t>(bytes),
                           [this](const Byte &byte) {
                               return byte.writer >= kMaxThreads || byte.write_time <= async_fences_[byte.writer];
                           });
    }

    // From now on records reads by warp, and what threads see by other means than barriers of the block.
    void track_warps() {
        seen_.resize(kMaxThreads);
        reads_.resize(bytes_.size() / kWord + 1);
    }
    // The times up to which the accesses of each warp come before what the thread does next.
    WarpTimes seen_by(unsigned thread) const {
        WarpTimes seen = seen_[thread];
        std::uint32_t &own = seen[thread / 32];
        own = std::max(own, warp_barriers_[thread / 32]);
        return seen;
    }
    void see(unsigned thread, const WarpTimes &times) {
        for (unsigned warp = 0; warp < times.size(); ++warp) {
            seen_[thread][warp] = std::max(seen_[thread][warp], times[warp]);
        }
    }
    // A barrier of the warpgroup that begins with this warp.
    void warpgroup_barrier(unsigned first_warp) {
        track_warps();
        for (unsigned thread = first_warp * 32; thread < first_warp * 32 + 128; ++thread) {
            std::fill_n(seen_[thread].begin() + first_warp, 4, now_);
        }
        ++now_;
    }

    void *dynamic() { return base_; }

    // The static array of a declaration, or null if a block would have more than it can.
    void *array(const void *declaration, std::size_t bytes) {
        for (const Array &array : arrays_) {
            if (array.declaration == declaration) return base_ + array.begin;
        }
        static_bytes_ += bytes;
        if (static_bytes_ > kMaxStaticBytes || arrays_[0].bytes + static_bytes_ > kMaxBytes) return nullptr;
        const std::size_t end = arrays_.back().begin + arrays_.back().bytes;
        const std::size_t begin = (end + kRedZone + 15) / 16 * 16;
        arrays_.push_back({declaration, begin, bytes});
        record_.resize(begin + bytes);
        std::fill_n(base_ + begin, bytes, 0xff);
        return base_ + begin;
    }

    bool contains(const void *address) const {
        const auto *byte = static_cast<const unsigned char *>(address);
        return byte >= bytes_.data() && byte < bytes_.data() + bytes_.size();
    }

    // Distance from the start of shared memory, which determines the bank.
    std::size_t offset_of(const void *address) const { return static_cast<const unsigned char *>(address) - base_; }

    // Records an access. Returns what is wrong with it, or null. In a race, `other` becomes the other thread.
    const char *access(unsigned thread, const void *address, std::size_t bytes, bool is_write, int &other) {
        const std::size_t begin = offset_of(address);
        if (!is_in_an_array(begin, bytes)) return "outside of the arrays in shared memory";
        for (std::size_t i = begin; i < begin + bytes; ++i) {
            const char *fault = is_write ? write(i, thread, other) : read(record_[i], thread, other);
            if (fault != nullptr) return fault;
            if (!is_write && !reads_.empty()) reads_[i / kWord][thread / 32] = now_;
        }
        return nullptr;
    }

    // Marks bytes as the target of an asynchronous copy.
    void begin_copy(const void *address, std::size_t bytes) { mark(address, bytes, true); }
    void end_copy(const void *address, std::size_t bytes) { mark(address, bytes, false); }

    // Ends a copy by TMA, whose `writer` is no thread, and returns the time of its write.
    std::uint32_t end_tile(const void *address, std::size_t bytes, unsigned writer) {
        end_copy(address, bytes);
        const std::size_t begin = offset_of(address);
        for (std::size_t i = begin; i < begin + bytes; ++i) {
            record_[i].write_time = now_;
            record_[i].writer = static_cast<std::uint16_t>(writer);
        }
        return now_++;
    }

  private:
    void mark(const void *address, std::size_t bytes, bool is_being_copied) {
        const std::size_t begin = offset_of(address);
        for (std::size_t i = begin; i < begin + bytes; ++i) record_[i].is_being_copied = is_being_copied;
    }

    static constexpr std::size_t kRedZone = 16, kAlignment = 1024, kWord = 4;

    struct Array {
        const void *declaration;
        std::size_t begin, bytes;
    };
    // The last reads and the last write of a byte. Only reads after the last barrier are of interest, of which
    // there may be several: by lanes of one warp, or of different warps.
    struct Byte {
        std::uint32_t read_time = 0, write_time = 0;
        std::uint16_t reader = 0, writer = 0;
        bool is_read_by_lanes = false, is_read_by_warps = false, is_being_copied = false;
    };

    bool is_in_an_array(std::size_t begin, std::size_t bytes) const {
        return std::any_of(arrays_.begin(), arrays_.end(), [&](const Array &array) {
            return begin >= array.begin && begin + bytes <= array.begin + array.bytes;
        });
    }

    bool is_ordered(std::uint32_t time, unsigned earlier, unsigned thread) const {
        if (earlier == thread || time <= block_barrier_) return true;
        if (earlier / 32 == thread / 32 && time <= warp_barriers_[thread / 32]) return true;
        return !seen_.empty() && time <= seen_[thread][earlier / 32];
    }

    // A warp other than the thread's that has read a word, perhaps after what the thread sees; or -1.
    int racing_warp(std::size_t word, unsigned thread) const {
        for (unsigned warp = 0; warp < kMaxWarps; ++warp) {
            const std::uint32_t time = reads_[word][warp];
            if (warp != thread / 32 && time > block_barrier_ && time > seen_[thread][warp]) return static_cast<int>(warp);
        }
        return -1;
    }

    const char *read(Byte &byte, unsigned thread, int &other) {
        if (byte.write_time <= block_start_) return "which no thread of this block has written";
        if (!is_ordered(byte.write_time, byte.writer, thread)) {
            other = byte.writer;
            return "without a barrier after the write by";
        }
        if (byte.is_being_copied) return "before the wait for the copy that writes it";
        const bool is_first = byte.read_time <= block_barrier_;
        const bool is_same_warp = byte.reader / 32 == thread / 32;
        const bool is_first_of_warp = is_first || byte.read_time <= warp_barriers_[thread / 32];
        byte.is_read_by_warps = !is_first && (byte.is_read_by_warps || !is_same_warp);
        byte.is_read_by_lanes = !is_first_of_warp && (byte.is_read_by_lanes || byte.reader != thread);
        byte.read_time = now_;
        byte.reader = static_cast<std::uint16_t>(thread);
        return nullptr;
    }

    const char *write(std::size_t at, unsigned thread, int &other) {
        Byte &byte = record_[at];
        if (byte.write_time > block_start_ && !is_ordered(byte.write_time, byte.writer, thread)) {
            other = byte.writer;
            return "without a barrier after the write by";
        }
        if (byte.is_being_copied && byte.write_time > block_start_) {
            return "before the wait for the copy that writes it";
        }
        // With mbarriers, the reads of each warp are ordered apart; then only those of the own warp are left.
        const int warp = reads_.empty() ? -1 : racing_warp(at / kWord, thread);
        if (warp >= 0) {
            other = warp * 32;
            return "without a barrier after a read by the warp of";
        }
        const bool is_read =
            byte.read_time > block_barrier_ && (reads_.empty() || byte.reader / 32 == thread / 32);
        const bool is_read_by_others =
            (reads_.empty() && byte.is_read_by_warps) || (byte.is_read_by_lanes && byte.read_time > warp_barriers_[byte.reader / 32]);
        if (is_read && (is_read_by_others || !is_ordered(byte.read_time, byte.reader, thread))) {
            other = byte.reader;
            return "without a barrier after the read by";
        }
        byte.write_time = now_;
        byte.writer = static_cast<std::uint16_t>(thread);
        return nullptr;
    }

    std::vector<unsigned char> bytes_;
    unsigned char *base_ = nullptr;
    std::vector<Array> arrays_;
    std::size_t static_bytes_ = 0;
    std::vector<Byte> record_;
    std::uint32_t now_ = 1, block_start_ = 0, block_barrier_ = 0;
    std::uint32_t warp_barriers_[32] = {}, async_fences_[kMaxThreads] = {};
    std::vector<WarpTimes> seen_;                              // by thread
    std::vector<std::array<std::uint32_t, kMaxWarps>> reads_;  // by word
};

}  // namespace emulation
