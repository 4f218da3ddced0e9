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

// A part of one of several arrays.
struct Part {
  std::size_t array, first, elems;
};

// Returns the parts of arrays of these lengths, one array after the other.
inline std::vector<Part> parts_of(const std::vector<std::size_t>& lengths) {
  std::vector<Part> parts;
  for (std::size_t array = 0; array < lengths.size(); ++array)
    for (std::size_t first = 0; first < lengths[array]; first += kPart)
      parts.push_back({array, first, std::min(kPart, lengths[array] - first)});
  return parts;
}

// Calls act(i) for each part i, on at most so many threads. Each has a range of its own, the same in each
// call, since what it touched last may still be in its caches, and then helps with the others'. `act` must not
// throw.
template <class Act>
void share(const std::vector<Part>& parts, std::size_t threads, const Act& act) {
  std::size_t elems = 0;
  for (const Part& part : parts) elems += part.elems;
  threads = openmp.parallel ? std::min({threads, parts.size(), 1 + elems / kPart}) : 1;
  if (threads <= 1) {
    const Denormals kept;
    for (std::size_t i = 0; i < parts.size(); ++i) act(i);
    return;
  }
  std::vector<std::atomic<std::size_t>> taken(threads);  // of each range
  auto take = [&] {
    const Denormals kept;
    const auto own = std::size_t(openmp.thread());
    for (std::size_t k = 0; k < threads; ++k) {
      const std::size_t range = (own + k) % threads;
      const std::size_t first = parts.size() * range / threads, last = parts.size() * (range + 1) / threads;
      // relaxed: it only hands out numbers; the end of the parallel call makes the work visible
      for (std::size_t i; (i = first + taken[range].fetch_add(1, std::memory_order_relaxed)) < last;) act(i);
    }
  };
  openmp.parallel([](void* data) { (*static_cast<decltype(take)*>(data))(); }, &take, unsigned(threads), 0);
}

// Calls act(first, count) for the parts of one array.
template <class Act>
void share(std::size_t elems, std::size_t threads, const Act& act) {
  const auto parts = parts_of({elems});
  share(parts, threads, [&](std::size_t i) { act(parts[i].first, parts[i].elems); });
}

}  // namespace ringdp
