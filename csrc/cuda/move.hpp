// Copies, reduces or rounds the elements of one slab as a team: each thread 16 bytes at a time where
// all addresses are aligned.
#pragma once

#include "target.hpp"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace ringdp {

#if defined(__CUDACC__)
using float16 = __half;
template <>
struct Wide<__half> {
  using type = float;
  static RINGDP_DEVICE __half narrow(float x) { return __float2half_rn(x); }
};
#endif

// Note [one rounding]
//   The sum of a chunk of 16-bit floats stays in float32, in `sum`, until its value is read. The
//   simulator does the same, so both give the same bits.
struct Move {
  const void* value;  // the input; null: round `sum` instead
  const void* with;   // the other operand; null: none, or `sum` if that is live
  float* sum;         // null for dtypes that are not widened
  void* store;        // destination of the result
  void* send;         // second destination; both may be null if the result stays in `sum`
  unsigned count;     // elements
  int reduces;        // whether `value` is combined
};

template <class T, int K>
struct alignas(K * sizeof(T) < 16 ? K * sizeof(T) : 16) Pack {
  T of[K];
};
template <class T, int K>
RINGDP_DEVICE inline Pack<T, K> load(const void* from, i64 index) {
  Pack<T, K> out;
#if defined(__CUDA_ARCH__)
  out = reinterpret_cast<const Pack<T, K>*>(from)[index];
#else
  std::memcpy(&out, static_cast<const char*>(from) + index * i64(sizeof out), sizeof out);
#endif
  return out;
}
template <class T, int K>
RINGDP_DEVICE inline void store(void* to, i64 index, const Pack<T, K>& value) {
#if defined(__CUDA_ARCH__)
  reinterpret_cast<Pack<T, K>*>(to)[index] = value;
#else
  std::memcpy(static_cast<char*>(to) + index * i64(sizeof value), &value, sizeof value);
#endif
}

template <Op op, class W, int K>
RINGDP_DEVICE inline void combine(Pack<W, K>& a, const Pack<W, K>& b) {
RINGDP_UNROLL
  for (int k = 0; k < K; ++k) a.of[k] = apply<op, W>(a.of[k], b.of[k]);
}

// All threads take the same op, so the switch costs one branch per pack and saves a kernel per op.
template <class W, int K>
RINGDP_DEVICE inline void combine(Op op, Pack<W, K>& a, const Pack<W, K>& b) {
  if (op == Op::sum || op == Op::avg) return combine<Op::sum>(a, b);
  if (op == Op::prod) return combine<Op::prod>(a, b);
  if (op == Op::min) return combine<Op::min>(a, b);
  if (op == Op::max) return combine<Op::max>(a, b);
  if constexpr (kHasBits<W>) {
    if (op == Op::band) return combine<Op::band>(a, b);
    if (op == Op::bor) return combine<Op::bor>(a, b);
    if (op == Op::bxor) return combine<Op::bxor>(a, b);
  }
}

template <int K>
RINGDP_DEVICE inline void divide(Pack<float, K>& x, int by) {
RINGDP_UNROLL
  for (int k = 0; k < K; ++k) x.of[k] /= by;
}

template <class T, int K>
RINGDP_DEVICE inline Pack<typename Wide<T>::type, K> widen(const Pack<T, K>& x) {
  Pack<typename Wide<T>::type, K> out;
RINGDP_UNROLL
  for (int k = 0; k < K; ++k) out.of[k] = typename Wide<T>::type(x.of[k]);
  return out;
}
template <class T, int K>
RINGDP_DEVICE inline Pack<T, K> narrow(const Pack<typename Wide<T>::type, K>& x) {
  Pack<T, K> out;
RINGDP_UNROLL
  for (int k = 0; k < K; ++k) out.of[k] = Wide<T>::narrow(x.of[k]);
  return out;
}

// Moves packs [first, last). Each thread handles U at once and issues all loads first, so that they
// are in flight together.
template <class T, int K, int U>
RINGDP_DEVICE void move_packs(const Team& team, const Move& m, Op op, int ranks, i64 first, i64 last) {
  using W = typename Wide<T>::type;
  const bool stays = m.sum && !m.store && !m.send;
  for (i64 base = first + team.thread; base < last; base += i64(team.threads) * U) {
    Pack<T, K> value[U];
    Pack<W, K> result[U];
RINGDP_UNROLL
    for (int u = 0; u < U; ++u) {
      const i64 at = base + i64(u) * team.threads;
      if (at >= last) break;
      if (m.value) value[u] = load<T, K>(m.value, at);
      if (m.with) result[u] = widen<T, K>(load<T, K>(m.with, at));
      else if (m.reduces || !m.value) result[u] = load<W, K>(m.sum, at);
    }
RINGDP_UNROLL
    for (int u = 0; u < U; ++u) {
      const i64 at = base + i64(u) * team.threads;
      if (at >= last) break;
      if (m.reduces) combine(op, result[u], widen<T, K>(value[u]));
      if (stays) {
        store<W, K>(m.sum, at, result[u]);
        continue;
      }
      if (m.reduces || !m.value) {
        if constexpr (!std::is_same_v<W, T>)
          if (op == Op::avg) divide(result[u], ranks);
        value[u] = narrow<T, K>(result[u]);
      }
      if (m.store) store<T, K>(m.store, at, value[u]);
      if (m.send) store<T, K>(m.send, at, value[u]);
    }
  }
}

RINGDP_DEVICE inline bool aligned(const void* address) {
  return (reinterpret_cast<u64>(address) & 15) == 0;
}

template <class T>
RINGDP_DEVICE void move_elements(const Team& team, const Move& m, Op op, int ranks) {
  constexpr int K = 16 / sizeof(T);
  // As many as the registers hold: integers of 8 and 16 bits are combined one by one.
  constexpr int U = sizeof(T) == 4 ? 8 : kHasBits<T> && sizeof(T) < 4 ? 2 : 4;
  i64 packs = 0;
  if (aligned(m.value) && aligned(m.with) && aligned(m.sum) && aligned(m.store) && aligned(m.send))
    packs = m.count / K;
  move_packs<T, K, U>(team, m, op, ranks, 0, packs);
  move_packs<T, 1, 8>(team, m, op, ranks, packs * K, m.count);  // the tail, or everything if unaligned
}

}  // namespace ringdp
