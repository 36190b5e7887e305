// Element types, and reductions over ranks.

#include <cstring>

#include "nccl.h"

namespace fake::nccl {
namespace {

enum Type { Int8, Uint8, Int32, Uint32, Int64, Uint64, Float16, Float32, Float64, Bfloat16, Types };
enum Operator { Sum, Prod, Max, Min, Avg, Operators };

float from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

std::uint32_t to_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct Bf16 {
    std::uint16_t bits;
    explicit Bf16(float value) {
        const std::uint32_t wide = to_bits(value);
        // NaN stays NaN; others are rounded to the nearest, ties to even.
        bits = value != value ? 0x7fff : static_cast<std::uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    }
    explicit operator float() const { return from_bits(static_cast<std::uint32_t>(bits) << 16); }
};

struct F16 {
    std::uint16_t bits;
    explicit F16(float value) {
        const std::uint32_t wide = to_bits(value), sign = (wide >> 16) & 0x8000, magnitude = wide & 0x7fffffff;
        if (magnitude > 0x7f800000) {
            bits = 0x7fff;
        } else if (magnitude >= 0x477ff000) {  // rounds to more than the largest
            bits = sign | 0x7c00;
        } else if (magnitude < 0x38800000) {  // subnormal: the addition rounds
            bits = sign | (to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f));
        } else {
            bits = sign | ((magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13);
        }
    }
    explicit operator float() const {
        const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
        if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
        // 2^112 corrects the exponent's bias, of subnormal values too.
        return from_bits(sign | to_bits(from_bits(magnitude << 13) * 0x1p112f));
    }
};

template <typename T, typename Wide>
T combine(int op, T left, T right) {
    const Wide a = static_cast<Wide>(left), b = static_cast<Wide>(right);
    switch (op) {
    case Sum:
    case Avg: return T(static_cast<Wide>(a + b));
    case Prod: return T(static_cast<Wide>(a * b));
    case Max: return a > b ? left : right;
    default: return a < b ? left : right;
    }
}

template <typename T, typename Wide = T>
void reduce_as(int op, const std::vector<const unsigned char *> &inputs, unsigned char *output, std::size_t count) {
    const auto load = [&](std::size_t input, std::size_t i) {
        unsigned char bytes[sizeof(T)];
        std::memcpy(bytes, inputs[input] + i * sizeof(T), sizeof(T));
        T value = T(0);
        std::memcpy(&value, bytes, sizeof(T));
        return value;
    };
    for (std::size_t i = 0; i < count; ++i) {
        T sum = load(0, i);
        for (std::size_t input = 1; input < inputs.size(); ++input) {
            sum = combine<T, Wide>(op, sum, load(input, i));
        }
        if (op == Avg) sum = T(static_cast<Wide>(static_cast<Wide>(sum) / static_cast<Wide>(inputs.size())));
        std::memcpy(output + i * sizeof(T), &sum, sizeof(T));
    }
}

}  // namespace

std::size_t element_bytes(int type) {
    constexpr std::size_t bytes[Types] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type >= 0 && type < Types ? bytes[type] : 0;
}

bool is_operator(int op) { return op >= 0 && op < Operators; }

void reduce(int type, int op, const std::vector<const unsigned char *> &inputs, unsigned char *output,
            std::size_t count) {
    switch (type) {
    case Int8: return reduce_as<std::int8_t>(op, inputs, output, count);
    case Uint8: return reduce_as<std::uint8_t>(op, inputs, output, count);
    case Int32: return reduce_as<std::int32_t>(op, inputs, output, count);
    case Uint32: return reduce_as<std::uint32_t>(op, inputs, output, count);
    case Int64: return reduce_as<std::int64_t>(op, inputs, output, count);
    case Uint64: return reduce_as<std::uint64_t>(op, inputs, output, count);
    case Float16: return reduce_as<F16, float>(op, inputs, output, count);
    case Float32: return reduce_as<float>(op, inputs, output, count);
    case Float64: return reduce_as<double>(op, inputs, output, count);
    default: return reduce_as<Bf16, float>(op, inputs, output, count);
    }
}

}  // namespace fake::nccl
