// libcublas.so.13: handles, and the one product that this program uses, with the checks of its arguments.

#include <array>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_set>

#include "gemm.h"
#include "stream.h"

using namespace fake;

namespace {

enum Status { kSuccess = 0, kNotInitialized = 1, kInvalidValue = 7, kExecutionFailed = 13, kNotSupported = 15 };
constexpr int kCompute32F = 68;
constexpr int kDefaultMath = 0, kFullPrecisionReductions = 16;

struct Handle {
    int device;
    CUstream stream = nullptr;
    int math_mode = kDefaultMath;
};

std::optional<Number> number(int type) {
    switch (type) {
    case 0: return Number::kF32;
    case 2: return Number::kF16;
    case 14: return Number::kBf16;
    default: return std::nullopt;
    }
}

std::size_t bytes_of(Number type) { return type == Number::kF32 ? 4 : 2; }

// Sizes of a stored matrix: columns of `leading` elements.
struct Stored {
    const char *name;
    std::size_t rows, columns;
    long long stride;
};

// The bytes of one matrix of the batch.
std::size_t extent(const Matrix &matrix, const Stored &stored) {
    if (stored.rows == 0 || stored.columns == 0) return 0;
    return ((stored.columns - 1) * matrix.leading + stored.rows) * bytes_of(matrix.type);
}

bool check(const Matrix &matrix, const Stored &stored) {
    if (matrix.leading >= (stored.rows > 0 ? stored.rows : 1)) return true;
    report("cublasGemmStridedBatchedEx: matrix %s has %zu rows and the leading dimension %zu", stored.name, stored.rows,
           matrix.leading);
    return false;
}

// One range per matrix of the batch, or one in all where they overlap or follow each other.
void add_ranges(std::vector<Range> &ranges, const Matrix &matrix, const Stored &stored, std::size_t batch, bool written) {
    const std::size_t bytes = extent(matrix, stored), step = stored.stride * bytes_of(matrix.type);
    if (bytes == 0) return;
    if (stored.stride == 0 || batch == 1) {
        ranges.push_back({matrix.address, bytes, written});
    } else if (step <= bytes || batch > 64) {
        ranges.push_back({matrix.address, (batch - 1) * step + bytes, written});
    } else {
        for (std::size_t i = 0; i < batch; ++i) ranges.push_back({matrix.address + i * step, bytes, written});
    }
}

Matrix nth(Matrix matrix, long long stride, std::size_t index) {
    matrix.address += index * stride * bytes_of(matrix.type);
    return matrix;
}

// cuBLAS loads a kernel at its first use on a GPU: types of the operands and of the result, and how they are stored.
void load(int device, const std::array<int, 4> &kernel) {
    static std::mutex mutex;
    static auto &loaded = *new std::set<std::pair<int, std::array<int, 4>>>;
    const std::lock_guard guard(mutex);
    if (loaded.emplace(device, kernel).second) check_load("a kernel of cuBLAS");
}

}  // namespace

FAKE_EXPORT int cublasCreate_v2(void **handle) {
    MAY_FAIL(kNotInitialized);
    const int device = current_device();
    if (device < 0) {
        report("cublasCreate without a current context");
        return kNotInitialized;
    }
    *handle = new Handle{device};
    return kSuccess;
}

FAKE_EXPORT int cublasDestroy_v2(void *handle) {
    delete static_cast<Handle *>(handle);
    return kSuccess;
}

FAKE_EXPORT int cublasSetStream_v2(void *handle, CUstream stream) {
    MAY_FAIL(kExecutionFailed);
    auto *known = static_cast<Handle *>(handle);
    if (device_of(stream) != known->device) {
        report("cublasSetStream: the handle is GPU %d's, the stream GPU %d's", known->device, device_of(stream));
        return kInvalidValue;
    }
    known->stream = stream;
    return kSuccess;
}

FAKE_EXPORT int cublasSetMathMode(void *handle, int mode) {
    MAY_FAIL(kExecutionFailed);
    static_cast<Handle *>(handle)->math_mode = mode;
    return kSuccess;
}

FAKE_EXPORT int cublasGetVersion_v2(void *, int *version) {
    *version = 130000;
    return kSuccess;
}

FAKE_EXPORT int cublasGemmStridedBatchedEx(void *opaque, int a_operation, int b_operation, int m, int n, int k,
                                           const void *alpha_at, const void *a_at, int a_type, int lda,
                                           long long a_stride, const void *b_at, int b_type, int ldb,
                                           long long b_stride, const void *beta_at, void *c_at, int c_type, int ldc,
                                           long long c_stride, int batch, int compute_type, int) {
    MAY_FAIL(kExecutionFailed);
    const Handle &handle = *static_cast<Handle *>(opaque);
    const float alpha = *static_cast<const float *>(alpha_at), beta = *static_cast<const float *>(beta_at);
    if (current_device() != handle.device) {
        report("cublasGemmStridedBatchedEx: the handle is GPU %d's, the context GPU %d's", handle.device, current_device());
        return kNotInitialized;
    }
    const auto a_number = number(a_type), b_number = number(b_type), c_number = number(c_type);
    if (!a_number || a_number != b_number || !c_number || (c_number != a_number && c_number != Number::kF32) ||
        compute_type != kCompute32F || a_operation > 1 || b_operation > 1) {
        return kNotSupported;
    }
    if ((handle.math_mode & ~kFullPrecisionReductions) != kDefaultMath) {
        report("cublasGemmStridedBatchedEx in math mode %d, which rounds operands or sums", handle.math_mode);
    }
    if (m < 0 || n < 0 || k < 0 || batch < 0 || lda < 1 || ldb < 1 || ldc < 1) return kInvalidValue;
    Matrix a{reinterpret_cast<std::uintptr_t>(a_at), *a_number, a_operation == 1, static_cast<std::size_t>(lda)};
    Matrix b{reinterpret_cast<std::uintptr_t>(b_at), *b_number, b_operation == 1, static_cast<std::size_t>(ldb)};
    const Matrix c{reinterpret_cast<std::uintptr_t>(c_at), *c_number, false, static_cast<std::size_t>(ldc)};
    const std::size_t rows = m, columns = n, depth = k;
    const Stored stored_a{"a", a.is_transposed ? depth : rows, a.is_transposed ? rows : depth, a_stride};
    const Stored stored_b{"b", b.is_transposed ? columns : depth, b.is_transposed ? depth : columns, b_stride};
    const Stored stored_c{"c", rows, columns, c_stride};
    if (!check(a, stored_a) || !check(b, stored_b) || !check(c, stored_c)) return kInvalidValue;
    if (batch > 1 && c_stride == 0) {
        report("cublasGemmStridedBatchedEx: the results of the batch have one address");
        return kInvalidValue;
    }
    load(handle.device, {a_type, c_type, a_operation, b_operation});
    if (is_seeded("swapped_operands")) std::swap(a.is_transposed, b.is_transposed);
    std::vector<Range> ranges;
    add_ranges(ranges, a, stored_a, batch, false);
    add_ranges(ranges, b, stored_b, batch, false);
    add_ranges(ranges, c, stored_c, batch, true);
    enqueue(handle.stream, "a matrix product", std::move(ranges), [=] {
        for (std::size_t i = 0; i < static_cast<std::size_t>(batch); ++i) {
            multiply(rows, columns, depth, alpha, nth(a, a_stride, i), nth(b, b_stride, i), beta, nth(c, c_stride, i));
        }
    });
    return kSuccess;
}
