// Divides work among torch's own threads: threads of ours would compete with those, which spin for a while
// after torch's work.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "denormals.hpp"

namespace ringdp {

// GOMP_parallel of the OpenMP library that torch is linked to: calls `act` in so many threads, this one among
// them. Null if there is none, and in a forked child, where it would wait for threads that are not there.
using Parallel = void (*)(void (*act)(void*), void* data, unsigned threads, unsigned flags);
inline Parallel parallel = nullptr;

constexpr std::size_t kPart = 1 << 15;  // elements of a part; as in torch, fewer are not worth a thread

// How many threads are worth waking for so many elements.
inline std::size_t worth(std::size_t elems, std::size_t threads) { return std::min(threads, 1 + elems / kPart); }

// Calls act(i) for each i < `count`, on at most so many threads, each of which takes the next i. `act` must
// not throw.
template <class Act>
void share(std::size_t count, std::size_t threads, const Act& act) {
  std::atomic<std::size_t> next{0};
  auto take = [&] {
    const Denormals kept;
    // relaxed: it only hands out numbers; the end of the parallel call makes the work visible
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) act(i);
  };
  threads = std::min(threads, count);
  if (threads < 2 || !parallel) return take();
  parallel([](void* data) { (*static_cast<decltype(take)*>(data))(); }, &take, unsigned(threads), 0);
}

// Calls act(first, count) for the parts of so many elements.
template <class Act>
void share_parts(std::size_t elems, std::size_t threads, const Act& act) {
  share((elems + kPart - 1) / kPart, threads, [&](std::size_t part) {
    act(part * kPart, std::min(kPart, elems - part * kPart));
  });
}

}  // namespace ringdp
