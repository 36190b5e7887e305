// Failures of calls, as the environment asks for them, to show what the program does then.
//
// FAKE_DRIVER_FAIL has them as FUNCTION:CALL[+][=CODE], separated by commas: the call with this number, from 1, returns
// CODE (default: the error that is usual for the function) and does nothing. With `+` so do all later calls. The
// function `*` stands for all calls together: `*:500+=700` is a GPU that is lost in the middle of a run. There CODE is the
// driver's; the other libraries return their usual error, since none of theirs has the driver's numbers.

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>

#include "stream.h"

namespace fake {
namespace {

struct Failure {
    std::string function;
    unsigned long long call;
    bool lasts;
    int code;  // 0: the function's own
    std::atomic<unsigned long long> calls{0};
};

std::deque<Failure> parse(const char *text) {
    std::deque<Failure> all;
    while (*text != '\0') {
        const std::string one(text, std::strcspn(text, ","));
        text += one.size();
        text += *text == ',';
        const std::size_t colon = one.find(':');
        char *rest = nullptr;
        const auto call = colon == one.npos ? 0 : std::strtoull(one.c_str() + colon + 1, &rest, 10);
        const bool lasts = rest != nullptr && *rest == '+';
        rest += lasts;
        const int code = rest != nullptr && *rest == '=' ? std::strtol(rest + 1, &rest, 10) : 0;
        if (call == 0 || *rest != '\0') {
            report("FAKE_DRIVER_FAIL: expected FUNCTION:CALL[+][=CODE], found `%s`", one.c_str());
            continue;
        }
        all.emplace_back();
        all.back().function = one.substr(0, colon);
        all.back().call = call;
        all.back().lasts = lasts;
        all.back().code = code;
    }
    return all;
}

// Whether a function is the driver's: `cuMemFree`, not `cublasCreate` or `ncclSend`.
bool is_of_driver(const char *function) {
    return std::strncmp(function, "cu", 2) == 0 && function[2] >= 'A' && function[2] <= 'Z';
}

}  // namespace

__attribute__((visibility("default"))) int injected_failure(const char *function, int usual) {
    count_call(function);
    // Never destroyed: other threads may still run when the process ends.
    static auto &all = *[] {
        const char *asked = std::getenv("FAKE_DRIVER_FAIL");
        return new std::deque<Failure>(parse(asked ? asked : ""));
    }();
    for (Failure &one : all) {
        const bool stands_for_all = one.function == "*";
        if (!stands_for_all && one.function != function) continue;
        const auto call = ++one.calls;
        if (call != one.call && !(one.lasts && call > one.call)) continue;
        return one.code != 0 && (!stands_for_all || is_of_driver(function)) ? one.code : usual;
    }
    return 0;
}

}  // namespace fake
