// A rank's sends and receives, and the threads that move them.
//
// A thread that waits for one message moves all messages of this rank. While none waits, a background
// thread moves them.
#pragma once

#include "matching.hpp"
#include "progress.hpp"

namespace ringdp {

class Mailbox {
 public:
  // `fd`: see `Matching`.
  Mailbox(Progress& progress, int fd)
      : progress_(progress), segment_(progress.segment()), rank_(progress.rank()),
        ranks_(progress.ranks()), messages_(segment_, fd, rank_, progress.messages_sent) {}
  ~Mailbox() { close(); }
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Returns the ticket of a new message. The caller keeps the message's buffer alive from before it starts
  // until it has `ended`.
  std::uint64_t ticket() { return ++tickets_; }

  // See `Matching`. A background message is moved at once, any other one only while a thread waits.
  void send(std::uint64_t ticket, const std::byte* data, std::uint64_t bytes, std::uint64_t kind, int to,
            bool background) {
    const auto lock = turn();
    messages_.reserve(to);
    attempt([&] {
      messages_.send(ticket, data, bytes, kind, to);
      if (!dead()) messages_.push(to);
    });
    if (background) wake();
  }

  void receive(std::uint64_t ticket, std::byte* data, std::uint64_t bytes, std::uint64_t kind, int from,
               std::int64_t* source, bool background) {
    const auto lock = turn();
    messages_.reserve(from);
    attempt([&] { messages_.receive(ticket, data, bytes, kind, from, source); });
    if (background) wake(bytes > segment_.slab());
  }

  // See `Matching`. For calls that hold the GIL: `receive_now` waits for a message, but never sleeps.
  bool send_now(const std::byte* data, std::uint64_t bytes, std::uint64_t kind, int to) {
    const auto lock = turn();
    return !dead() && messages_.send_now(data, bytes, kind, to);
  }
  int receive_now(std::byte* data, std::uint64_t bytes, std::uint64_t kind, int from) {
    auto lock = turn();
    const auto end = after(kBrief);
    for (int idle = 1; !dead(); ++idle) {
      const int sender = messages_.receive_now(data, bytes, kind, from);
      if (sender != Matching::kNone || Clock::now() >= end) return sender;
      rest(lock, std::min(idle, kPolls - 1));
    }
    return Matching::kNone;
  }

  // Waits at most so many seconds. Returns whether the message has been sent, or received. After a failure
  // no message ends any more.
  bool wait(std::uint64_t ticket, double seconds) {
    auto lock = turn();
    const auto end = after(seconds);
    ++waiters_;
    for (int idle = 0; messages_.find(ticket) && !dead();) {
      idle = move() ? 0 : idle + 1;
      const auto request = messages_.find(ticket);
      if (!request) break;
      const auto at = Clock::now();
      // By the clock and across calls: on a busy core few rests fit into one call, and a caller that only
      // polls never rests.
      auto& last_look = request->last_look;
      if (last_look == Clock::time_point{}) last_look = at;
      if (at - last_look >= Peers::kLook) {
        last_look = at;
        attempt([&] { look(request->peer); });
        continue;
      }
      if (at >= end) break;
      rest(lock, idle);
    }
    --waiters_;
    if (!waiters_ && messages_.any()) wake();  // in case the caller does not wait again
    return !messages_.find(ticket);
  }

  // See `Matching`.
  bool has_ended() {
    const auto lock = turn();
    return messages_.has_ended();
  }
  std::vector<std::uint64_t> ended() {
    const auto lock = turn();
    return messages_.ended();
  }

  // For a forked child.
  void close_file() { messages_.close_file(); }

