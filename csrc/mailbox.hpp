// Messages between two ranks: tagged, of any size, sent and received in any order.
//
//   sender                                receiver
//   WHOLE {kind, bytes} + payload   -->                        up to a slab: it need not be awaited
//   ANNOUNCE {id, kind, bytes}      -->   once a buffer is there:
//                                   <--   READY {id}
//   PART {id} + payload, ...        -->
//
// Everything goes through one channel for each pair and direction, in order, and whoever looks takes
// whatever is there: messages that nobody has asked for yet wait in the receiver's own memory. So no
// message is stuck behind another, and only what is longer than a slab waits for its receiver.
//
// Whoever waits moves everything of this rank along; for what nobody waits for, a thread does.
#pragma once

#include <list>
#include <map>
#include <unordered_map>

#include "channels.hpp"
#include "progress.hpp"

namespace ringdp {

constexpr std::uint64_t kMessage = ~0ull;  // as the number in a Stamp: its `digest` is the kind

class Mailbox {
 public:
  // `fd`: of a file of `Channels::size` bytes, of which it keeps a duplicate.
  Mailbox(Progress& progress, int fd, int rank)
      : progress_(progress), segment_(progress.segment()), channels_(segment_, fd, rank), rank_(rank),
        ranks_(segment_.ranks()), slab_(segment_.slab()), out_(ranks_) {}
  ~Mailbox() { close(); }
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Of a message that is to begin: what it uses is to be kept from before that, until it has `ended`.
  std::uint64_t ticket() { return ++tickets_; }

  // `kind`: the tag << 24, and the dtype. In the background somebody sees to it at once; else whoever
  // waits for it does.
  void send(std::uint64_t ticket, const std::byte* data, std::uint64_t bytes, std::uint64_t kind, int to,
            bool background) {
    const auto lock = turn();
    channels_.reserve(to);
    pending_[ticket] = {nullptr, bytes, kind, to, nullptr};
    if (bytes <= slab_) {
      out_[to].push_back({kWhole, ticket, kind, bytes, data, bytes, ticket});
    } else {
      announced_[ticket] = data;
      out_[to].push_back({kAnnounce, ticket, kind, bytes, nullptr, 0, 0});
    }
    if (!dead()) push(to);
    if (background) wake();
  }

  // From `from`, or -1: anybody. `*source` will be who sent it.
  void receive(std::uint64_t ticket, std::byte* data, std::uint64_t bytes, std::uint64_t kind, int from,
               std::int64_t* source, bool background) {
    const auto lock = turn();
    for (int r = 0; r < ranks_; ++r)
      if (r == from || from < 0) channels_.reserve(r);
    pending_[ticket] = {data, bytes, kind, from, source};
    posted_.push_back(ticket);
    for (auto a = arrived_.begin(); a != arrived_.end(); ++a)
      if (matches(pending_[ticket], a->from, a->kind)) {
        posted_.pop_back();
        const Arrived found = std::move(*a);
        arrived_.erase(a);
        attempt([&] { accept(ticket, found, found.data.data()); });
        break;
      }
    if (background) wake();
  }

  // Whether that message has been sent, or has come; after a failure none is any more.
  bool wait(std::uint64_t ticket, double seconds) {
    auto lock = turn();
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(seconds));
    ++waiters_;
    for (int idle = 0; pending_.count(ticket) && !dead();) {
      idle = move() ? 0 : idle + 1;
      const auto p = pending_.find(ticket);
      if (p == pending_.end()) break;
      const auto at = Clock::now();
      // By the clock, over all waits for it: on a busy core few rests fit into one, and a caller that
      // only asks whether it has come does not rest at all.
      auto& looked = p->second.looked;
      if (looked == Clock::time_point{}) looked = at;
      if (at - looked >= kLook) {
        looked = at;
        attempt([&] { look(ticket); });
        continue;
      }
      if (at >= end) break;
      rest(lock, idle);
    }
    --waiters_;
    if (!waiters_ && !pending_.empty()) wake();  // for the case that the caller does not come back
    return !pending_.count(ticket);
  }

  // The tickets of what has ended since the last question: nothing of it is used any more.
  std::vector<std::uint64_t> ended() {
    const auto lock = turn();
    return std::exchange(ended_, {});
  }

  // In a forked child.
  void let_go() { channels_.let_go(); }

