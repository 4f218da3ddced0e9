// Divides work among torch's own threads: threads of ours would compete with those, which spin for a while
// after torch's work.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <vector>

#include "denormals.hpp"

namespace ringdp {

// The OpenMP library that torch is linked to. Empty if there is none, and in a forked child, where it would
// wait for threads that are not there.
struct OpenMP {
  // GOMP_parallel: calls `act` in so many threads, of which this one is the first.
  void (*parallel)(void (*act)(void*), void* data, unsigned threads, unsigned flags);
  int (*thread)();  // omp_get_thread_num
};
inline OpenMP openmp{};

constexpr std::size_t kPart = 1 << 15;  // elements of a part; as in torch, fewer are not worth a thread

// How many threads are worth waking for so many elements.
inline std::size_t worth(std::size_t elems, std::size_t threads) { return std::min(threads, 1 + elems / kPart); }

// Calls act(i) for each i < `count`, on at most so many threads. Each has a range of its own, the same in each
// call, since what it touched last may still be in its caches, and then helps with the others'. `act` must not
// throw.
template <class Act>
void share(std::size_t count, std::size_t threads, const Act& act) {
  threads = openmp.parallel ? std::max<std::size_t>(1, std::min(threads, count)) : 1;
  std::vector<std::atomic<std::size_t>> taken(threads);  // of each range
  auto take = [&](std::size_t own) {
    const Denormals kept;
    for (std::size_t k = 0; k < threads; ++k) {
      const std::size_t range = (own + k) % threads;
      const std::size_t first = count * range / threads, last = count * (range + 1) / threads;
      // relaxed: it only hands out numbers; the end of the parallel call makes the work visible
      for (std::size_t i; (i = first + taken[range].fetch_add(1, std::memory_order_relaxed)) < last;) act(i);
    }
  };
  if (threads == 1) return take(0);
  openmp.parallel([](void* data) { (*static_cast<decltype(take)*>(data))(openmp.thread()); }, &take,
                  unsigned(threads), 0);
}

// Calls act(first, count) for the parts of so many elements.
template <class Act>
void share_parts(std::size_t elems, std::size_t threads, const Act& act) {
  share((elems + kPart - 1) / kPart, threads, [&](std::size_t part) {
    act(part * kPart, std::min(kPart, elems - part * kPart));
  });
}

}  // namespace ringdp
