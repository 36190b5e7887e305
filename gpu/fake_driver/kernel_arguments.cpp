// What a kernel accesses, from its parameters.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "memory.h"
#include "modules.h"

extern "C" std::uint64_t ulysses_emulation_address_of_tensor(const void *map);

namespace fake {
namespace {

std::vector<std::string> parameters(const Kernel &kernel) {
    std::istringstream words(kernel.signature);
    std::vector<std::string> found;
    for (std::string word; words >> word;) found.push_back(word);
    return found;
}

bool starts_with(const std::string &text, const char *start) { return text.rfind(start, 0) == 0; }

// From an address to the end of its allocation. An address outside becomes a range that the checks refuse.
Range range_from(std::uintptr_t address, bool written) {
    const Allocation *found = find(address);
    return {address, found ? found->begin + found->bytes - address : 1, written};
}

// The tables that two kernels take by value, as in strided_copy.cu and rank_reduce.cu.
struct Block {
    std::uint64_t from, to;
    std::uint64_t from_batch, from_row, to_batch, to_row;  // strides in bytes
    std::uint32_t rows, run, units;                        // of `run` units each, `units` in all
    std::uint32_t rest[5];
};
struct Ranks {
    std::uint64_t sources[256];
    std::uint32_t count, op;
};

// The bytes of a unit: the number at the end of a copy's name, 16 for packs, else those of the element type.
std::size_t unit_bytes(const std::string &name) {
    static const std::vector<std::pair<const char *, std::size_t>> ends = {
        {"_8", 8},   {"_4", 4},   {"_2", 2},    {"_1", 1},   {"_f64", 8},
        {"_i64", 8}, {"_f32", 4}, {"_u32", 4}, {"_bf16", 2}, {"_f16", 2}, {"_u8", 1},
    };
    if (name.find("_packs_") != std::string::npos) return 16;
    for (const auto &[end, bytes] : ends) {
        const std::string suffix = end;
        if (name.size() > suffix.size() && name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0) {
            return bytes;
        }
    }
    return 16;
}

// The table is an array of blocks, then their count and 4 unused bytes.
void add_copy_table(const Kernel &kernel, const unsigned char *bytes, std::size_t size, std::vector<Range> &ranges) {
    std::uint32_t count;
    std::memcpy(&count, bytes + size - 8, sizeof count);
    for (std::uint32_t i = 0; i < count; ++i) {
        Block block;
        std::memcpy(&block, bytes + i * sizeof block, sizeof block);
        if (block.units == 0) continue;
        const std::uint64_t runs = (block.units + block.run - 1) / block.run, rows = std::min<std::uint64_t>(block.rows, runs);
        const std::uint64_t batches = (runs + block.rows - 1) / block.rows, run_bytes = block.run * unit_bytes(kernel.name);
        const auto extent = [&](std::uint64_t batch, std::uint64_t row) {
            return (batches - 1) * batch + (rows - 1) * row + run_bytes;
        };
        ranges.push_back({block.from, extent(block.from_batch, block.from_row), false});
        ranges.push_back({block.to, extent(block.to_batch, block.to_row), true});
    }
}

void add_ranks(const unsigned char *bytes, std::vector<Range> &ranges) {
    Ranks table;
    std::memcpy(&table, bytes, sizeof table);
    for (std::uint32_t i = 0; i < table.count; ++i) ranges.push_back(range_from(table.sources[i], false));
}

// Structs of other kernels have no addresses.
void check_struct(const Kernel &kernel, const unsigned char *bytes, std::size_t size) {
    for (std::size_t at = 0; at + 8 <= size; at += 8) {
        std::uintptr_t word;
        std::memcpy(&word, bytes + at, sizeof word);
        if (is_device_address(word)) {
            report("%s has an address in a struct that kernel_arguments.cpp does not know", kernel.name.c_str());
        }
    }
}

}  // namespace

std::vector<std::size_t> parameter_sizes(const Kernel &kernel) {
    std::vector<std::size_t> sizes;
    for (const std::string &parameter : parameters(kernel)) {
        const bool is_pointer = parameter[0] == 'W' || parameter[0] == 'R';
        sizes.push_back(is_pointer ? 8 : std::strtoul(parameter.c_str() + 1, nullptr, 10));
    }
    return sizes;
}

std::vector<Range> accessed_ranges(const Kernel &kernel, void *const *arguments) {
    std::vector<Range> ranges;
    const auto all = parameters(kernel);
    for (std::size_t i = 0; i < all.size(); ++i) {
        const auto *bytes = static_cast<const unsigned char *>(arguments[i]);
        const std::size_t size = std::strtoul(all[i].c_str() + 1, nullptr, 10);
        if (all[i][0] == 'W' || all[i][0] == 'R') {
            std::uintptr_t address;
            std::memcpy(&address, bytes, sizeof address);
            if (address != 0) ranges.push_back(range_from(address, all[i][0] == 'W'));
        } else if (all[i][0] == 's' && starts_with(kernel.name, "strided_copy")) {
            add_copy_table(kernel, bytes, size, ranges);
        } else if (all[i][0] == 's' && starts_with(kernel.name, "rank_reduce")) {
            add_ranks(bytes, ranges);
        } else if (const std::uint64_t tensor = size == 128 ? ulysses_emulation_address_of_tensor(bytes) : 0) {
            ranges.push_back(range_from(tensor, false));
        } else if (all[i][0] == 's') {
            check_struct(kernel, bytes, size);
        }
    }
    return ranges;
}

}  // namespace fake