  void close() {
    {
      const auto lock = turn();
      stop_ = true;
      work_.notify_one();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  static constexpr int kPolls = Peers::kSpins;  // in vain, before a thread sleeps between them
  static constexpr std::chrono::milliseconds kSoon{5};
  static constexpr double kBrief = 20e-6;  // s for which `receive_now` waits

  // Takes the lock. A thread that moves messages lets waiting threads go first (see `rest`), which a mutex
  // alone would not. relaxed: the count is only a hint.
  std::unique_lock<std::mutex> turn() {
    asking_.fetch_add(1, std::memory_order_relaxed);
    std::unique_lock lock(mutex_);
    asking_.fetch_sub(1, std::memory_order_relaxed);
    return lock;
  }

  bool dead() { return stop_ || failed_ || progress_.peers().reported(); }

  // Calls `act`, and reports a failure that it throws.
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

  bool move() {
    bool moved = false;
    attempt([&] { moved = messages_.move(); });
    return moved;
  }

  // Throws if `peer` has ended, or for -1, if any rank has died or all have closed, and what they sent has
  // been taken.
  void look(int peer) {
    int left = 0, gone = -1;
    for (int r = 0; r < ranks_; ++r) {
      if (r == rank_ || (peer >= 0 && r != peer)) continue;
      if (!segment_.gone(r)) {
        ++left;
        continue;
      }
      if (!messages_.empty(r)) return;  // its last messages arrived after our last poll
      // relaxed: `gone` has loaded it with acquire
      const bool closed = segment_.record(r).pid.load(std::memory_order_relaxed) < 0;
      if (!closed || gone < 0) gone = r;
      if (!closed) left = -ranks_;  // a rank that died, and did not close, may have been the sender
    }
    if (left <= 0 && gone >= 0) {
      if (auto f = progress_.peers().reported()) throw *f;  // it ended because of what it reported
      throw Failed{Failure::lost, gone};
    }
  }

  // Rests without the lock after `idle` polls in vain: spins, or yields if ranks share cores, then sleeps.
  // At 0 it only lets waiting threads take the lock.
  void rest(std::unique_lock<std::mutex>& lock, int idle) {
    // relaxed: only a hint
    if (idle == 0 && asking_.load(std::memory_order_relaxed) == 0) return;
    lock.unlock();
    if (idle == 0) {
      while (asking_.load(std::memory_order_relaxed) > 0) sched_yield();
    } else if (idle < kPolls) {
      progress_.peers().crowded() ? void(sched_yield()) : pause();
    } else {
      timespec nap{0, idle < kPolls + 32 ? 20'000 : idle < kPolls + 512 ? 100'000 : 500'000};
      nanosleep(&nap, nullptr);
    }
    lock.lock();
  }

  // Has the thread move messages: at once if `now`, else within kSoon. Waking it takes some 25 us of a core
  // that it shares with the caller, and what fits into a slab needs no receiver meanwhile.
  void wake(bool now = true) {
    if (!messages_.any() || stop_) return;
    ensure(thread_, [this] { loop(); });
    if (now || asleep_) work_.notify_one();
  }

  // Whether there is nothing for the thread to do.
  bool done() { return !messages_.any() || waiters_ || dead(); }

  void loop() {
    prctl(PR_SET_TIMERSLACK, 1000UL);  // ns by which the kernel may stretch our naps
    std::unique_lock lock(mutex_);
    for (int idle = kPolls; !stop_;) {
      if (done()) {
        if (work_.wait_for(lock, kSoon) == std::cv_status::timeout) {
          asleep_ = true;
          work_.wait(lock, [this] { return stop_ || !done(); });  // checks first: `close` may be past
          asleep_ = false;
        }
        idle = kPolls;
      } else {
        idle = move() ? 0 : std::max(idle + 1, kPolls);
        rest(lock, idle);
      }
    }
  }

  Progress& progress_;
  Segment& segment_;
  int rank_, ranks_;
  Matching messages_;

  std::mutex mutex_;
  std::atomic<int> asking_{0};  // threads that wait in `turn`
  std::condition_variable work_;
  std::thread thread_;
  bool stop_ = false, failed_ = false;
  bool asleep_ = false;  // whether the thread waits until it is woken
  int waiters_ = 0;
  std::atomic<std::uint64_t> tickets_{0};
};

}  // namespace ringdp
