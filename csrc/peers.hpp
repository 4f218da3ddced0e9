// How a rank waits for its peers: with a limit, without taking their cores, and noticing failures.
//
// Note [yields]
//   A rank on a core of its own does not yield, but pauses. And if a yield or a pause has taken long, the
//   rank sleeps at once for a while: what computes on its core, such as another process, takes a whole turn,
//   milliseconds, while the peer may be ready in microseconds. A thread that sleeps is woken up sooner.
//   Of two ranks, each with a computing process on its core, an all_reduce of 64 KiB to which one came 60 us
//   late took 3.4 ms with yields and takes 6 us; of four ranks on two such cores, one of 64 KiB took 3.5 ms
//   and takes 0.13. But where nothing else computes, four ranks take 12 us with yields and 50 without. So the
//   while is short unless turns are lost again and again: after a fixed one of 100 ms, other processes that
//   came and went tripled the median.
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
#include <utility>

#include "segment.hpp"
#include "tape.hpp"

namespace ringdp {

enum class Failure : std::uint32_t { none, lost, timeout, mismatch, stopped, aborted, damaged };

// Thrown through a collective; becomes a Python error at the boundary.
struct Failed {
  Failure failure;
  int rank = -1;              // the rank at fault, or that gave up first
  Stamp expected{}, found{};  // of a mismatched message; else zeros
  int reporter = -1;          // the rank that found it; -1: this one
  std::string why{};          // the exception's text, if this rank aborted
};

// A failure as one word, for the header: kind << 32 | reporter + 1 << 16 | rank + 1.
inline std::uint64_t packed(const Failed& f, int reporter) {
  return std::uint64_t(f.failure) << 32 | std::uint64_t(reporter + 1) << 16 | (f.rank + 1);
}
inline Failed unpacked(std::uint64_t f) {
  return {Failure(f >> 32), int(f & 0xffff) - 1, {}, {}, int(f >> 16 & 0xffff) - 1};
}

// How the awaited rank signals its progress.
enum class Other {
  silent,  // it does not: it must be polled
  rings,   // it rings our bell: see bell.hpp
  near,    // it rings, and is in the same collective already, so it will be soon
};

// Thrown through a collective whose time slice is over. Its next run resumes it.
struct SliceOver {};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Makes this thread prompt: its naps are not stretched, and as its scheduling slice is short, it preempts
// a computing thread when it wakes up (from Linux 6.12 on; before, the slice is a hint without effect).
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
  attributes.slice = 100'000;  // the minimum
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

// Starts `thread`, if it does not run. If the system has no thread left, waiting callers do its work.
template <class Loop>
void ensure(std::thread& thread, Loop loop) {
  if (thread.joinable()) return;
  try {
    thread = std::thread(loop);
  } catch (const std::exception&) {  // std::system_error, or no memory
  }
}

class Peers {
 public:
  // A wait spins so often, then lingers so often, and looks for failures every kLook.
  static constexpr int kSpins = 2000, kLingers = 200;
  static constexpr std::chrono::milliseconds kLook{10};

  Peers(Segment& segment, int rank, const std::atomic<bool>& stop)
      : segment_(segment), record_(segment.record(rank)), rank_(rank), stop_(stop) {}

  // Bytes that collectives have sent. One thread at a time runs them, so adding needs no read-modify-write.
  // relaxed: the count orders nothing.
  std::uint64_t sent() const { return sent_.load(std::memory_order_relaxed); }
  void count_sent(std::uint64_t bytes) { sent_.store(sent() + bytes, std::memory_order_relaxed); }

  Tape tape;
  std::atomic<int> waiting{0};  // threads of this rank that are idle until the background thread is done

  // Sets the next run's limits: when it ends, when its waits for peers end, and whether other threads of
  // this rank want the core (`background`).
  void slice(Clock::time_point end, Clock::time_point patience, bool background) {
    end_ = end;
    patience_ = std::min(end, patience);
    background_ = background;
    brief_ = false;
  }
  // Or: the next run may only spin or, if ranks share cores, yield for kBrief. It never sleeps.
  void slice_brief() {
    constexpr auto never = Clock::time_point::max();
    slice(never, crowded() ? Clock::now() + kBrief : never, false);
    brief_ = true;
  }
  // Whether spinning may keep the core from the rank that is waited for.
  bool crowded() const { return segment_.ranks() > segment_.cores(); }

  // Throws SliceOver once the slice has ended, although the peers keep up. Called between the steps of a
  // long collective, where it can be resumed.
  void check_slice() {
    if (Clock::now() >= end_) throw SliceOver{};
  }

  // Returns whether another thread of this rank can work without taking this thread's core.
  bool spare_core() const {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return true;
    const int cores = CPU_COUNT(&allowed), all = segment_.cores();
    return cores > 1 && (cores < all || all >= 2 * segment_.ranks());
  }

  // Wakes the ranks that sleep until this rank has done what it just did.
  void ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // see bell.hpp
    for (int r = 0; r < segment_.ranks(); ++r)
      if (r != rank_) segment_.board(r).bell.ring();
  }