  void close() {
    {
      const auto lock = turn();
      stop_ = true;
      work_.notify_one();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  enum Type : std::uint32_t { kWhole = 1, kAnnounce, kReady, kPart };

  struct Request {
    std::byte* data;
    std::uint64_t bytes, kind;
    int peer;  // -1: anybody
    std::int64_t* source;  // null: a send
    std::uint64_t come = 0;
    Clock::time_point looked{};  // whether its peer is still there
  };

  struct Out {
    Type type;
    std::uint64_t id, kind, bytes;
    const std::byte* data;
    std::uint64_t left;
    std::uint64_t ticket;  // what ends with it, or 0
  };

  struct Arrived {
    int from;
    Type type;
    std::uint64_t id, kind, bytes;
    std::vector<std::byte> data;
  };

  static constexpr int kSpins = 2000, kYields = 2200;
  static constexpr std::chrono::milliseconds kLook{10};

  // Who moves bytes lets those go first who ask for a turn: a mutex alone would not see to that.
  std::unique_lock<std::mutex> turn() {
    asking_.fetch_add(1, std::memory_order_relaxed);
    std::unique_lock lock(mutex_);
    asking_.fetch_sub(1, std::memory_order_relaxed);
    return lock;
  }

  bool dead() { return stop_ || failed_ || progress_.peers().reported(); }

  // Runs what may find a failure, and tells the others of it.
  template <class Act>
  void attempt(Act act) {
    try {
      act();
    } catch (const Failed& f) {
      failed_ = true;
      if (f.reporter < 0) progress_.fail(f);
    } catch (const std::exception& e) {  // no memory
      failed_ = true;
      progress_.fail({Failure::aborted, rank_, {}, {}, -1, e.what()});
    }
  }

  // Takes what has come and sends what may go. Whether there was any.
  bool move() {
    bool moved = false;
    attempt([&] {
      for (int r = 0; r < ranks_; ++r)
        if (channels_.reserved(r)) moved |= take(r) | push(r);
    });
    return moved;
  }

  bool take(int from) {
    return channels_.take(
        from, [&](const Envelope& e, const std::byte* payload) { open(from, e, payload); });
  }

  bool push(int to) {
    auto& queue = out_[to];
    int slots = 0;  // no more than there are, or a receiver that keeps up would keep us here
    for (; !queue.empty() && slots < segment_.depth(); ++slots) {
      Out& next = queue.front();
      const auto some = std::min<std::uint64_t>(next.left, slab_);
      if (!channels_.push(to, {next.type, std::uint32_t(some), next.id, next.kind, next.bytes}, next.data))
        break;
      progress_.messages_sent.fetch_add(some, std::memory_order_relaxed);
      next.data += some, next.left -= some;
      if (next.left) continue;
      if (next.ticket) end(next.ticket);
      queue.pop_front();
    }
    return slots > 0;
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

  // To the first buffer that was posted for it, or to those that wait.
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

  void start(int to, const Envelope& e) {
    const auto a = announced_.find(e.id);
    if (a == announced_.end() || pending_[e.id].peer != to) refuse(to, e);
    const Request& r = pending_[e.id];
    out_[to].push_back({kPart, e.id, r.kind, r.bytes, a->second, r.bytes, e.id});
    announced_.erase(a);
  }

  void add(int from, const Envelope& e, const std::byte* payload) {
    const auto c = coming_.find({from, e.id});
    if (c == coming_.end()) refuse(from, e);
    Request& r = pending_[c->second];
    if (e.size == 0 || e.size > r.bytes - r.come) refuse(from, e);
    copy_bytes(r.data + r.come, payload, e.size);
    r.come += e.size;
    if (r.come < r.bytes) return;
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

  // Throws if the message can't come, or can't be taken, any more.
  void look(std::uint64_t ticket) {
    const auto p = pending_.find(ticket);
    if (p == pending_.end()) return;
    const int peer = p->second.peer;
    int left = 0, gone = -1;
    for (int r = 0; r < ranks_; ++r) {
      if (r == rank_ || (peer >= 0 && r != peer)) continue;
      if (!segment_.gone(r)) {
        ++left;
        continue;
      }
      if (!channels_.empty(r)) return;  // its last messages, which came after our last look
      const bool closed = segment_.record(r).pid.load(std::memory_order_relaxed) < 0;
      if (!closed || gone < 0) gone = r;
      if (!closed) left = -ranks_;  // one that has died, and not just left, may have been the sender
    }
    if (left <= 0 && gone >= 0) {
      if (auto f = progress_.peers().reported()) throw *f;  // it ended because of what it reported
      throw Failed{Failure::lost, gone};
    }
  }

  // After so many looks in vain: spins a little, then yields, then sleeps. After none it lets others in.
  void rest(std::unique_lock<std::mutex>& lock, int idle) {
    // relaxed: only a hint
    if (idle == 0 && asking_.load(std::memory_order_relaxed) == 0) return;
    lock.unlock();
    if (idle == 0) {
      while (asking_.load(std::memory_order_relaxed) > 0) sched_yield();
    } else if (idle < kSpins && ranks_ <= cores_) {
      pause();
    } else if (idle < kYields) {
      sched_yield();
    } else {
      timespec nap{0, idle < kYields + 32 ? 20'000 : idle < kYields + 512 ? 100'000 : 500'000};
      nanosleep(&nap, nullptr);
    }
    lock.lock();
  }

  void wake() {
    if (pending_.empty() || stop_) return;
    ensure(thread_, [this] { loop(); });
    work_.notify_one();
  }

  void loop() {
    prctl(PR_SET_TIMERSLACK, 1000UL);  // ns by which the kernel may stretch our naps
    std::unique_lock lock(mutex_);
    for (int idle = kYields; !stop_;) {
      if (pending_.empty() || waiters_ || dead()) {
        work_.wait(lock);
        idle = kYields;
      } else {
        idle = move() ? 0 : std::max(idle + 1, kYields);
        rest(lock, idle);
      }
    }
  }

  Progress& progress_;
  Segment& segment_;
  Channels channels_;
  int rank_, ranks_;
  std::size_t slab_;
  const long cores_ = sysconf(_SC_NPROCESSORS_ONLN);

  std::mutex mutex_;
  std::atomic<int> asking_{0};  // threads that ask for a turn
  std::condition_variable work_;
  std::thread thread_;
  bool stop_ = false, failed_ = false;
  int waiters_ = 0;
  std::atomic<std::uint64_t> tickets_{0};
  std::unordered_map<std::uint64_t, Request> pending_;  // by ticket: what has not ended
  std::vector<std::uint64_t> ended_;                    // tickets that nobody has asked for yet
  std::vector<std::deque<Out>> out_;                    // by receiver
  std::list<std::uint64_t> posted_;                     // tickets of buffers without a message
  std::list<Arrived> arrived_;                          // messages without a buffer
  std::map<std::uint64_t, const std::byte*> announced_;  // by ticket: what waits for a READY
  std::map<std::pair<int, std::uint64_t>, std::uint64_t> coming_;  // (sender, id) -> ticket
};

}  // namespace ringdp
