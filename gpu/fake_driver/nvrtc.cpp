// libnvrtc.so.13: hands back a "cubin" with the names of the source's kernels, which the driver runs by emulation.
// The names come from the C++ preprocessor, because kernels are declared by macros.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <regex>
#include <set>
#include <unistd.h>

#include "modules.h"

namespace {

enum Result { kSuccess = 0, kOutOfMemory = 1, kInvalidInput = 3, kCompilation = 6, kInternal = 11 };

struct Program {
    std::string source, cubin, log;
};

Program &program(void *handle) { return *static_cast<Program *>(handle); }

// The source after the preprocessor, or nothing.
std::string preprocessed(const std::string &source) {
    char path[] = "/tmp/fake-nvrtc-XXXXXX";
    const int file = mkstemp(path);
    if (file < 0) return {};
    const bool written = write(file, source.data(), source.size()) == static_cast<ssize_t>(source.size());
    close(file);
    std::string text;
    const std::string command = std::string("c++ -E -P -w -x c++ -std=c++17 ") + path;
    std::unique_ptr<FILE, int (*)(FILE *)> output(written ? popen(command.c_str(), "r") : nullptr, pclose);
    char part[4096];
    while (output && std::fgets(part, sizeof part, output.get())) text += part;
    unlink(path);
    return text;
}

}  // namespace

FAKE_EXPORT int nvrtcCreateProgram(void **handle, const char *source, const char *, int, const char *const *,
                                   const char *const *) {
    MAY_FAIL(kOutOfMemory);
    *handle = new Program{source, {}, {}};
    return kSuccess;
}

FAKE_EXPORT int nvrtcDestroyProgram(void **handle) {
    delete static_cast<Program *>(*handle);
    *handle = nullptr;
    return kSuccess;
}

FAKE_EXPORT int nvrtcCompileProgram(void *handle, int count, const char *const *options) {
    MAY_FAIL(kCompilation);
    Program &compiled = program(handle);
    for (int i = 0; i < count; ++i) {
        static const std::set<std::string> known = {"--gpu-architecture=sm_80", "--gpu-architecture=sm_90",
                                                    "--gpu-architecture=sm_90a", "--std=c++17"};
        if (known.count(options[i]) == 0) {
            fake::report("nvrtcCompileProgram: the fake NVRTC does not know the option %s", options[i]);
            return kInvalidInput;
        }
    }
    const std::string text = preprocessed(compiled.source);
    static const std::regex kernel("__global__\\s+void\\s+(?:__launch_bounds__\\([^)]*\\)\\s+)?(\\w+)\\s*\\(");
    compiled.cubin = fake::kCubinHeader;
    std::size_t names = 0;
    for (std::sregex_iterator match(text.begin(), text.end(), kernel), end; match != end; ++match, ++names) {
        if (names == 0) MAY_FAIL_AS(("nvrtcCompileProgram(" + (*match)[1].str() + ")").c_str(), kCompilation);
        compiled.cubin += (*match)[1].str() + "\n";
    }
    if (const char *warning = std::getenv("FAKE_NVRTC_WARNING")) compiled.log = warning;
    if (names > 0) return kSuccess;
    compiled.log = "the preprocessor found no kernel";
    return kCompilation;
}

FAKE_EXPORT int nvrtcGetProgramLogSize(void *handle, std::size_t *bytes) {
    MAY_FAIL(kInternal);
    *bytes = program(handle).log.size() + 1;
    return kSuccess;
}

FAKE_EXPORT int nvrtcGetProgramLog(void *handle, char *log) {
    MAY_FAIL(kInternal);
    std::strcpy(log, program(handle).log.c_str());
    return kSuccess;
}

FAKE_EXPORT int nvrtcGetCUBINSize(void *handle, std::size_t *bytes) {
    MAY_FAIL(kInternal);
    *bytes = program(handle).cubin.size() + 1;
    return kSuccess;
}

FAKE_EXPORT int nvrtcGetCUBIN(void *handle, char *cubin) {
    MAY_FAIL(kInternal);
    std::memcpy(cubin, program(handle).cubin.c_str(), program(handle).cubin.size() + 1);
    return kSuccess;
}

FAKE_EXPORT int nvrtcVersion(int *major, int *minor) {
    const char *asked = std::getenv("FAKE_NVRTC_MINOR");
    *major = 13;
    *minor = asked ? std::atoi(asked) : 0;
    return kSuccess;
}