  void round(int round) { record_.round.store(round, std::memory_order_relaxed); }

  // Returns the failure that any rank has reported, if there is one.
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

  // Waits for `peer` until `ready()`. It spins a little, then lingers, then sleeps, so that more ranks than
  // cores make progress, and looks for failures every kLook. Throws Failed or SliceOver.
  // In the background it spins only for a near peer, and sleeps at once while the rank computes: a thread
  // that yields to a computing thread gets its core back only after that one's time slice, milliseconds
  // later, but one that wakes up gets it at once. (8 MB over a link of 40 ms, after computing for 120 ms:
  // 5 ms were left to wait for, instead of 55.)
  template <class Ready>
  void await(int peer, Ready ready, Other other = Other::silent) {
    if (!tape.active) return spin(peer, ready, other);
    if (ready()) return;
    const Waited counted(tape);
    spin(peer, ready, other);
  }

  // Sleeps until `moment`, at most 1 ms at a time. In the foreground, where the kernel stretches naps, it
  // yields for the last kStretch.
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
      if (Clock::now() >= patience_) throw SliceOver{};
    }
  }

 private:
  // 4 ranks on 2 cores take about 7 us for 1 KiB, and 9 if the GIL is released first.
  static constexpr std::chrono::microseconds kBrief{100};
  static constexpr int kPauses = 16;  // take about as long as a yield, 0.3 us
  // If a look takes longer, something that computes had the core. Then no wait lingers for kTurn, or twice as
  // long as the last time, up to kMost, if that ended less than kMost ago.
  static constexpr std::chrono::milliseconds kTurn{1}, kMost{100};
  static constexpr std::uint64_t kStretch = 100'000;  // ns by which a nap may end late

  // Adds its lifetime to the tape as waiting time.
  struct Waited {
    explicit Waited(Tape& tape) : tape(tape), since(now()) {}
    ~Waited() { tape.waited(now() - since); }
    Tape& tape;
    std::uint64_t since;
  };

  template <class Ready>
  void spin(int peer, Ready ready, Other other) {
    const int spins = !crowded() && (!background_ || other == Other::near) ? kSpins : 0;
    for (int i = 0; i < spins; ++i) {
      if (ready()) {
        if (record_.peer.load(std::memory_order_relaxed) >= 0)  // from a wait in an earlier slice
          record_.peer.store(-1, std::memory_order_relaxed);
        return;
      }
      pause();
    }
    if (brief_) {
      if (crowded() && linger(ready, patience_)) return;
      throw SliceOver{};
    }
    record_.peer.store(peer, std::memory_order_relaxed);
    while (!wait_on(peer, ready, other)) {
    }
    record_.peer.store(-1, std::memory_order_relaxed);
  }

  // Looks until ready or `end`. Returns whether it is ready. Not inlined in `spin`, which is the fast path.
  // See Note [yields].
  template <class Ready>
  [[gnu::noinline]] bool linger(Ready ready, Clock::time_point end) {
    // relaxed: only a hint
    const auto lingers = [&] { return !background_ || waiting.load(std::memory_order_relaxed) > 0; };
    auto at = Clock::now();
    for (int i = 0; i < kLingers && lingers() && at < end && at >= lingers_from_; ++i) {
      if (ready()) return true;
      if (crowded())
        sched_yield();
      else
        for (int p = 0; p < kPauses; ++p) pause();
      const auto before = std::exchange(at, Clock::now());
      if (at - before <= kTurn) continue;
      without_ = at - lingers_from_ < kMost ? std::min<Clock::duration>(2 * without_, kMost) : kTurn;
      lingers_from_ = at + without_;
    }
    return ready();
  }

  // Waits for about kLook, then looks for failures. Returns whether it is ready.
  template <class Ready>
  bool wait_on(int peer, Ready ready, Other other) {
    // If other threads compute, a yield or a nap may take as long as their time slice.
    const auto look = std::min(patience_, Clock::now() + kLook);
    if (linger(ready, look)) return true;
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
      if (ready()) return true;  // the peer may have failed after it had done its part of this
      throw *f;
    }
    if (segment_.gone(peer) && !ready()) {  // ready again: its last messages may have just arrived
      if (auto f = reported()) throw *f;    // it ended because of what it reported
      throw Failed{Failure::lost, peer};
    }
    if (!ready() && Clock::now() >= patience_) throw SliceOver{};
    return false;
  }

  Segment& segment_;
  RankRecord& record_;
  int rank_;
  const std::atomic<bool>& stop_;
  std::atomic<std::uint64_t> sent_{0};
  Clock::time_point end_ = Clock::time_point::max(), patience_ = end_;
  Clock::time_point lingers_from_{};  // when waits linger again; see Note [yields]
  Clock::duration without_ = kTurn;   // how long they did not before that
  bool background_ = false, brief_ = false;
};

}  // namespace ringdp
