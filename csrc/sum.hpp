// The sum of several arrays in a given order, by the formula of kernels/fold.py: a fold of csrc/combine.hpp on
// several threads, which may also round to another dtype than that of the arrays.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include "combine.hpp"
#include "scale.hpp"

namespace ringdp {

// How to sum arrays of one dtype into another. Dtypes are indices of transport.base.DTYPES.
struct Sum {
  Dtype wide;  // of the sums
  std::size_t in_size, out_size;
  Scale widen = nullptr, round = nullptr;  // of an element times 1; null where nothing is converted

  // out[i] = round(wide(in[0][i]) + wide(in[1][i]) + ...) for at most kBlock elements from `first` on. `out`
  // may be among the inputs if nothing is converted.
  void operator()(std::byte* out, const std::byte* const* in, int n, std::size_t first,
                  std::size_t count) const {
    if (!widen) return fold_block(wide, out + first * out_size, in, n, first * in_size, count);
    alignas(64) std::byte sums[kBlock * 8], one[kBlock * 8];
    widen(sums, in[0] + first * in_size, 0, count, 1);
    for (int r = 1; r < n; ++r) {
      widen(one, in[r] + first * in_size, 0, count, 1);
      wide.combine(sums, sums, one, count);
    }
    round(out + first * out_size, sums, 0, count, 1);
  }
};

// Returns nothing if it is no such pair: float dtypes are as in csrc/scale.hpp, an integer stays what it is.
inline std::optional<Sum> sum_of(int source, int target) {
  constexpr int kFloat = 0, kDouble = 1, kBool = 8;
  const int sum = int(Op::sum);
  const auto in = dtype(source, sum), out = dtype(target, sum);
  if (source == target && source != kBool) return Sum{in, in.size, out.size};
  if (!scale_of(source, target)) return std::nullopt;
  const int wide = source == kDouble || target == kDouble ? kDouble : kFloat;
  return Sum{dtype(wide, sum), in.size, out.size, scale_of(source, wide), scale_of(wide, target)};
}

inline void sum_all(const Sum& act, std::byte* out, const std::vector<const std::byte*>& in, std::size_t elems,
                    std::size_t threads) {
  const auto n = int(in.size());
  share(elems, threads, [&](std::size_t first, std::size_t count) {
    const std::size_t end = first + count, step = fold_step(n);
    for (std::size_t at = first; at < end; at += step) act(out, in.data(), n, at, std::min(step, end - at));
  });
}

}  // namespace ringdp
