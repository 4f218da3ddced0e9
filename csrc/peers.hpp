// How a rank waits for the others: not for ever, not at the cost of their cores, and knowing why.
#pragma once

#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <thread>

#include "segment.hpp"
#include "tape.hpp"

namespace ringdp {

enum class Failure : std::uint32_t { none, lost, timeout, mismatch, stopped, aborted, damaged };

// Thrown through a collective; becomes a Python error at the edge.
struct Failed {
  Failure failure;
  int rank = -1;              // the rank at fault, or that gave up first
  Stamp expected{}, found{};  // of a message that is none of ours; else zeros
  int reporter = -1;          // the rank that found it; -1 is this one
  std::string why{};          // in the words of what this rank lacks, as memory
};

// In the header, failures are one word: kind << 32 | reporter + 1 << 16 | rank + 1.
inline std::uint64_t packed(const Failed& f, int reporter) {
  return std::uint64_t(f.failure) << 32 | std::uint64_t(reporter + 1) << 16 | (f.rank + 1);
}
inline Failed unpacked(std::uint64_t f) {
  return {Failure(f >> 32), int(f & 0xffff) - 1, {}, {}, int(f >> 16 & 0xffff) - 1};
}

// Whether the rank that is waited for says so when it has come on.
enum class Other {
  silent,  // it must be looked at again and again
  rings,   // see bell.hpp
  near,    // rings, and is in the same collective by now: soon
};

// Thrown through a collective whose time slice is over: it goes on where it was, when asked to.
struct Later {};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// This thread does little at a time, but at once: its naps are not stretched, and when it wakes up it
// gets the core from one that computes, which has a longer slice (Linux 6.12; before, a hint without
// effect).
inline void be_prompt() {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // ns
  struct {
    std::uint32_t size, policy;
    std::uint64_t flags;
    std::int32_t nice;
    std::uint32_t priority;
    std::uint64_t slice, deadline, period;  // ns
  } attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  attributes.slice = 100'000;  // the least there is
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

// A thread beside the callers. The system may have none left: then who waits does its work.
template <class Loop>
void ensure(std::thread& thread, Loop loop) {
  if (thread.joinable()) return;
  try {
    thread = std::thread(loop);
  } catch (const std::exception&) {  // std::system_error, or no memory for what it needs
  }
}

class Peers {
 public:
  // Who waits spins so often, yields so often, and looks around every so often.
  static constexpr int kSpins = 2000, kYields = 200;
  static constexpr std::chrono::milliseconds kLook{10};

  Peers(Segment& segment, int rank, const std::atomic<bool>& stop)
      : segment_(segment), record_(segment.record(rank)), rank_(rank), stop_(stop) {}

  // Bytes of collectives, which one thread at a time runs: to add to them needs no locked access.
  std::uint64_t sent() const { return sent_.load(std::memory_order_relaxed); }
  void count_sent(std::uint64_t bytes) { sent_.store(sent() + bytes, std::memory_order_relaxed); }

  Tape tape;
  std::atomic<int> waiting{0};  // threads of this rank that do nothing until the background is done

  // How to go on from now on: until when, and until when to wait for others; and whether somebody else
  // wants this core.
  void slice(Clock::time_point end, Clock::time_point patience, bool background) {
    end_ = end;
    patience_ = std::min(end, patience);
    background_ = background;
    dashes_ = false;
  }
  // Or: only as long as it spins or, where that is of no use, yields for a moment.
  void dash() {
    constexpr auto never = Clock::time_point::max();
    slice(never, crowded_ ? Clock::now() + kDash : never, false);
    dashes_ = true;
  }
  bool crowded() const { return crowded_; }

  // After a part of a long collective, whose place in it is known: throws Later at the slice's end,
  // though the others keep up.
  void breathe() {
    if (Clock::now() >= end_) throw Later{};
  }

  // Whether this thread may leave work to another one without giving its core away.
  bool spare_core() const {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return true;
    const long cores = CPU_COUNT(&allowed);
    return cores > 1 && (cores < cores_ || cores_ >= 2 * segment_.ranks());
  }

  // Wake those who sleep until this rank has done what it just did.
  void ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // see bell.hpp
    for (int r = 0; r < segment_.ranks(); ++r)
      if (r != rank_) segment_.board(r).bell.ring();
  }

  void round(int round) { record_.round.store(round, std::memory_order_relaxed); }

  // What another rank has given up for.
  std::optional<Failed> reported() {
    // acquire: pairs with Progress::announce
    const auto f = segment_.header().failed.load(std::memory_order_acquire);
    if (f == 0) return std::nullopt;
    Failed failed = unpacked(f);
    if (failed.reporter >= 0 && failed.reporter < segment_.ranks()) {
      const Finding& finding = segment_.record(failed.reporter).finding;
      failed.expected = finding.expected;
      failed.found = finding.found;
    }
    return failed;
  }

  // Spins a little, then yields, then sleeps, so that more ranks than cores make progress; looks
  // around every few milliseconds for a reason to give up. Throws Failed or Later.
  // In the background it spins only for who is near, and sleeps at once while the rank computes:
  // whoever yields to a thread that computes gets its core back only at the end of a time slice,
  // milliseconds later, where one that wakes up gets it at once (8 MB over a link of 40 ms: 5 ms left
  // to wait for after computing for 120 ms, where it was 55).
  template <class Ready>
  void await(int peer, Ready ready, Other other = Other::silent) {
    if (!tape.active) return spin(peer, ready, other);
    if (ready()) return;
    const Waited counted(tape);
    spin(peer, ready, other);
  }

  // Sleeps until a moment, a slice at a time; in the foreground, where naps are stretched, not to its
  // very end.
  void await_time(std::uint64_t moment) {
    const std::uint64_t awake = background_ ? 0 : kStretch;
    const Waited counted(tape);
    for (auto at = now(); at < moment; at = now()) {
      if (moment - at <= awake) {
        sched_yield();
        continue;
      }
      timespec nap{0, long(std::min<std::uint64_t>(moment - at - awake, 1'000'000))};
      nanosleep(&nap, nullptr);
      if (stop_.load(std::memory_order_relaxed)) throw Failed{Failure::stopped, rank_};
      if (Clock::now() >= patience_) throw Later{};
    }
  }

 private:
  // 4 ranks on 2 cores take some 7 us for 1 KiB, 9 where the GIL is given away first.
  static constexpr std::chrono::microseconds kDash{100};
  static constexpr std::uint64_t kStretch = 100'000;  // ns by which a nap may end late

  // Its lifetime, however it ends.
  struct Waited {
    explicit Waited(Tape& tape) : tape(tape), since(now()) {}
    ~Waited() { tape.waited(now() - since); }
    Tape& tape;
    std::uint64_t since;
  };

  template <class Ready>
  void spin(int peer, Ready ready, Other other) {
    const int spins = !crowded_ && (!background_ || other == Other::near) ? kSpins : 0;
    for (int i = 0; i < spins; ++i) {
      if (ready()) {
        if (record_.peer.load(std::memory_order_relaxed) >= 0)  // it was waited for in a slice before
          record_.peer.store(-1, std::memory_order_relaxed);
        return;
      }
      pause();
    }
    if (dashes_) {
      if (crowded_ && yield(ready, patience_)) return;
      throw Later{};
    }
    record_.peer.store(peer, std::memory_order_relaxed);
    while (!wait_on(peer, ready, other)) {
    }
    record_.peer.store(-1, std::memory_order_relaxed);
  }

  // Whether it is ready by then, or soon after. Apart from `spin`, whose spinning is the fast path.
  template <class Ready>
  [[gnu::noinline]] bool yield(Ready ready, Clock::time_point end) {
    // relaxed: only a hint
    const auto yields = [&] { return !background_ || waiting.load(std::memory_order_relaxed) > 0; };
    for (int i = 0; i < kYields && yields() && Clock::now() < end; ++i) {
      if (ready()) return true;
      sched_yield();
    }
    return false;
  }

  template <class Ready>
  bool wait_on(int peer, Ready ready, Other other) {
    // Where others compute, each yield and each nap may take as long as a time slice of theirs.
    const auto look = std::min(patience_, Clock::now() + kLook);
    if (yield(ready, look)) return true;
    if (other != Other::silent) {
      segment_.board(rank_).bell.sleep(look - Clock::now(), ready);
      if (ready()) return true;
    } else {
      for (int i = 0; i < 64 && (i == 0 || Clock::now() < look); ++i) {
        if (ready()) return true;
        timespec nap{0, i < 32 ? 20'000 : 100'000};
        nanosleep(&nap, nullptr);
      }
    }
    if (stop_.load(std::memory_order_relaxed)) throw Failed{Failure::stopped, rank_};
    if (auto f = reported()) {
      if (ready()) return true;  // it may have failed after it had done its part of this
      throw *f;
    }
    if (segment_.gone(peer) && !ready()) {  // its last messages came after our last look
      if (auto f = reported()) throw *f;    // it ended because of what it reported
      throw Failed{Failure::lost, peer};
    }
    if (!ready() && Clock::now() >= patience_) throw Later{};
    return false;
  }

  Segment& segment_;
  RankRecord& record_;
  int rank_;
  const std::atomic<bool>& stop_;
  const long cores_ = sysconf(_SC_NPROCESSORS_ONLN);
  // More ranks than cores: whoever spins keeps the core from the rank that it waits for.
  const bool crowded_ = segment_.ranks() > cores_;
  std::atomic<std::uint64_t> sent_{0};
  Clock::time_point end_ = Clock::time_point::max(), patience_ = end_;
  bool background_ = false, dashes_ = false;
};

}  // namespace ringdp
