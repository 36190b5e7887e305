// What a kernel accesses, from its parameters.

#include <cstdlib>
#include <cstring>
#include <sstream>

#include "memory.h"
#include "modules.h"

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
    std::uint64_t from, to, strides[4];
    std::uint32_t rest[8];
};
// A copy's table is an array of blocks, then their count and 4 unused bytes.
struct Ranks {
    std::uint64_t sources[256];
    std::uint32_t count, op;
};

void add_copy_table(const unsigned char *bytes, std::size_t size, std::vector<Range> &ranges) {
    std::uint32_t count;
    std::memcpy(&count, bytes + size - 8, sizeof count);
    for (std::uint32_t i = 0; i < count; ++i) {
        Block block;
        std::memcpy(&block, bytes + i * sizeof block, sizeof block);
        ranges.push_back(range_from(block.from, false));
        ranges.push_back(range_from(block.to, true));
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
            add_copy_table(bytes, size, ranges);
        } else if (all[i][0] == 's' && starts_with(kernel.name, "rank_reduce")) {
            add_ranks(bytes, ranges);
        } else if (all[i][0] == 's') {
            check_struct(kernel, bytes, size);
        }
    }
    return ranges;
}

}  // namespace fake
