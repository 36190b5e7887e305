// What the environment sets: NCCL's version, how its calls behave, and injected failures.

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "nccl.h"

namespace fake::nccl {
namespace {

constexpr int kMaxQueries = 3;

const char *setting(const char *name, const char *fallback) {
    const char *value = std::getenv(name);
    return value != nullptr ? value : fallback;
}

struct Planned {
    int rank;
    unsigned long long operation;
    Injected injected;
};

Injected parse(const char *kind) {
    constexpr std::pair<const char *, Fault> kinds[] = {
        {"refuse", Fault::Refuse}, {"error", Fault::Error}, {"hang", Fault::Hang},
        {"stall", Fault::Stall},   {"slow", Fault::Slow},   {"exit", Fault::Exit},
        {"freeze", Fault::Freeze},
    };
    const std::size_t length = std::strcspn(kind, "=,");
    for (const auto &[name, fault] : kinds) {
        if (std::strlen(name) == length && std::strncmp(name, kind, length) == 0) {
            return {fault, kind[length] == '=' ? std::atoi(kind + length + 1) : 0};
        }
    }
    report("FAKE_NCCL_FAULT: there is no kind `%s`", kind);
    return {};
}

std::vector<Planned> planned() {
    std::vector<Planned> all;
    for (const char *next = setting("FAKE_NCCL_FAULT", ""); *next != '\0';) {
        Planned one{};
        int read = 0;
        if (std::sscanf(next, "%d:%llu:%n", &one.rank, &one.operation, &read) < 2 || read == 0) {
            report("FAKE_NCCL_FAULT: expected `rank:operation:kind`, found `%s`", next);
            break;
        }
        one.injected = parse(next + read);
        all.push_back(one);
        next += std::strcspn(next, ",");
        next += *next == ',';
    }
    return all;
}

}  // namespace

int version() {
    static const int parsed = [] {
        int major = 0, minor = 0, patch = 0;
        const char *text = setting("FAKE_NCCL_VERSION", "2.30.4");
        if (std::sscanf(text, "%d.%d.%d", &major, &minor, &patch) < 2) report("FAKE_NCCL_VERSION is `%s`", text);
        return major * 10'000 + minor * 100 + patch;
    }();
    return parsed;
}

Injected injected(int world_rank, std::uint64_t operation) {
    static const std::vector<Planned> all = planned();
    for (const Planned &one : all) {
        if (one.rank == world_rank && one.operation == operation) return one.injected;
    }
    return {};
}

int queries_in_progress() {
    static std::atomic<std::uint32_t> state{static_cast<std::uint32_t>(std::atoi(setting("FAKE_NCCL_SEED", "1")))};
    const std::uint32_t next = state.fetch_add(1) * 2654435761u;
    return static_cast<int>((next >> 16) % (kMaxQueries + 1));
}

bool is_blocking_forced() { return std::strcmp(setting("NCCL_COMM_BLOCKING", "0"), "1") == 0; }

}  // namespace fake::nccl
