// An operation on a stream: it publishes this rank's data when the stream reaches it, and runs when it has its peers'.

#include <chrono>
#include <cstring>

#include "nccl.h"

namespace fake::nccl {
namespace {

std::int64_t now_in_ms() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

Call parse(const std::string &bytes) {
    Call call{};
    if (bytes.size() >= sizeof call) std::memcpy(&call, bytes.data(), sizeof call);
    return call;
}

bool is_same(const Call &a, const Call &b) {
    return a.kind == b.kind && a.type == b.type && a.op == b.op && a.root == b.root && a.count == b.count;
}

std::string text(const Call &call) {
    return std::string(name_of(call.kind)) + "(" + std::to_string(call.count) + " elements of type " +
           std::to_string(call.type) + ", operator " + std::to_string(call.op) + ", root " +
           std::to_string(call.root) + ")";
}

std::uintptr_t address(const void *pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

const char *name_of(Kind kind) {
    constexpr const char *names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast",
                                     "ncclReduce", "ncclSend and ncclRecv"};
    return names[static_cast<std::size_t>(kind)];
}

Operation::Operation(std::shared_ptr<Member> member, Call call, std::uint64_t sequence, const void *send, void *recv)
    : member_(std::move(member)), call_(call), sequence_(sequence),
      send_(static_cast<const unsigned char *>(send)), recv_(static_cast<unsigned char *>(recv)),
      compared_(member_->ranks), arrived_(member_->ranks) {
    compared_[member_->rank] = true;
}

Operation::Operation(std::shared_ptr<Member> member, Call call, std::vector<Message> messages)
    : member_(std::move(member)), call_(call), messages_(std::move(messages)), received_(messages_.size()),
      compared_(messages_.size()), arrived_(messages_.size()) {}

std::string Operation::describe() const {
    const std::string place = is_collective() ? " #" + std::to_string(sequence_) : "";
    return text(call_) + place + " of communicator " + member_->board.name() + " on rank " +
           std::to_string(member_->rank);
}

std::string Operation::key(const char *what, int rank, std::uint64_t sequence) const {
    return std::string(what) + "." + std::to_string(sequence) + "." + std::to_string(rank);
}

std::string Operation::message_key(const char *what, const Message &message) const {
    const int source = message.is_send ? member_->rank : message.peer;
    const int target = message.is_send ? message.peer : member_->rank;
    return std::string(what) + "." + std::to_string(source) + "." + std::to_string(target) + "." + std::to_string(message.number);
}

std::vector<Range> Operation::ranges() const {
    const std::size_t bytes = call_.count * element_bytes(call_.type), whole = bytes * member_->ranks;
    switch (call_.kind) {
    case Kind::AllReduce:
        if (send_ == recv_) return {{address(recv_), bytes, true}};
        return {{address(send_), bytes, false}, {address(recv_), bytes, true}};
    case Kind::ReduceScatter:
        return {{address(send_), whole, false}, {address(recv_), bytes, true}};
    case Kind::AllGather:
        if (send_ == recv_ + member_->rank * bytes) return {{address(recv_), whole, true}};
        return {{address(send_), bytes, false}, {address(recv_), whole, true}};
    case Kind::Broadcast:
        if (call_.root != member_->rank || send_ == recv_) return {{address(recv_), bytes, true}};
        return {{address(send_), bytes, false}, {address(recv_), bytes, true}};
    case Kind::Reduce:
        if (call_.root != member_->rank) return {{address(send_), bytes, false}};
        if (send_ == recv_) return {{address(recv_), bytes, true}};
        return {{address(send_), bytes, false}, {address(recv_), bytes, true}};
    case Kind::Messages: break;
    }
    std::vector<Range> all;
    for (const Message &message : messages_) {
        all.push_back({address(message.buffer), message.count * element_bytes(message.type), !message.is_send});
    }
    return all;
}

void Operation::announce() {
    if (is_collective()) member_->board.set(key("call", member_->rank, sequence_), &call_, sizeof call_);
    for (const Message &message : messages_) {
        member_->board.set(message_key(message.is_send ? "sent" : "expected", message), &call_, sizeof call_);
    }
}

void Operation::compare() {
    const std::lock_guard guard(mutex_);
    if (done_ || member_->is_aborted) return;
    is_collective() ? compare_calls() : compare_messages();
}

// The order of messages and collectives; `exchange` compares what is sent.
void Operation::compare_messages() {
    for (std::size_t i = 0; i < messages_.size(); ++i) {
        const std::string key = message_key(messages_[i].is_send ? "expected" : "sent", messages_[i]);
        const auto found = compared_[i] ? std::nullopt : member_->board.get(key);
        if (!found) continue;
        compared_[i] = true;
        member_->board.remove(key);
        check_order(*member_, call_.launch, parse(*found), describe());
    }
}

void Operation::compare_calls() {
    for (int peer = 0; peer < member_->ranks; ++peer) {
        if (compared_[peer]) continue;
        const auto found = member_->board.get(key("call", peer, sequence_));
        if (!found) continue;
        compared_[peer] = true;
        const Call other = parse(*found);
        if (!is_same(call_, other)) {
            is_mismatched_ = true;
            report("NCCL: %s, but rank %d called %s", describe().c_str(), peer, text(other).c_str());
        }
        check_order(*member_, call_.launch, other, describe());
    }
}

// What the GPU of this rank reads, as it is now.
void Operation::publish() {
    is_published_ = true;
    if (!is_collective()) {
        for (const Message &message : messages_) {
            if (!message.is_send) continue;
            Call header = call_;
            header.type = message.type;
            header.count = message.count;
            std::string bytes(reinterpret_cast<const char *>(&header), sizeof header);
            bytes.append(reinterpret_cast<const char *>(message.buffer), message.count * element_bytes(message.type));
            member_->board.set(message_key("message", message), bytes.data(), bytes.size());
        }
        return;
    }
    std::size_t bytes = call_.count * element_bytes(call_.type);
    if (call_.kind == Kind::ReduceScatter) bytes *= member_->ranks;
    if (call_.kind == Kind::Broadcast && call_.root != member_->rank) bytes = 0;
    member_->board.set(key("data", member_->rank, sequence_), send_, bytes);
}

bool Operation::has_all_data() {
    bool is_complete = true;
    for (int peer = 0; peer < member_->ranks; ++peer) {
        if (!arrived_[peer]) arrived_[peer] = member_->board.has(key("data", peer, sequence_));
        is_complete = is_complete && arrived_[peer] && compared_[peer];
    }
    return is_complete;
}

// Takes what has been sent. A send is over when its receiver has taken the message.
bool Operation::exchange() {
    bool is_complete = true;
    for (std::size_t i = 0; i < messages_.size(); ++i) {
        if (arrived_[i]) continue;
        const Message &message = messages_[i];
        if (message.is_send) {
            arrived_[i] = !member_->board.has(message_key("message", message));
        } else if (auto found = member_->board.get(message_key("message", message))) {
            const Call other = parse(*found);
            if (other.type != message.type || other.count != message.count) {
                is_mismatched_ = true;
                report("NCCL: rank %d receives %zu elements of type %d of communicator %s, but rank %d sends %zu of type %d",
                       member_->rank, message.count, message.type, member_->board.name().c_str(), message.peer,
                       static_cast<std::size_t>(other.count), other.type);
                return false;
            }
            received_[i] = std::move(*found);
            member_->board.remove(message_key("message", message));
            arrived_[i] = true;
        }
        is_complete = is_complete && arrived_[i];
    }
    return is_complete;
}

bool Operation::is_ready() {
    if (member_->is_aborted) return true;
    compare_launched(member_->identity);
    const std::lock_guard guard(mutex_);
    if (previous && !previous->is_done()) return false;
    previous = nullptr;
    if (injected.kind == Fault::Hang || injected.kind == Fault::Error) return false;
    if (injected.kind == Fault::Slow) {
        if (slow_until_ == 0) slow_until_ = now_in_ms() + injected.milliseconds;
        if (now_in_ms() < slow_until_) return false;
    }
    if (!is_published_) publish();
    if (is_mismatched_) return false;
    return is_collective() ? has_all_data() : exchange();
}

void Operation::run_collective() {
    const std::size_t bytes = call_.count * element_bytes(call_.type);
    std::vector<std::string> data(member_->ranks);
    std::vector<const unsigned char *> inputs;
    for (int rank = 0; rank < member_->ranks; ++rank) {
        if (call_.kind == Kind::Broadcast && rank != call_.root) continue;
        auto found = member_->board.get(key("data", rank, sequence_));
        if (!found) {
            report("NCCL: the data of rank %d for %s is gone", rank, describe().c_str());
            return;
        }
        data[rank] = std::move(*found);
        const std::size_t offset = call_.kind == Kind::ReduceScatter ? member_->rank * bytes : 0;
        inputs.push_back(reinterpret_cast<const unsigned char *>(data[rank].data()) + offset);
    }
    switch (call_.kind) {
    case Kind::AllReduce:
    case Kind::ReduceScatter: reduce(call_.type, call_.op, inputs, recv_, call_.count); break;
    case Kind::Reduce:
        if (call_.root == member_->rank) reduce(call_.type, call_.op, inputs, recv_, call_.count);
        break;
    case Kind::AllGather:
        for (int rank = 0; rank < member_->ranks; ++rank) std::memcpy(recv_ + rank * bytes, inputs[rank], bytes);
        break;
    default: std::memcpy(recv_, inputs[0], bytes);
    }
    // All ranks have published this operation, so all have run the one before.
    if (sequence_ > 0) {
        member_->board.remove(key("call", member_->rank, sequence_ - 1));
        member_->board.remove(key("data", member_->rank, sequence_ - 1));
    }
}

void Operation::run() {
    const std::lock_guard guard(mutex_);
    if (member_->is_aborted) {
        // Nobody may trust the outputs.
        for (const Range &range : ranges()) {
            if (range.written) std::memset(reinterpret_cast<void *>(range.begin), 0xff, range.bytes);
        }
    } else if (is_collective()) {
        run_collective();
    } else {
        for (std::size_t i = 0; i < messages_.size(); ++i) {
            if (messages_[i].is_send) continue;
            std::memcpy(messages_[i].buffer, received_[i].data() + sizeof(Call), received_[i].size() - sizeof(Call));
        }
    }
    received_.clear();
    done_ = true;
}

}  // namespace fake::nccl
