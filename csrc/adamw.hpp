// AdamW over a flat shard, by the formula of kernels/adamw.py and with its bits. Every operation is one
// IEEE float32 operation, and CMakeLists.txt forbids the compiler to fuse any, so neither the width of
// vector registers nor an element's position affects the result.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "combine.hpp"
#include "threads.hpp"

namespace ringdp {

using Factors = std::array<float, 7>;  // of kernels/adamw.py

// The buffers have `elems` elements and do not overlap. `copy` may be null.
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

template <class T>
void adamw(float* p, const float* g, float* m, float* v, T* copy, std::size_t elems, const Factors& k,
           std::size_t threads) {
  constexpr std::size_t kBlock = 4096;  // elements, so that the copy reads from the nearest cache
  share(elems, threads, [=](std::size_t first, std::size_t count) {
    const std::size_t end = first + count;
    for (std::size_t at = first; at < end; at += kBlock)
      adamw_block(p + at, g + at, m + at, v + at, copy ? copy + at : nullptr, std::min(kBlock, end - at), k);
  });
}

}  // namespace ringdp
