// Divides independent work among threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace ringdp {

// Calls act(i) for each i < `count`, on at most so many threads, each of which takes the next i. `act` must
// not throw.
template <class Act>
void share(std::size_t count, std::size_t threads, const Act& act) {
  std::atomic<std::size_t> next{0};
  const auto take = [&] {
    // relaxed: it only hands out numbers; `join` makes the work visible
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) act(i);
  };
  struct Others : std::vector<std::thread> {
    ~Others() {
      for (auto& thread : *this) thread.join();
    }
  } others;
  threads = std::min(threads, count);
  others.reserve(threads);
  try {
    while (others.size() + 1 < threads) others.emplace_back(take);
  } catch (const std::system_error&) {  // no more threads: the existing ones do the work
  }
  take();
}

}  // namespace ringdp
