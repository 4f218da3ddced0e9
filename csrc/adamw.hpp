// AdamW over a flat shard, by the formula of kernels/adamw.py and with its bits: every operation is one
// IEEE float32 operation, and CMakeLists.txt has the compiler fuse none, so neither the width of vector
// registers nor an element's place shows.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

#include "combine.hpp"

namespace ringdp {

using Factors = std::array<float, 7>;  // of kernels/adamw.py

// Buffers of `elems` that do not overlap; `copy` may be null.
template <class T>
RINGDP_CLONES void adamw_block(float* p, const float* g, float* m, float* v, T* copy, std::size_t elems,
                               const Factors& factors) {
  const auto [decay, fresh1, beta2, fresh2, size, correction, eps] = factors;
#pragma GCC ivdep
  for (std::size_t i = 0; i < elems; ++i) {
    m[i] = m[i] + (g[i] - m[i]) * fresh1;
    v[i] = v[i] * beta2 + (g[i] * fresh2) * g[i];
    p[i] = p[i] * decay + (m[i] * size) / (std::sqrt(v[i]) / correction + eps);
  }
  if (copy)
    for (std::size_t i = 0; i < elems; ++i) copy[i] = Wide<T>::narrow(p[i]);
}

// act(first, count) for parts of [0, elems), on so many threads at most: each is worth one.
template <class Act>
void in_parts(std::size_t elems, int threads, Act act) {
  constexpr std::size_t kWorth = 1 << 16, kLine = 16;  // elements: of a thread, of a cache line
  const std::size_t parts = std::clamp<std::size_t>(elems / kWorth, 1, std::max(1, threads));
  const std::size_t each = (elems / parts + kLine) / kLine * kLine;
  struct Others : std::vector<std::thread> {
    ~Others() {
      for (auto& thread : *this) thread.join();
    }
  } others;
  others.reserve(parts);
  for (std::size_t first = each; first < elems; first += each) {
    const std::size_t count = std::min(each, elems - first);
    try {
      others.emplace_back(act, first, count);
    } catch (const std::system_error&) {  // no more threads: this one does it
      act(first, count);
    }
  }
  act(0, std::min(each, elems));
}

template <class T>
void adamw(float* p, const float* g, float* m, float* v, T* copy, std::size_t elems, const Factors& k,
           int threads) {
  constexpr std::size_t kBlock = 4096;  // elements: the copy is of what is still in the nearest cache
  in_parts(elems, threads, [=](std::size_t at, std::size_t count) {
    for (const std::size_t end = at + count; at < end; at += kBlock)
      adamw_block(p + at, g + at, m + at, v + at, copy ? copy + at : nullptr, std::min(kBlock, end - at), k);
  });
}

}  // namespace ringdp
