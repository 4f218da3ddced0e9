// Scaled copies between float dtypes, by the formula of kernels/flatten.py:
//
//   out[i] = round(wide(in[i]) * scale)
//
// wide is float, or double where either side is. A copy also says whether all of `out` is finite.
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

// `out` may be `in`.
template <class S, class T>
RINGDP_CLONES bool scale(void* out, const void* in, std::size_t count, double by) {
  using W = Widest<S, T>;
  auto* const o = static_cast<T*>(out);
  auto* const x = static_cast<const S*>(in);
  const W factor = W(by);
  auto most = magnitude(T{});
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) {
    o[i] = T(Wide<T>::narrow(W(x[i]) * factor));
    most = std::max(most, magnitude(o[i]));
  }
  return most < magnitude(T(Wide<T>::narrow(W(INFINITY))));
}

using Scale = bool (*)(void* out, const void* in, std::size_t count, double by);

// `source` and `target` are indices of transport.base.DTYPES. Returns null if it is no such pair: float64 to
// 16 bits would round twice.
inline Scale scale_of(int source, int target) {
  static constexpr Scale table[4][4] = {
      {scale<float, float>, scale<float, double>, scale<float, float16>, scale<float, bfloat16>},
      {scale<double, float>, scale<double, double>, nullptr, nullptr},
      {scale<float16, float>, scale<float16, double>, scale<float16, float16>, scale<float16, bfloat16>},
      {scale<bfloat16, float>, scale<bfloat16, double>, scale<bfloat16, float16>, scale<bfloat16, bfloat16>},
  };
  return source < 4 && target < 4 ? table[source][target] : nullptr;
}

template <std::size_t size>
bool same(void* out, const void* in, std::size_t count, double) {
  copy_bytes(out, in, count * size);
  return true;
}

template <std::size_t size>
bool zero(void* out, const void*, std::size_t count, double) {
  if (count) std::memset(out, 0, count * size);
  return true;
}

// Some adjacent elements to scale.
struct Piece {
  Scale act;
  std::byte* out;
  const std::byte* in;
  std::size_t out_size, in_size;  // bytes of an element
  std::size_t elems;
};

// Returns whether all results are finite.
inline bool scale_all(const std::vector<Piece>& pieces, double by, std::size_t threads) {
  std::size_t all = 0;
  bool parted = false;
  for (const Piece& piece : pieces) all += piece.elems, parted |= piece.elems > kPart;
  std::vector<Piece> parts;
  threads = worth(all, threads);
  parted &= threads > 1;
  if (parted)
    for (const Piece& p : pieces)
      for (std::size_t i = 0; i < p.elems; i += kPart)
        parts.push_back({p.act, p.out + i * p.out_size, p.in ? p.in + i * p.in_size : nullptr, p.out_size,
                         p.in_size, std::min(kPart, p.elems - i)});
  const std::vector<Piece>& shared = parted ? parts : pieces;
  std::atomic<bool> finite{true};
  share(shared.size(), threads, [&](std::size_t i) {
    const Piece& p = shared[i];
    if (!p.act(p.out, p.in, p.elems, by)) finite.store(false, std::memory_order_relaxed);  // see `share`
  });
  return finite.load();
}

}  // namespace ringdp
