// Page-locked memory of the host that it may not use yet.
//
// The host sees page-locked memory in one mapping, the driver in another. While a copy to the memory is queued and
// the host has not waited for it, the host's pages are not accessible; while a copy from it is, they are read-only.
// The handler of the page fault reports the use and lets it go on.

#include <atomic>
#include <csignal>
#include <sys/mman.h>
#include <unistd.h>

#include "memory.h"

namespace fake {
namespace {

// What the handler of faults may read without a lock: the protected allocations.
struct Protected {
    std::atomic<std::uintptr_t> begin{0};
    std::atomic<std::size_t> bytes{0};
    std::atomic<const char *> name{nullptr};
};
Protected protected_ones[1024];
struct sigaction previous;

void on_fault(int signal, siginfo_t *info, void *context) {
    const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
    for (Protected &one : protected_ones) {
        const std::uintptr_t begin = one.begin;
        if (begin == 0 || address < begin || address >= begin + one.bytes) continue;
        report("the host uses page-locked memory at byte %zu before it has waited for: %s",
               static_cast<std::size_t>(address - begin), one.name.load());
        one.begin = 0;
        mprotect(reinterpret_cast<void *>(begin), one.bytes, PROT_READ | PROT_WRITE);
        return;
    }
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(signal, info, context);
    } else {
        std::signal(SIGSEGV, SIG_DFL);  // the instruction runs again, and ends the process
    }
}

void install_handler() {
    static const bool installed = [] {
        struct sigaction action {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        return sigaction(SIGSEGV, &action, &previous) == 0;
    }();
    (void)installed;
}

void forget(std::uintptr_t begin) {
    for (Protected &one : protected_ones) {
        if (one.begin == begin) one.begin = 0;
    }
}

// The texts live as long as the process: the handler may still read one that was replaced.
const char *kept(const std::string &name) { return (new std::string(name))->c_str(); }

}  // namespace

std::vector<Allocation *> &page_locked() {
    static auto *all = new std::vector<Allocation *>;
    return *all;
}

void protect(Allocation &allocation) {
    install_handler();
    const Access *strongest = nullptr;
    for (const Access &access : allocation.pending) {
        if (strongest == nullptr || (access.range.written && !strongest->range.written)) strongest = &access;
    }
    if (strongest == nullptr && !allocation.is_protected) return;
    forget(allocation.begin);
    allocation.is_protected = strongest != nullptr;
    int allowed = PROT_READ | PROT_WRITE;
    if (strongest != nullptr) {
        allowed = strongest->range.written ? PROT_NONE : PROT_READ;
        for (Protected &one : protected_ones) {
            if (one.begin != 0) continue;
            one.bytes = allocation.bytes;
            one.name = kept(strongest->name);
            one.begin = allocation.begin;
            break;
        }
    }
    mprotect(reinterpret_cast<void *>(allocation.begin), allocation.bytes, allowed);
}

}  // namespace fake
