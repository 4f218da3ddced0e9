// Work that several threads share.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace ringdp {

// act(i) for each i below `count`, by so many threads at most: each takes the next. It must not throw.
template <class Act>
void share(std::size_t count, std::size_t threads, const Act& act) {
  std::atomic<std::size_t> next{0};
  const auto take = [&] {
    // relaxed: it only hands out numbers; what was done to their parts, `join` makes visible
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
  } catch (const std::system_error&) {  // no more of them: those there are do it
  }
  take();
}

}  // namespace ringdp
