// Wakes a rank that sleeps until a peer has done something. Polling would take the core from the rank's
// own computation: with naps of 20 to 100 us, a step of torch's DDP had several times the context switches
// that it has with a hook that reduces nothing.
//
//   sleeper    asleep = 1 | fence | done? if not: sleep while asleep == 1
//   peer       does it    | fence | asleep? if so: asleep = 0, wake
//
// No ring is lost. The fences are totally ordered: if the sleeper's is first, the peer sees it asleep, else
// the sleeper sees that it is done. And the kernel rechecks `asleep` before it puts the sleeper to sleep.
// All accesses to `asleep` are relaxed, as the fences order them and data has flags of its own.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ringdp {

// In shared memory: one sleeper at a time, any number of others.
class Bell {
 public:
  // Returns when the bell rings, after `most`, or at once if `done()`.
  template <class Done>
  void sleep(std::chrono::nanoseconds most, Done done) {
    asleep_.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!done() && most.count() > 0) {
      const timespec limit{time_t(most.count() / 1'000'000'000), long(most.count() % 1'000'000'000)};
      syscall(SYS_futex, &asleep_, FUTEX_WAIT, 1, &limit, nullptr, 0);
    }
    asleep_.store(0, std::memory_order_relaxed);
  }

  // Wakes the sleeper, if there is one. The caller executes a sequentially consistent fence first.
  void ring() {
    if (asleep_.load(std::memory_order_relaxed) != 0 &&
        asleep_.exchange(0, std::memory_order_relaxed) != 0)
      syscall(SYS_futex, &asleep_, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }

 private:
  std::atomic<std::uint32_t> asleep_;
};
static_assert(sizeof(Bell) == 4 && std::atomic<std::uint32_t>::is_always_lock_free);  // a futex

}  // namespace ringdp
