// Products of warpgroups; see warpgroup.h.

#include "warpgroup.h"

#include "state.h"

#include <algorithm>

namespace emulation {

namespace {

constexpr unsigned kDepth = 16;

Thread &current() { return block.threads[block.current]; }

// A matrix descriptor: addresses and distances in bytes.
struct Descriptor {
    unsigned address, between_panels, between_groups;
};

Descriptor decode(u64 bits) {
    const auto field = [bits](unsigned at) { return static_cast<unsigned>(bits >> at & 0x3fff) * 16; };
    const Descriptor decoded = {field(0), field(16), field(32)};
    if (bits >> 62 != 1) fail("wgmma with swizzle mode %u; only 1, of 128 bytes, is modeled", static_cast<unsigned>(bits >> 62));
    // Panels begin at multiples of 1024 bytes, where the base offset is 0.
    if ((bits >> 49 & 7) != 0 || decoded.address % 1024 >= 128) {
        fail("wgmma on a matrix that begins %u bytes after a multiple of 1024", decoded.address % 1024);
    }
    return decoded;
}

// The place of an element in shared memory. The swizzle exchanges chunks of 16 bytes by address: bits 4 to 6 are
// combined with bits 7 to 9.
unsigned swizzle(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// Rows of 64 elements along the depth: in each group, 8 rows of the matrix.
unsigned along_depth(const Descriptor &of, unsigned row, unsigned k) {
    return swizzle(of.address + row / 8 * of.between_groups + row % 8 * 128 + k * 2);
}

// Rows of 64 adjacent columns: in each group, 8 elements along the depth.
unsigned along_columns(const Descriptor &of, unsigned column, unsigned k) {
    return swizzle(of.address + column / 64 * of.between_panels + column % 64 * 2 + k / 8 * of.between_groups +
                   k % 8 * 128);
}

const unsigned char *shared_at(unsigned address) {
    const auto *byte = static_cast<const unsigned char *>(dynamic_shared()) + address;
    if (!block.shared.contains(byte)) fail("wgmma reads shared memory at %u, which does not exist", address);
    return byte;
}

float element(const Product &product, unsigned address) {
    u16 bits;
    std::memcpy(&bits, shared_at(address), sizeof bits);
    return product.value_of(bits);
}

void check_chunk(unsigned address) {
    const unsigned char *chunk = shared_at(address);
    check_access(chunk, 16, false);
    if (is_sanitized && !block.shared.is_fenced(chunk, 16)) {
        fail("wgmma reads shared memory at %u, which was written without a fence for it", address);
    }
}

// Checks that shared memory has the operands. A thread checks its part of the chunks of 16 bytes.
void check_operands(const Product &product) {
    const unsigned thread = position.thread.x % kWarpgroupSize;
    const Descriptor b = decode(product.b);
    for (unsigned chunk = thread; chunk < 2 * product.columns; chunk += kWarpgroupSize) {
        check_chunk(product.has_a_in_registers ? along_columns(b, chunk / 16 * 8, chunk % 16)
                                               : along_depth(b, chunk / 2, chunk % 2 * 8));
    }
    // Each warp for another one's rows: which warp reads which rows of A is not documented.
    const unsigned row = (thread / 2 + 16) % 64;
    if (!product.has_a_in_registers) check_chunk(along_depth(decode(product.a), row, thread % 2 * 8));
}

// Whether a fence was for registers, which have not changed since.
bool is_fenced(const void *first, std::size_t bytes) {
    for (const FencedRegisters &fenced : current().fenced) {
        const std::size_t offset = static_cast<const char *>(first) - static_cast<const char *>(fenced.first);
        if (offset >= fenced.content.size() || offset + bytes > fenced.content.size()) continue;
        return std::memcmp(fenced.content.data() + offset, first, bytes) == 0;
    }
    return false;
}

// The accumulators of a product. They keep their values here while they are in flight.
Accumulators &begin_accumulators(float *c, unsigned columns) {
    for (Accumulators &accumulators : current().accumulators) {
        if (accumulators.registers != c) continue;
        if (accumulators.values.size() != columns / 2) fail("wgmma of another shape on accumulators in flight");
        return accumulators;
    }
    const std::size_t bytes = columns / 2 * sizeof(float);
    if (!is_fenced(c, bytes)) fail("wgmma on accumulators that were accessed after the last wgmma.fence for them");
    current().accumulators.push_back({c, std::vector<float>(c, c + columns / 2), 0});
    std::memset(c, 0xff, bytes);
    return current().accumulators.back();
}

void end_product(Accumulators &accumulators) {
    if (--accumulators.in_flight > 0) return;
    const auto *byte = reinterpret_cast<const unsigned char *>(accumulators.registers);
    const std::size_t bytes = accumulators.values.size() * sizeof(float);
    if (std::any_of(byte, byte + bytes, [](unsigned char is) { return is != 0xff; })) {
        fail("accumulators of wgmma were written before the wait for it");
    }
    std::memcpy(accumulators.registers, accumulators.values.data(), bytes);
    std::swap(accumulators, current().accumulators.back());
    current().accumulators.pop_back();
}

// Two rows of A, 8 apart.
void read_a(float (&a)[2][kDepth], const Product &product) {
    const unsigned row = position.thread.x % kWarpgroupSize / 32 * 16 + position.thread.x % 32 / 4;
    for (unsigned half = 0; half < 2; ++half) {
        for (unsigned k = 0; k < kDepth; ++k) {
            if (product.has_a_in_registers) {
                const u32 pair = product.fragments[k % 8 / 2][half + k / 8 * 2];
                a[half][k] = product.value_of(static_cast<u16>(pair >> k % 2 * 16));
            } else {
                a[half][k] = element(product, along_depth(decode(product.a), row + 8 * half, k));
            }
        }
    }
}

// B [column, k], which the first thread of a warpgroup that completes a product reads for all.
const std::vector<float> &read_b(const Product &product) {
    DecodedOperand &decoded = block.decoded[position.thread.x / kWarpgroupSize][product.number % kMaxDecoded];
    if (decoded.number == product.number) return decoded.values;
    decoded = {product.number, std::vector<float>(product.columns * kDepth)};
    const Descriptor b = decode(product.b);
    for (unsigned i = 0; i < product.columns * kDepth; ++i) {
        const unsigned column = i / kDepth, k = i % kDepth;
        decoded.values[i] = element(product, product.has_a_in_registers ? along_columns(b, column, k)
                                                                        : along_depth(b, column, k));
    }
    return decoded.values;
}

void compute(const Product &product) {
    check_operands(product);
    if (product.has_a_in_registers && std::memcmp(product.registers, product.own, sizeof product.own) != 0) {
        fail("operand A of wgmma was written before the wait for it");
    }
    const auto accumulators = std::find_if(current().accumulators.begin(), current().accumulators.end(),
                                           [&](const Accumulators &each) { return each.registers == product.c; });
    float a[2][kDepth];
    read_a(a, product);
    const std::vector<float> &b = read_b(product);
    for (unsigned pair = 0; pair < product.columns / 4; ++pair) {
        const unsigned column = pair / 2 * 8 + position.thread.x % 4 * 2 + pair % 2;
        float *values = &accumulators->values[pair / 2 * 4 + pair % 2];
        double sums[2] = {product.accumulate ? values[0] : 0.0, product.accumulate ? values[2] : 0.0};
        for (unsigned k = 0; k < kDepth; ++k) {
            const double of_b = b[column * kDepth + k];
            sums[0] += a[0][k] * of_b;
            sums[1] += a[1][k] * of_b;
        }
        values[0] = static_cast<float>(sums[0]);
        values[2] = static_cast<float>(sums[1]);
    }
    end_product(*accumulators);
}

}  // namespace

void fence_registers(std::initializer_list<Registers> registers) {
    meet_warpgroup("wgmma.fence", 0);
    for (const Registers &each : registers) {
        const auto *first = static_cast<const char *>(each.first);
        current().fenced.push_back({first, std::vector<char>(first, first + each.bytes)});
    }
}

void commit_products() {
    meet_warpgroup("wgmma.commit_group", 0);
    ++current().product_groups;
}

void wait_for_products(unsigned pending) {
    meet_warpgroup("wgmma.wait_group", pending);
    std::vector<Product> &products = current().products;
    auto product = products.begin();
    for (; product != products.end() && product->group + pending < current().product_groups; ++product) compute(*product);
    products.erase(products.begin(), product);
    current().fenced.clear();
}

void set_registers(unsigned count) {
    meet_warpgroup("setmaxnreg", count);
    if (count % 8 != 0 || count < 24 || count > 256) fail("setmaxnreg of %u registers", count);
}

void fence_async_proxy() { block.shared.fence_async_proxy(position.thread.x); }

void start_product(float *c, unsigned columns, OperandA a, u64 b, bool accumulate, float (*value_of)(u16)) {
    Product product = {c, a.registers, a.descriptor, b, {}, {}, columns, current().product_groups,
                       a.registers != nullptr, accumulate, value_of, ++current().num_products};
    if (product.has_a_in_registers) {
        if (!is_fenced(a.registers, sizeof product.own)) {
            fail("wgmma on an operand A that was accessed after the last wgmma.fence for it");
        }
        std::memcpy(product.own, a.registers, sizeof product.own);
        std::memcpy(exchange_slot(), product.own, sizeof product.own);
    }
    const void *slots[4];
    for (unsigned i = 0; i < 4; ++i) slots[i] = exchange_slot_of(position.thread.x % 32 / 4 * 4 + i);
    meet_warpgroup("wgmma.mma_async", a.descriptor * 31 + b * 7 + columns);
    for (unsigned i = 0; i < 4 && product.has_a_in_registers; ++i) {
        std::memcpy(product.fragments[i], slots[i], sizeof product.fragments[i]);
    }
    check_operands(product);
    ++begin_accumulators(c, columns).in_flight;
    current().products.push_back(product);
}

}  // namespace emulation
