// Counts of calls, by function and by kernel, appended to the file FAKE_DRIVER_CALLS when the process ends.

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "stream.h"

namespace fake {
namespace {

struct Calls {
    const char *path = std::getenv("FAKE_DRIVER_CALLS");
    std::mutex mutex;
    std::map<std::string, unsigned long long> counts;

    ~Calls() {
        std::FILE *file = path == nullptr ? nullptr : std::fopen(path, "a");
        if (file == nullptr) return;
        for (const auto &[name, count] : counts) std::fprintf(file, "%llu %s\n", count, name.c_str());
        std::fclose(file);
    }
} calls;

}  // namespace

void count_call(const char *name) {
    if (calls.path == nullptr) return;
    std::lock_guard lock(calls.mutex);
    ++calls.counts[name];
}

}  // namespace fake
