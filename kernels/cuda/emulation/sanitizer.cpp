// Checks of every memory access of emulated kernels, by the calls that the compiler inserts.
//
// Kernels are compiled with `-fsanitize=thread,alignment,bounds,…` (gpu/fake_driver/build.sh), but without the libraries
// that belong to these options: they know neither blocks and barriers nor which tensors a launch may access. This
// file defines the functions that the inserted calls expect.

#include "state.h"

namespace {

using emulation::position;
using emulation::running;

inline bool lies_in(const char *address, const void *begin, std::size_t bytes) {
    return static_cast<std::size_t>(address - static_cast<const char *>(begin)) < bytes;
}

inline void check(const void *address, std::size_t bytes, bool is_write) {
    const auto *at = static_cast<const char *>(address);
    if (!running.is_in_kernel || lies_in(at, running.stack, emulation::Fiber::kStackBytes)) return;
    if (lies_in(at, &position, sizeof position)) return;
    const auto begin = reinterpret_cast<std::uint64_t>(address);
    const auto &tensor = running.tensor;
    if (begin >= tensor.begin && begin + bytes <= tensor.end && (tensor.is_writable || !is_write)) return;
    emulation::check_access(address, bytes, is_write);
}

// The start of what all reports of undefined behavior point to.
struct Place {
    const char *file;
    unsigned line, column;
};

[[noreturn]] void report(const Place &place, const char *what) {
    emulation::fail("%s:%u:%u: %s", place.file, place.line, place.column, what);
}

// A report of a null or misaligned address, as in GCC's libubsan.
struct TypeMismatch {
    Place place;
    const void *type;
    unsigned char log_alignment, kind;
};

}  // namespace

extern "C" {

void __tsan_init() { emulation::is_sanitized = true; }
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_read_range(const void *address, std::size_t bytes) { check(address, bytes, false); }
void __tsan_write_range(const void *address, std::size_t bytes) { check(address, bytes, true); }

#define ACCESS(bytes)                                                                             \
    void __tsan_read##bytes(const void *address) { check(address, bytes, false); }                \
    void __tsan_write##bytes(const void *address) { check(address, bytes, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

#define UNALIGNED_ACCESS(bytes)                                                                   \
    void __tsan_unaligned_read##bytes(const void *address) { check(address, bytes, false); }      \
    void __tsan_unaligned_write##bytes(const void *address) { check(address, bytes, true); }
UNALIGNED_ACCESS(2)
UNALIGNED_ACCESS(4)
UNALIGNED_ACCESS(8)
UNALIGNED_ACCESS(16)

void __ubsan_handle_type_mismatch_v1_abort(const TypeMismatch *report, const void *address) {
    const unsigned long long alignment = 1ull << report->log_alignment;
    if (address == nullptr) ::report(report->place, "access of a null pointer");
    emulation::fail("%s:%u:%u: access at an address that is not a multiple of %llu", report->place.file,
                    report->place.line, report->place.column, alignment);
}
void __ubsan_handle_out_of_bounds_abort(const Place *place, std::uintptr_t) {
    report(*place, "index out of the bounds of an array");
}
void __ubsan_handle_shift_out_of_bounds_abort(const Place *place, std::uintptr_t, std::uintptr_t) {
    report(*place, "shift by more bits than there are");
}

#define OVERFLOW(operation)                                                                                  \
    void __ubsan_handle_##operation##_overflow_abort(const Place *place, std::uintptr_t, std::uintptr_t) {   \
        report(*place, "integer overflow or division by zero");                                              \
    }
OVERFLOW(add)
OVERFLOW(sub)
OVERFLOW(mul)
OVERFLOW(divrem)
void __ubsan_handle_negate_overflow_abort(const Place *place, std::uintptr_t) {
    report(*place, "integer overflow");
}
}
