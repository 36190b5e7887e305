// Those of candle's kernels that this program and its tests launch, written by hand: gpu/nvcc-for-check compiles none.
// Their parameters are those of candle-kernels' src/*.cu.

#include <functional>
#include <map>

#include "modules.h"
#include "numbers.h"

namespace fake {
namespace {

using Size = std::uint64_t;

template <typename T> T value(void *argument) {
    T copied;
    std::memcpy(&copied, argument, sizeof copied);
    return copied;
}

// A tensor's sizes and strides on the device: candle's `num_dims, info`, where `info` may be null.
struct Layout {
    Size dims;
    const Size *sizes, *strides;

    // `operand` counts the strides that follow the sizes.
    Layout(void **arguments, int operand = 0)
        : dims(value<Size>(arguments[0])), sizes(value<const Size *>(arguments[1])),
          strides(sizes + (1 + operand) * dims) {}

    Size operator[](Size index) const {
        if (sizes == nullptr) return index;
        Size at = 0;
        for (Size d = dims; d-- > 0; index /= sizes[d]) at += index % sizes[d] * strides[d];
        return at;
    }
};

// Calls `with(to, from)` for every element of a strided tensor: `numel, num_dims, info`.
template <typename F> void for_each(void **arguments, F with) {
    const Size count = value<Size>(arguments[0]);
    const Layout layout(arguments + 1);
    for (Size i = 0; i < count; ++i) with(i, layout[i]);
}

using Run = std::function<void(void **)>;
using Kernels = std::map<std::string, Kernel>;

void add(Kernels &all, const std::string &name, const std::string &signature, Run run) {
    all[name] = {name, signature, [run](const unsigned *, unsigned, unsigned, void **arguments) -> const char * {
                     run(arguments);
                     return nullptr;
                 }};
}

template <typename T> std::string sized(const char *kind) { return kind + std::to_string(sizeof(T)); }

template <typename S, typename T> void add_cast(Kernels &all, const std::string &from, const std::string &to) {
    add(all, "cast_" + from + "_" + to, "U8 U8 R8 " + sized<S>("R") + " " + sized<T>("W"), [](void **arguments) {
        const S *source = value<const S *>(arguments[3]);
        T *target = value<T *>(arguments[4]);
        for_each(arguments, [&](Size i, Size at) { target[i] = static_cast<T>(source[at]); });
    });
}

template <typename S> void add_casts(Kernels &all, const std::string &from) {
    add_cast<S, std::uint8_t>(all, from, "u8");
    add_cast<S, std::uint32_t>(all, from, "u32");
    add_cast<S, std::int64_t>(all, from, "i64");
    add_cast<S, Bf16>(all, from, "bf16");
    add_cast<S, F16>(all, from, "f16");
    add_cast<S, float>(all, from, "f32");
    add_cast<S, double>(all, from, "f64");
}

template <typename T> void add_all_of(Kernels &all, const std::string &type) {
    const std::string layout = "U8 U8 R8 ", read = sized<T>("R"), written = sized<T>("W"), scalar = sized<T>("u");
    add_casts<T>(all, type);
    add(all, "ucopy_" + type, layout + read + " " + written, [](void **arguments) {
        const T *source = value<const T *>(arguments[3]);
        T *target = value<T *>(arguments[4]);
        for_each(arguments, [&](Size i, Size at) { target[i] = source[at]; });
    });
    add(all, "affine_" + type, layout + read + " " + written + " " + scalar + " " + scalar, [](void **arguments) {
        const T *source = value<const T *>(arguments[3]);
        T *target = value<T *>(arguments[4]);
        const T factor = value<T>(arguments[5]), addend = value<T>(arguments[6]);
        for_each(arguments, [&](Size i, Size at) { target[i] = static_cast<T>(source[at] * factor + addend); });
    });
    add(all, "const_set_" + type, layout + scalar + " " + written, [](void **arguments) {
        T *target = value<T *>(arguments[4]);
        const T constant = value<T>(arguments[3]);
        for_each(arguments, [&](Size, Size at) { target[at] = constant; });
    });
    add(all, "fill_" + type, written + " " + scalar + " U8", [](void **arguments) {
        T *target = value<T *>(arguments[0]);
        const Size count = value<Size>(arguments[2]);
        for (Size i = 0; i < count; ++i) target[i] = value<T>(arguments[1]);
    });
    add(all, "copy2d_" + type, read + " " + written + " u4 u4 u4 u4", [](void **arguments) {
        const T *source = value<const T *>(arguments[0]);
        T *target = value<T *>(arguments[1]);
        std::uint32_t sizes[4];  // rows, columns, stride of the source, stride of the target
        for (int i = 0; i < 4; ++i) sizes[i] = value<std::uint32_t>(arguments[2 + i]);
        for (std::uint32_t row = 0; row < sizes[0]; ++row) {
            for (std::uint32_t column = 0; column < sizes[1]; ++column) {
                target[row * sizes[3] + column] = source[row * sizes[2] + column];
            }
        }
    });
}

// What the tests add with.
template <typename T> void add_addition(Kernels &all, const std::string &type) {
    const std::string read = sized<T>("R") + " ";
    add(all, "badd_" + type, "U8 U8 R8 " + read + read + sized<T>("W"), [](void **arguments) {
        const Layout left(arguments + 1), right(arguments + 1, 1);
        const T *a = value<const T *>(arguments[3]), *b = value<const T *>(arguments[4]);
        T *target = value<T *>(arguments[5]);
        const Size count = value<Size>(arguments[0]);
        for (Size i = 0; i < count; ++i) target[i] = a[left[i]] + b[right[i]];
    });
}

Kernels all_kernels() {
    Kernels all;
    add_all_of<std::uint8_t>(all, "u8");
    add_all_of<std::uint32_t>(all, "u32");
    add_all_of<std::int64_t>(all, "i64");
    add_all_of<Bf16>(all, "bf16");
    add_all_of<F16>(all, "f16");
    add_all_of<float>(all, "f32");
    add_all_of<double>(all, "f64");
    add_addition<float>(all, "f32");
    add_addition<double>(all, "f64");
    return all;
}

}  // namespace

const Kernel *kernel_of_candle(const std::string &name) {
    static const auto &all = *new Kernels(all_kernels());
    const auto found = all.find(name);
    return found == all.end() ? nullptr : &found->second;
}

}  // namespace fake
