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

// `dtype` is an index of transport.base.DTYPES.
struct Array {
  int dtype;
  const void* at;
  std::size_t elems;
};

inline double squares(int dtype, const void* x, std::size_t first, std::size_t count) {
  const auto sum = [&](auto of) { return squares(static_cast<const decltype(of)*>(x) + first, count); };
  return dtype == 0 ? sum(float()) : dtype == 1 ? sum(double()) : dtype == 2 ? sum(float16()) : sum(bfloat16());
}

inline double squared_norm(const std::vector<Array>& tensors, std::size_t threads) {
  std::vector<std::size_t> lengths;
  for (const Array& x : tensors) lengths.push_back(x.elems);
  const auto parts = parts_of(lengths);
  std::vector<double> sums(parts.size());
  share(parts, threads, [&](std::size_t i) {
    const Array& x = tensors[parts[i].array];
    sums[i] = squares(x.dtype, x.at, parts[i].first, parts[i].elems);
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace ringdp
