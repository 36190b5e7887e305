// Reports of faults in the program under test.

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

#include "stream.h"

namespace fake {
namespace {

constexpr int kExitCode = 97;
constexpr int kPrinted = 20;

std::atomic<int> reports{0};

// fake-driver.sh reads this file, because a process that is killed has no exit code of its own.
void append_to_file(const char *line, std::size_t bytes) {
    const char *path = std::getenv("FAKE_DRIVER_REPORTS");
    if (path == nullptr) return;
    const int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0) return;
    (void)!write(file, line, bytes);
    close(file);
}

struct AtExit {
    ~AtExit() {
        if (reports > 0) {
            std::fflush(nullptr);
            _exit(kExitCode);
        }
    }
} at_exit;

}  // namespace

// No allocation and no lock, because the handler of page faults calls it too.
__attribute__((visibility("default"))) void report(const char *format, ...) {
    char line[1024];
    int length = std::snprintf(line, sizeof line, "fake driver: process %d: ", getpid());
    va_list arguments;
    va_start(arguments, format);
    length += std::vsnprintf(line + length, sizeof line - length - 1, format, arguments);
    va_end(arguments);
    if (length > static_cast<int>(sizeof line) - 2) length = sizeof line - 2;
    line[length++] = '\n';
    if (reports.fetch_add(1) < kPrinted) (void)!write(STDERR_FILENO, line, length);
    append_to_file(line, length);
}

__attribute__((visibility("default"))) bool is_seeded(const char *fault) {
    const char *seeded = std::getenv("FAKE_DRIVER_SEED_FAULT");
    return seeded != nullptr && std::strcmp(seeded, fault) == 0;
}

}  // namespace fake

// The functions of the interface that no file implements end here; `not_implemented.py` writes them.
FAKE_EXPORT int fake_driver_not_implemented(const char *name) {
    fake::report("%s is not implemented by the fake driver", name);
    return CUDA_ERROR_NOT_SUPPORTED;
}
