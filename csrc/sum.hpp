// The sum of several arrays in a given order, by the formula of kernels/fold.py. Unlike the folds of
// collectives, which are in combine.hpp, it may round to another dtype.
#pragma once

#include <cstddef>
#include <vector>

#include "scale.hpp"

namespace ringdp {

constexpr std::size_t kSumBlock = 1024;  // elements, whose sums stay in the nearest cache

// out[i] = round(wide(in[0][i]) + wide(in[1][i]) + ...) for at most kSumBlock elements from `first` on. `out`
// may be among the inputs.
template <class S, class T>
RINGDP_CLONES void sum_block(void* out, const void* const* in, std::size_t n, std::size_t first,
                             std::size_t count) {
  using W = std::conditional_t<std::is_integral_v<S>, S, Widest<S, T>>;
  W sums[kSumBlock];
  const auto part = [&](std::size_t r) { return static_cast<const S*>(in[r]) + first; };
  auto* const o = static_cast<T*>(out) + first;
  const S* x = part(0);
  for (std::size_t i = 0; i < count; ++i) sums[i] = W(x[i]);
  for (std::size_t r = 1; r < n; ++r) {
    x = part(r);
    for (std::size_t i = 0; i < count; ++i) sums[i] = apply<Op::sum, W>(sums[i], W(x[i]));
  }
  for (std::size_t i = 0; i < count; ++i) o[i] = T(Wide<T>::narrow(sums[i]));
}

using Sum = void (*)(void* out, const void* const* in, std::size_t n, std::size_t first, std::size_t count);

// As `scale_of`, and also from an integer dtype to itself.
inline Sum sum_of(int source, int target) {
  static constexpr Sum floats[4][4] = {
      {sum_block<float, float>, sum_block<float, double>, sum_block<float, float16>, sum_block<float, bfloat16>},
      {sum_block<double, float>, sum_block<double, double>, nullptr, nullptr},
      {sum_block<float16, float>, sum_block<float16, double>, sum_block<float16, float16>,
       sum_block<float16, bfloat16>},
      {sum_block<bfloat16, float>, sum_block<bfloat16, double>, sum_block<bfloat16, float16>,
       sum_block<bfloat16, bfloat16>},
  };
  if (source < 4 && target < 4) return floats[source][target];
  if (source != target) return nullptr;
#define RINGDP_SUM(name, T) \
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) { \
    if (source == 0) return sum_block<T, T>; \
  } \
  --source;
  RINGDP_EACH_DTYPE(RINGDP_SUM)
#undef RINGDP_SUM
  return nullptr;
}

inline void sum_all(Sum act, void* out, const std::vector<const void*>& in, std::size_t elems,
                    std::size_t threads) {
  share_parts(elems, threads, [&](std::size_t first, std::size_t count) {
    const std::size_t end = first + count;
    for (std::size_t at = first; at < end; at += kSumBlock)
      act(out, in.data(), in.size(), at, std::min(kSumBlock, end - at));
  });
}

}  // namespace ringdp
