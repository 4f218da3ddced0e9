// The sum of several arrays in a given order, by the formula of kernels/fold.py. Unlike the folds of
// collectives, which are in combine.hpp, it may round to another dtype.
#pragma once

#include <cstddef>
#include <vector>

#include "scale.hpp"

namespace ringdp {

// Elements, whose sums stay in the nearest cache. With 1024, eight rows from memory take 1.4 times as long, as
// the processor begins to prefetch anew in each 4 KiB of a row.
constexpr std::size_t kSumBlock = 256;

template <class S, class T>
using SumType = std::conditional_t<std::is_integral_v<S>, S, Widest<S, T>>;

// sums = x, or x + y
template <class S, class W>
RINGDP_CLONES void sum_first(W* sums, const S* x, const S* y, std::size_t count) {
  if (!y)
    for (std::size_t i = 0; i < count; ++i) sums[i] = W(x[i]);
  else
    for (std::size_t i = 0; i < count; ++i) sums[i] = apply<Op::sum>(W(x[i]), W(y[i]));
}

// sums = (sums + x) + y: two at a time take two thirds of the loads and stores
template <class S, class W>
RINGDP_CLONES void sum_next(W* sums, const S* x, const S* y, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    sums[i] = apply<Op::sum>(apply<Op::sum>(sums[i], W(x[i])), W(y[i]));
}

// out = round(sums + x); `out` may be `x`
template <class S, class T>
RINGDP_CLONES void sum_last(T* out, const SumType<S, T>* sums, const S* x, std::size_t count) {
  using W = SumType<S, T>;
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) out[i] = T(Wide<T>::narrow(apply<Op::sum>(sums[i], W(x[i]))));
}

// out[i] = round(wide(in[0][i]) + wide(in[1][i]) + ...) for at most kSumBlock elements from `first` on. `out`
// may be among the inputs. The loops over elements are functions of their own: in one function, GCC 12
// joins two turns of the loop over inputs, and does not vectorize the result.
template <class S, class T>
void sum_block(void* out, const void* const* in, std::size_t n, std::size_t first, std::size_t count) {
  const auto part = [&](std::size_t r) { return static_cast<const S*>(in[r]) + first; };
  T* const o = static_cast<T*>(out) + first;
  SumType<S, T> sums[kSumBlock];
  if (n == 1) {
    std::fill_n(sums, count, SumType<S, T>(-0.0));  // which, added, changes nothing
    return sum_last<S, T>(o, sums, part(0), count);
  }
  sum_first(sums, part(0), n % 2 ? part(1) : nullptr, count);
  for (std::size_t r = 1 + n % 2; r + 1 < n; r += 2) sum_next(sums, part(r), part(r + 1), count);
  sum_last<S, T>(o, sums, part(n - 1), count);
}

using Sum = void (*)(void* out, const void* const* in, std::size_t n, std::size_t first, std::size_t count);

// Returns null if there is none: float dtypes are as in csrc/scale.hpp, an integer stays what it is.
inline Sum sum_of(int source, int target) {
  static constexpr Sum floats[4][4] = {RINGDP_FLOAT_PAIRS(sum_block)};
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
  share(elems, threads, [&](std::size_t first, std::size_t count) {
    const std::size_t end = first + count;
    for (std::size_t at = first; at < end; at += kSumBlock)
      act(out, in.data(), in.size(), at, std::min(kSumBlock, end - at));
  });
}

}  // namespace ringdp
