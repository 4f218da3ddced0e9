// How a rank waits for the others: not for ever, not at the cost of their cores, and knowing why.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "segment.hpp"

namespace ringdp {

using Clock = std::chrono::steady_clock;

enum class Failure : std::uint32_t { none, lost, timeout, mismatch, stopped };

// Thrown through a collective; becomes a Python error at the edge.
struct Failed {
  Failure failure;
  int rank = -1;                // the rank at fault, or that gave up first
  Stamp expected{}, found{};    // of a mismatch
  bool reported = false;        // by another rank
};

// Thrown through a collective whose time slice is over: it goes on where it was, when asked to.
struct Later {};

// Where the collective is, for whoever asks why it takes so long.
struct Position {
  std::atomic<std::uint64_t> number{0};
  std::atomic<std::int32_t> round{-1}, peer{-1};  // peer: whom it waits for, or -1
};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// ns on the clock that all processes of a machine share
inline std::uint64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

class Peers {
 public:
  Peers(Segment& segment, int rank, const std::atomic<bool>& stop)
      : segment_(segment), rank_(rank), stop_(stop) {
    // More ranks than cores: whoever spins keeps the core from the rank that it waits for.
    crowded_ = segment.ranks() > long(sysconf(_SC_NPROCESSORS_ONLN));
  }

  Position position;
  std::atomic<std::uint64_t> sent_bytes{0};

  // How to wait from now on: until when, and whether somebody else wants this core.
  void slice(Clock::time_point end, bool background) {
    end_ = end;
    spins_ = background || crowded_ ? 0 : kSpins;
  }

  void begin(std::uint64_t number, std::uint64_t kind, std::uint64_t elements) {
    position.number.store(number, std::memory_order_relaxed);
    number_ = number, kind_ = kind, elements_ = elements;
    RankRecord& record = segment_.record(rank_);
    record.kind.store(kind, std::memory_order_relaxed);
    record.elements.store(elements, std::memory_order_relaxed);
    record.begun.store(number + 1, std::memory_order_release);  // release: what it is of first
  }

  // What another rank has given up for.
  std::optional<Failed> reported() {
    // acquire: pairs with Progress::announce
    const auto f = segment_.header().failed.load(std::memory_order_acquire);
    if (f == 0) return std::nullopt;
    return Failed{Failure(f >> 16), int(f & 0xffff) - 1, {}, {}, true};
  }

  // Spins a little, then yields, then sleeps, so that more ranks than cores make progress; looks
  // around every few milliseconds for a reason to give up. Throws Failed or Later.
  template <class Ready>
  void await(int peer, Ready ready) {
    for (int i = 0; i < spins_; ++i) {
      if (ready()) return;
      pause();
    }
    position.peer.store(peer, std::memory_order_relaxed);
    while (!wait_on(peer, ready)) {
    }
    position.peer.store(-1, std::memory_order_relaxed);
  }

  // Sleeps until a moment, a slice at a time.
  void await_time(std::uint64_t moment) {
    for (auto at = now(); at < moment; at = now()) {
      timespec nap{0, long(std::min<std::uint64_t>(moment - at, 1'000'000))};
      nanosleep(&nap, nullptr);
      if (stop_.load(std::memory_order_relaxed)) throw Failed{Failure::stopped, rank_};
      if (Clock::now() >= end_) throw Later{};
    }
  }

 private:
  static constexpr int kSpins = 2000, kYields = 200;

  template <class Ready>
  bool wait_on(int peer, Ready ready) {
    for (int i = 0; i < kYields; ++i) {
      if (ready()) return true;
      sched_yield();
    }
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
      timespec nap{0, i < 32 ? 20'000 : 100'000};
      nanosleep(&nap, nullptr);
    }
    if (stop_.load(std::memory_order_relaxed)) throw Failed{Failure::stopped, rank_};
    if (auto f = reported()) throw *f;
    if (segment_.gone(peer) && !ready()) {  // its last messages came after our last look
      if (auto f = reported()) throw *f;    // it ended because of what it reported
      throw Failed{Failure::lost, peer};
    }
    if (!ready() && elsewhere(peer) && !ready()) throw at_odds(peer);
    if (!ready() && Clock::now() >= end_) throw Later{};
    return false;
  }

  // Whether `peer` is in the same collective by number, but not by kind or length: what it sends may
  // then take a way on which we never look.
  bool elsewhere(int peer) {
    const RankRecord& theirs = segment_.record(peer);
    // acquire: what it is of was written before
    if (theirs.begun.load(std::memory_order_acquire) != number_ + 1) return false;
    return theirs.kind.load(std::memory_order_relaxed) != kind_ ||
           theirs.elements.load(std::memory_order_relaxed) != elements_;
  }
  Failed at_odds(int peer) {
    const RankRecord& theirs = segment_.record(peer);
    return {Failure::mismatch, peer, {number_, elements_, kind_, 0},
            {number_, theirs.elements.load(std::memory_order_relaxed),
             theirs.kind.load(std::memory_order_relaxed), 0}};
  }

  Segment& segment_;
  int rank_;
  const std::atomic<bool>& stop_;
  bool crowded_;
  Clock::time_point end_ = Clock::time_point::max();
  int spins_ = 0;
  std::uint64_t number_ = 0, kind_ = 0, elements_ = 0;
};

}  // namespace ringdp
