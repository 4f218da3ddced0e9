// The squared norm of many tensors, by the formula of kernels/norm.py. The order of additions depends only
// on their lengths, not on the width of vector registers or the number of threads.
#pragma once

#include <cstddef>
#include <numeric>
#include <vector>

#include "combine.hpp"
#include "threads.hpp"

namespace ringdp {

template <class T>
RINGDP_CLONES double squares(const T* x, std::size_t count) {
  constexpr std::size_t kLanes = 32;  // sums, enough to keep the adders busy
  double sums[kLanes] = {};
  const auto add = [&](std::size_t lane, T value) { sums[lane] += double(value) * double(value); };
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; ++lane) add(lane, x[i + lane]);
  for (std::size_t lane = 0; i < count; ++i, ++lane) add(lane, x[i]);
  for (std::size_t half = kLanes / 2; half; half /= 2)
    for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  return sums[0];
}

template <class T>
struct Part {
  const T* at;
  std::size_t elems;
};

template <class T>
double squared_norm(const std::vector<Part<T>>& tensors, std::size_t threads) {
  constexpr std::size_t kPart = 1 << 16, kWorth = 1 << 18;  // elements: of a part; worth another thread
  std::vector<Part<T>> parts;
  std::size_t all = 0;
  for (const auto [at, elems] : tensors) {
    for (std::size_t i = 0; i < elems; i += kPart) parts.push_back({at + i, std::min(kPart, elems - i)});
    all += elems;
  }
  std::vector<double> sums(parts.size());
  share(parts.size(), std::min(threads, 1 + all / kWorth),
        [&](std::size_t i) { sums[i] = squares(parts[i].at, parts[i].elems); });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace ringdp
