// Matches tagged messages of any size between two ranks, which may send and receive in any order.
//
//   sender                                receiver
//   WHOLE {kind, bytes} + payload   -->                        up to a slab: the sender does not wait
//   ANNOUNCE {id, kind, bytes}      -->   once a buffer is posted:
//                                   <--   READY {id}
//   PART {id} + payload, ...        -->
//
// All messages of an ordered pair of ranks go through one channel, in order. A rank that polls takes
// everything: messages without a posted buffer wait in the receiver's own memory. So no message is stuck
// behind another, and only those longer than a slab wait for their receiver.
//
// Not thread-safe.
#pragma once

#include <algorithm>
#include <deque>
#include <list>
#include <map>
#include <unordered_map>

#include "channels.hpp"
#include "peers.hpp"

namespace ringdp {

constexpr std::uint64_t kMessage = ~0ull;  // the number in a message's Stamp, whose `digest` is its kind

class Matching {
 public:
  struct Request {
    std::byte* data;
    std::uint64_t bytes, kind;
    int peer;  // -1: any
    std::int64_t* source;  // null: a send
    const std::byte* announced = nullptr;  // the data of a send that waits for READY
    std::uint64_t received = 0;            // bytes
    Clock::time_point last_look{};         // at whether its peer is alive
  };

  // `fd`: a file of `Channels::size` bytes, which is duplicated. `sent`: counts the bytes sent.
  Matching(const Segment& segment, int fd, int rank, std::atomic<std::uint64_t>& sent)
      : channels_(segment, fd, rank), rank_(rank), ranks_(segment.ranks()), depth_(segment.depth()),
        slab_(segment.slab()), sent_(sent), out_(ranks_) {}

  // For a forked child.
  void close_file() { channels_.close_file(); }

  // Commits the memory for messages to and from `peer`, or all ranks if -1.
  void reserve(int peer) {
    for (int r = 0; r < ranks_; ++r)
      if (r == peer || peer < 0) channels_.reserve(r);
  }

  // `kind`: tag << 24 | dtype.
  void send(std::uint64_t ticket, const std::byte* data, std::uint64_t bytes, std::uint64_t kind, int to) {
    Request& request = pending_[ticket] = {nullptr, bytes, kind, to, nullptr};
    if (bytes <= slab_) {
      out_[to].push_back({kWhole, ticket, kind, bytes, data, bytes, ticket});
    } else {
      request.announced = data;
      out_[to].push_back({kAnnounce, ticket, kind, bytes, nullptr, 0, 0});
    }
  }

  // Receives from `from`, or any rank if -1. Sets `*source` to the sender.
  void receive(std::uint64_t ticket, std::byte* data, std::uint64_t bytes, std::uint64_t kind, int from,
               std::int64_t* source) {
    const Request& request = pending_[ticket] = {data, bytes, kind, from, source};
    for (auto a = arrived_.begin(); a != arrived_.end(); ++a)
      if (matches(request, a->from, a->kind)) {
        const Arrived found = std::move(*a);
        arrived_.erase(a);
        return accept(ticket, found, found.data.data());
      }
    posted_.push_back(ticket);
  }

  static constexpr int kNone = -1, kOther = -2;

  // Sends a message that fits into a slab, if there is room now. Else returns false and does nothing.
  bool send_now(const std::byte* data, std::uint64_t bytes, std::uint64_t kind, int to) {
    if (bytes > slab_ || !channels_.reserved(to) || !out_[to].empty()) return false;
    if (!channels_.push(to, {kWhole, std::uint32_t(bytes), 0, kind, bytes}, data)) return false;
    sent_.fetch_add(bytes, std::memory_order_relaxed);
    return true;
  }

  // Receives a message that fits into a slab from `from`, or any rank if -1, which take turns: one that keeps
  // sending does not keep others waiting. Returns its sender, or does nothing and returns kNone if no message
  // waits, or kOther if `receive` must decide.
  int receive_now(std::byte* data, std::uint64_t bytes, std::uint64_t kind, int from) {
    if (bytes > slab_) return kOther;
    for (const auto ticket : posted_)
      if (pending_[ticket].kind >> 24 == kind >> 24) return kOther;
    for (const auto& a : arrived_)
      if (a.kind >> 24 == kind >> 24) return kOther;
    for (int i = 1; i <= ranks_; ++i) {
      const int r = (last_ + i) % ranks_;
      if (r == rank_ || (from >= 0 && r != from)) continue;
      if (!channels_.reserved(r)) return kOther;
      Envelope* const slot = channels_.front(r);
      if (!slot) continue;
      const Envelope e = *slot;  // copied, so that a peer cannot change it after the check
      if (e.type != kWhole || e.kind != kind || e.bytes != bytes || e.size != bytes) return kOther;
      copy_bytes(data, Fifo<Envelope>::data(*slot), bytes);
      channels_.pop(r);
      return last_ = r;
    }
    return kNone;
  }

  // Takes what has arrived and sends what can go. Returns whether there was any.
  bool move() {
    bool moved = false;
    for (int r = 0; r < ranks_; ++r)
      if (channels_.reserved(r)) moved |= take(r) | push(r);
    return moved;
  }

