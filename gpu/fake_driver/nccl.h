// The parts of the fake NCCL. Ranks are threads or processes; they meet through files in a folder per communicator.
//
//   nccl_board.cpp         the files
//   nccl_settings.cpp      version and injected failures, from the environment
//   nccl_elements.cpp      element types and reductions
//   nccl_operation.cpp     an operation on a stream: its data, and what it waits for
//   nccl_order.cpp         whether all ranks launch operations in one order
//   nccl_communicator.cpp  creation, split and end of communicators, and the state of their calls
//   nccl_calls.cpp         collectives, messages and groups of calls

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "stream.h"

// As in nccl.h of NVIDIA.
enum ncclResult_t : int {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
};

namespace fake::nccl {

// ---- nccl_settings.cpp

// A failure of one rank at one of its operations, in FAKE_NCCL_FAULT as `rank:operation:kind[=milliseconds]`; several
// are separated by commas. Operations are counted per rank over all communicators, from 0.
enum class Fault {
    None,
    Refuse,  // the call returns an error
    Error,   // the operation does not end, and the communicator reports an asynchronous error
    Hang,    // the operation never starts
    Stall,   // NCCL never accepts the call
    Slow,    // the operation takes so many milliseconds
    Exit,    // the process ends, as if killed
    Freeze,  // the process stops, and its host threads with it
};

struct Injected {
    Fault kind = Fault::None;
    int milliseconds = 0;
};

int version();  // FAKE_NCCL_VERSION, such as 2.22.3; 22203
Injected injected(int world_rank, std::uint64_t operation);
// How many queries a call of a nonblocking communicator stays in progress, at least: pseudo-random.
int queries_in_progress();
bool is_blocking_forced();

// ---- nccl_board.cpp

// Named values that the ranks of a communicator set and read. A value is set once, as a whole.
class Board {
  public:
    // Of all communicators with this name, in all processes.
    explicit Board(std::string name);
    void set(const std::string &key, const void *bytes, std::size_t count) const;
    bool has(const std::string &key) const;
    std::optional<std::string> get(const std::string &key) const;
    void remove(const std::string &key) const;
    // Removes the folder with all values.
    void clear() const;
    const std::string &name() const { return name_; }

  private:
    std::string name_, folder_;
};

// ---- nccl_elements.cpp

std::size_t element_bytes(int type);  // 0 if there is no such type
bool is_operator(int op);
// Reduces arrays, in their order. 16-bit sums are rounded after each step, as NCCL's kernels do.
void reduce(int type, int op, const std::vector<const unsigned char *> &inputs, unsigned char *output,
            std::size_t count);

// ---- nccl_operation.cpp

// A communicator as its operations know it. It outlives the handle.
struct Member {
    Member(Board board, int rank, int ranks, int world_rank, int device, std::uint64_t identity)
        : board(std::move(board)), rank(rank), ranks(ranks), world_rank(world_rank), device(device),
          identity(identity) {}

    Board board;
    int rank, ranks, world_rank, device;
    std::uint64_t identity;  // the same for all communicators of a rank
    std::atomic<bool> is_aborted{false};
    std::atomic<bool> is_faulty{false};
};

enum class Kind : std::uint32_t { AllReduce, ReduceScatter, AllGather, Broadcast, Reduce, Messages };
const char *name_of(Kind kind);

// What all ranks must agree on, and where a rank launched it.
struct Call {
    Kind kind;
    std::int32_t type, op, root;
    std::uint64_t count;
    std::uint64_t identity, launch;
};

struct Message {
    bool is_send;
    int peer;
    int type;
    std::size_t count;
    unsigned char *buffer;
    std::uint64_t number;  // among those from one rank to another
};

// A collective, or the messages of one group of calls.
class Operation {
  public:
    Operation(std::shared_ptr<Member> member, Call call, std::uint64_t sequence, const void *send, void *recv);
    Operation(std::shared_ptr<Member> member, Call call, std::vector<Message> messages);

    // Tells the other ranks that this one is launched; then it must be enqueued.
    void announce();
    bool is_ready();
    void run();
    bool is_done() const { return done_; }
    // Reads what other ranks have launched at this place, and reports what does not match.
    void compare();
    std::vector<Range> ranges() const;
    std::string describe() const;

    Injected injected;
    std::shared_ptr<Operation> previous;  // of the same communicator, which runs first

  private:
    bool is_collective() const { return call_.kind != Kind::Messages; }
    std::string key(const char *what, int rank, std::uint64_t sequence) const;
    std::string message_key(const char *what, const Message &message) const;
    void compare_calls();
    void compare_messages();
    void publish();
    bool has_all_data();
    bool exchange();
    void run_collective();

    std::shared_ptr<Member> member_;
    Call call_;
    std::uint64_t sequence_ = 0;
    const unsigned char *send_ = nullptr;
    unsigned char *recv_ = nullptr;
    std::vector<Message> messages_;
    std::vector<std::string> received_;  // per message
    std::vector<bool> compared_, arrived_;  // per rank, or per message
    bool is_published_ = false, is_mismatched_ = false;
    std::int64_t slow_until_ = 0;
    std::mutex mutex_;
    std::atomic<bool> done_{false};
};

// ---- nccl_order.cpp

// The number of a rank's next launch, over all its communicators.
std::uint64_t next_launch(std::uint64_t identity);
void add_launched(std::uint64_t identity, const std::shared_ptr<Operation> &operation);
// Compares the next operations of a rank with what its peers have launched.
void compare_launched(std::uint64_t identity);
// Two ranks have launched a common operation, this one as its launch `own`, the other as its launch `other`.
void check_order(const Member &member, std::uint64_t own, const Call &other_call, const std::string &operation);

}  // namespace fake::nccl
