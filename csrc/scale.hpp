// Scaled copies between float dtypes, by the formula of kernels/flatten.py:
//
//   out[i] = round(wide(in[i]) * scale)
//
// wide is float, or double where either side is.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "combine.hpp"
#include "threads.hpp"

namespace ringdp {

template <class S, class T>
using Widest = std::conditional_t<std::is_same_v<S, double> || std::is_same_v<T, double>, double, float>;

// A float's bits without the sign, which are ordered as its magnitude. Those of inf and nan are the largest.
template <class T>
auto magnitude(T x) {
  using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                                  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;
  Bits bits;
  std::memcpy(&bits, &x, sizeof x);
  return Bits(bits & (Bits(-1) >> 1));
}

// Works from element `first` on, and returns whether all results are finite. `out` may be `in`.
template <class S, class T>
RINGDP_CLONES bool scale(void* out, const void* in, std::size_t first, std::size_t count, double by) {
  using W = Widest<S, T>;
  auto* const o = static_cast<T*>(out) + first;
  auto* const x = static_cast<const S*>(in) + first;
  const W factor = W(by);
  auto most = magnitude(T{});
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) {
    o[i] = T(Wide<T>::narrow(W(x[i]) * factor));
    most = std::max(most, magnitude(o[i]));
  }
  return most < magnitude(T(Wide<T>::narrow(W(INFINITY))));
}

using Scale = bool (*)(void* out, const void* in, std::size_t first, std::size_t count, double by);

template <std::size_t size>
bool same(void* out, const void* in, std::size_t first, std::size_t count, double) {
  copy_bytes(static_cast<std::byte*>(out) + first * size, static_cast<const std::byte*>(in) + first * size,
             count * size);
  return true;
}

template <std::size_t size>
bool zero(void* out, const void*, std::size_t first, std::size_t count, double) {
  std::memset(static_cast<std::byte*>(out) + first * size, 0, count * size);
  return true;
}

// Dtypes are indices of transport.base.DTYPES. Returns null if it is no such pair: float64 to 16 bits would round
// twice.
inline Scale scale_of(int source, int target) {
  static constexpr Scale table[4][4] = {
      {scale<float, float>, scale<float, double>, scale<float, float16>, scale<float, bfloat16>},
      {scale<double, float>, scale<double, double>, nullptr, nullptr},
      {scale<float16, float>, scale<float16, double>, scale<float16, float16>, scale<float16, bfloat16>},
      {scale<bfloat16, float>, scale<bfloat16, double>, scale<bfloat16, float16>, scale<bfloat16, bfloat16>},
  };
  return source < 4 && target < 4 ? table[source][target] : nullptr;
}

// The same for a copy, which need not look whether results are finite.
inline Scale copy_of(int source, int target, double by) {
  const Scale act = scale_of(source, target);
  if (!act || source != target || by != 1) return act;
  return source == 0 ? same<4> : source == 1 ? same<8> : same<2>;
}

inline Scale zero_of(std::size_t size) {
  return size == 1 ? zero<1> : size == 2 ? zero<2> : size == 4 ? zero<4> : zero<8>;
}

// Some adjacent elements to scale.
struct Piece {
  Scale act;
  void* out;
  const void* in;
  std::size_t elems;
};

// Returns whether all results are finite.
inline bool scale_all(const std::vector<Piece>& pieces, double by, std::size_t threads) {
  std::vector<std::size_t> lengths;
  for (const Piece& piece : pieces) lengths.push_back(piece.elems);
  const auto parts = parts_of(lengths);
  std::atomic<bool> finite{true};
  share(parts, threads, [&](std::size_t i) {
    const Piece& p = pieces[parts[i].array];
    // relaxed: as in `share`
    if (!p.act(p.out, p.in, parts[i].first, parts[i].elems, by)) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

}  // namespace ringdp
