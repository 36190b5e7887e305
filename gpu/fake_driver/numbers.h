// The 16-bit element types as C++ numbers.

#pragma once

#include <cstdint>
#include <cstring>

namespace fake {

struct Bf16 {
    std::uint16_t bits;

    Bf16() = default;
    // Rounds to nearest even; NaN stays NaN.
    Bf16(float value) {
        std::uint32_t whole;
        std::memcpy(&whole, &value, sizeof whole);
        bits = value != value ? 0x7fff : static_cast<std::uint16_t>((whole + 0x7fff + (whole >> 16 & 1)) >> 16);
    }
    operator float() const {
        const std::uint32_t whole = static_cast<std::uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &whole, sizeof value);
        return value;
    }
};

using F16 = _Float16;

}  // namespace fake
