// A rank that sleeps until another one has done something is woken, instead of looking again and again:
// each look takes the core of what the rank computes meanwhile.
//
//   sleeper    asleep = 1 | fence | is it done? if not: sleep, as long as asleep == 1
//   another    does it    | fence | asleep? then: asleep = 0, wake
//
// With naps of 20 to 100 us instead, torch's DDP changed threads several times as often in a step as
// with a hook that reduces nothing.
//
// One of the fences is the first. If the sleeper's, the other sees it asleep; else the sleeper sees that
// it is done. The kernel looks at `asleep` once more before it lets anybody sleep, so no ring is lost.
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
  // Returns once it has rung, or after `most`; or at once if it is `done`.
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

  // After a sequentially consistent fence.
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