  bool push(int to) {
    auto& queue = out_[to];
    int slots = 0;  // at most `depth_`, or a receiver that keeps up could keep us here for ever
    for (; !queue.empty() && slots < depth_; ++slots) {
      Out& next = queue.front();
      const auto some = std::min<std::uint64_t>(next.left, slab_);
      if (!channels_.push(to, {next.type, std::uint32_t(some), next.id, next.kind, next.bytes}, next.data))
        break;
      sent_.fetch_add(some, std::memory_order_relaxed);  // relaxed: see Progress::messages_sent
      next.data += some, next.left -= some;
      if (next.left) continue;
      if (next.ticket) end(next.ticket);
      queue.pop_front();
    }
    return slots > 0;
  }

  // Returns the request if it has not ended, else null.
  Request* find(std::uint64_t ticket) {
    const auto p = pending_.find(ticket);
    return p == pending_.end() ? nullptr : &p->second;
  }
  bool any() const { return !pending_.empty(); }

  // Returns whether everything that has arrived from there was taken.
  bool empty(int from) { return channels_.waiting(from) == 0; }

  bool has_ended() const { return !ended_.empty(); }
  // Returns the tickets that have ended since the last call. Their buffers are not used any more.
  std::vector<std::uint64_t> ended() { return std::exchange(ended_, {}); }

 private:
  enum Type : std::uint32_t { kWhole = 1, kAnnounce, kReady, kPart };

  struct Out {
    Type type;
    std::uint64_t id, kind, bytes;
    const std::byte* data;
    std::uint64_t left;
    std::uint64_t ticket;  // of the request that ends with it, or 0
  };

  struct Arrived {
    int from;
    Type type;
    std::uint64_t id, kind, bytes;
    std::vector<std::byte> data;
  };

  bool take(int from) {
    const auto count = channels_.waiting(from);
    if (count > std::uint64_t(depth_)) refuse(from, {});
    channels_.take(from, count,
                   [&](const Envelope& e, const std::byte* payload) { open(from, e, payload); });
    return count > 0;
  }

  void open(int from, const Envelope& e, const std::byte* payload) {
    if (e.size > slab_) refuse(from, e);
    switch (e.type) {
      case kWhole:
        if (e.size != e.bytes) refuse(from, e);
        return deliver({from, kWhole, e.id, e.kind, e.bytes, {}}, payload);
      case kAnnounce: return deliver({from, kAnnounce, e.id, e.kind, e.bytes, {}}, payload);
      case kReady: return start(from, e);
      case kPart: return add(from, e, payload);
      default: refuse(from, e);
    }
  }

  // Gives the message to the first posted buffer that matches, or stores it.
  void deliver(Arrived message, const std::byte* payload) {
    for (auto p = posted_.begin(); p != posted_.end(); ++p)
      if (matches(pending_[*p], message.from, message.kind)) {
        const auto ticket = *p;
        posted_.erase(p);
        return accept(ticket, message, payload);
      }
    if (message.type == kWhole) message.data.assign(payload, payload + message.bytes);
    arrived_.push_back(std::move(message));
  }

  static bool matches(const Request& r, int from, std::uint64_t kind) {
    return (r.peer < 0 || r.peer == from) && r.kind >> 24 == kind >> 24;
  }

  void accept(std::uint64_t ticket, const Arrived& message, const std::byte* payload) {
    Request& r = pending_[ticket];
    if (r.bytes != message.bytes || r.kind != message.kind)
      throw Failed{Failure::mismatch, message.from, {kMessage, r.bytes, r.kind, 0, 0},
                   {kMessage, message.bytes, message.kind, 0, 0}};
    *r.source = message.from;
    if (message.type == kWhole) {
      copy_bytes(r.data, payload, r.bytes);
      end(ticket);
    } else {
      coming_[{message.from, message.id}] = ticket;
      out_[message.from].push_back({kReady, message.id, r.kind, r.bytes, nullptr, 0, 0});
    }
  }

  // The receiver is ready for an announced message.
  void start(int to, const Envelope& e) {
    Request* const r = find(e.id);
    if (!r || !r->announced || r->peer != to) refuse(to, e);
    const auto* data = std::exchange(r->announced, nullptr);
    out_[to].push_back({kPart, e.id, r->kind, r->bytes, data, r->bytes, e.id});
  }

  void add(int from, const Envelope& e, const std::byte* payload) {
    const auto c = coming_.find({from, e.id});
    if (c == coming_.end()) refuse(from, e);
    Request& r = pending_[c->second];
    if (e.size == 0 || e.size > r.bytes - r.received) refuse(from, e);
    copy_bytes(r.data + r.received, payload, e.size);
    r.received += e.size;
    if (r.received < r.bytes) return;
    end(c->second);
    coming_.erase(c);
  }

  void end(std::uint64_t ticket) {
    pending_.erase(ticket);
    ended_.push_back(ticket);
  }

  [[noreturn]] static void refuse(int from, const Envelope& e) {
    throw Failed{Failure::damaged, from, {}, {kMessage, e.bytes, e.kind, 0, 0}};
  }

  Channels channels_;
  int rank_, ranks_, depth_;
  std::size_t slab_;
  std::atomic<std::uint64_t>& sent_;
  std::unordered_map<std::uint64_t, Request> pending_;  // by ticket: requests that have not ended
  std::vector<std::uint64_t> ended_;                    // tickets since the last call of `ended`
  std::vector<std::deque<Out>> out_;                    // by receiver
  std::list<std::uint64_t> posted_;                     // tickets of buffers without a message
  std::list<Arrived> arrived_;                          // messages without a buffer
  int last_ = 0;                                        // the sender that `receive_now` received from
  std::map<std::pair<int, std::uint64_t>, std::uint64_t> coming_;  // (sender, id) -> ticket
};

}  // namespace ringdp
