// Messages of a rank: who sends or receives one waits for it, or a thread sees to it.
//
// Whoever waits moves everything of this rank along; for what nobody waits for, a thread does.
#pragma once

#include "matching.hpp"
#include "progress.hpp"

namespace ringdp {

class Mailbox {
 public:
  // `fd`: as that of `Matching`.
  Mailbox(Progress& progress, int fd)
      : progress_(progress), segment_(progress.segment()), rank_(progress.rank()),
        ranks_(progress.ranks()), messages_(segment_, fd, rank_, progress.messages_sent) {}
  ~Mailbox() { close(); }
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Of a message that is to begin: what it uses is to be kept from before that, until it has `ended`.
  std::uint64_t ticket() { return ++tickets_; }

  // As those of `Matching`. In the background somebody sees to it at once; else whoever waits for it
  // does.
  void send(std::uint64_t ticket, const std::byte* data, std::uint64_t bytes, std::uint64_t kind, int to,
            bool background) {
    const auto lock = turn();
    messages_.reserve(to);
    messages_.send(ticket, data, bytes, kind, to);
    if (!dead()) messages_.push(to);
    if (background) wake();
  }

  void receive(std::uint64_t ticket, std::byte* data, std::uint64_t bytes, std::uint64_t kind, int from,
               std::int64_t* source, bool background) {
    const auto lock = turn();
    messages_.reserve(from);
    attempt([&] { messages_.receive(ticket, data, bytes, kind, from, source); });
    if (background) wake();
  }

  // Whether that message has been sent, or has come; after a failure none is any more.
  bool wait(std::uint64_t ticket, double seconds) {
    auto lock = turn();
    const auto end = after(seconds);
    ++waiters_;
    for (int idle = 0; messages_.find(ticket) && !dead();) {
      idle = move() ? 0 : idle + 1;
      const auto request = messages_.find(ticket);
      if (!request) break;
      const auto at = Clock::now();
      // By the clock, over all waits for it: on a busy core few rests fit into one, and a caller that
      // only asks whether it has come does not rest at all.
      auto& looked = request->looked;
      if (looked == Clock::time_point{}) looked = at;
      if (at - looked >= Peers::kLook) {
        looked = at;
        attempt([&] { look(request->peer); });
        continue;
      }
      if (at >= end) break;
      rest(lock, idle);
    }
    --waiters_;
    if (!waiters_ && messages_.any()) wake();  // for the case that the caller does not come back
    return !messages_.find(ticket);
  }

  // As that of `Matching`.
  std::vector<std::uint64_t> ended() {
    const auto lock = turn();
    return messages_.ended();
  }

  // In a forked child.
  void let_go() { messages_.let_go(); }

  void close() {
    {
      const auto lock = turn();
      stop_ = true;
      work_.notify_one();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  static constexpr int kSpins = Peers::kSpins, kYields = kSpins + Peers::kYields;

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

  bool move() {
    bool moved = false;
    attempt([&] { moved = messages_.move(); });
    return moved;
  }

  // Throws if no message can come from `peer`, or be taken there, any more. -1: anybody.
  void look(int peer) {
    int left = 0, gone = -1;
    for (int r = 0; r < ranks_; ++r) {
      if (r == rank_ || (peer >= 0 && r != peer)) continue;
      if (!segment_.gone(r)) {
        ++left;
        continue;
      }
      if (!messages_.empty(r)) return;  // its last messages, which came after our last look
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
    } else if (idle < kSpins && !progress_.peers().crowded()) {
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
    if (!messages_.any() || stop_) return;
    ensure(thread_, [this] { loop(); });
    work_.notify_one();
  }

  void loop() {
    prctl(PR_SET_TIMERSLACK, 1000UL);  // ns by which the kernel may stretch our naps
    std::unique_lock lock(mutex_);
    for (int idle = kYields; !stop_;) {
      if (!messages_.any() || waiters_ || dead()) {
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
  int rank_, ranks_;
  Matching messages_;

  std::mutex mutex_;
  std::atomic<int> asking_{0};  // threads that ask for a turn
  std::condition_variable work_;
  std::thread thread_;
  bool stop_ = false, failed_ = false;
  int waiters_ = 0;
  std::atomic<std::uint64_t> tickets_{0};
};

}  // namespace ringdp
