// Values that ranks share, as files: they need no lock, and a killed process leaves none half-written.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>

#include "nccl.h"

namespace fake::nccl {
namespace {

// fake-driver.sh sets a folder and removes it in the end.
std::string root() {
    const char *folder = std::getenv("FAKE_NCCL_FOLDER");
    return folder != nullptr ? folder : std::filesystem::temp_directory_path().string();
}

}  // namespace

Board::Board(std::string name) : name_(std::move(name)), folder_(root() + "/fake-nccl-" + name_) {
    mkdir(folder_.c_str(), 0700);
}

void Board::set(const std::string &key, const void *bytes, std::size_t count) const {
    static std::atomic<unsigned> written{0};
    const std::string path = folder_ + "/" + key;
    const std::string draft = folder_ + "/.draft-" + std::to_string(getpid()) + "-" + std::to_string(written++);
    std::FILE *file = std::fopen(draft.c_str(), "wb");
    if (file == nullptr) return;  // all other ranks have ended
    const bool is_whole = std::fwrite(bytes, 1, count, file) == count;
    if (std::fclose(file) != 0 || !is_whole) report("NCCL: cannot write %s", draft.c_str());
    std::rename(draft.c_str(), path.c_str());
}

bool Board::has(const std::string &key) const { return access((folder_ + "/" + key).c_str(), F_OK) == 0; }

std::optional<std::string> Board::get(const std::string &key) const {
    const int file = open((folder_ + "/" + key).c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return std::nullopt;
    struct stat about {};
    fstat(file, &about);
    std::string bytes(about.st_size, '\0');
    std::size_t done = 0;
    while (done < bytes.size()) {
        const ssize_t got = read(file, bytes.data() + done, bytes.size() - done);
        if (got <= 0) break;
        done += got;
    }
    close(file);
    return done == bytes.size() ? std::optional(std::move(bytes)) : std::nullopt;
}

void Board::remove(const std::string &key) const { unlink((folder_ + "/" + key).c_str()); }

void Board::clear() const {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
}

}  // namespace fake::nccl
