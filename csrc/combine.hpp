// out = a op b, element by element, for every dtype and op. Two 16-bit floats are combined in float32 and
// rounded once, to nearest even, as in torch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <stdexcept>

#include "apply.hpp"
#include "put.hpp"

// The compiler makes one version for each width of vector registers, and the loader picks one at run time.
// (A sanitizer's build defines it empty: the loader picks before the sanitizer is initialized.)
#if defined(RINGDP_CLONES)
#elif defined(__x86_64__) && __GNUC__ >= 12 && !defined(__clang__)
#define RINGDP_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define RINGDP_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define RINGDP_CLONES
#endif

namespace ringdp {

using Combine = void (*)(void* out, const void* a, const void* b, std::size_t count);

// `out` may be `a`.
template <Op op, class T>
RINGDP_CLONES void combine(void* out, const void* a, const void* b, std::size_t count) {
  using W = typename Wide<T>::type;
  auto* o = static_cast<T*>(out);
  auto *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) o[i] = Wide<T>::narrow(apply<op, W>(W(x[i]), W(y[i])));
}

// out = (a op b) op c, in one pass. `out` may be one of them.
using CombineTwo = void (*)(void* out, const void* a, const void* b, const void* c, std::size_t count);

template <Op op, class T>
RINGDP_CLONES void combine_two(void* out, const void* a, const void* b, const void* c, std::size_t count) {
  using W = typename Wide<T>::type;
  static_assert(std::is_same_v<W, T>, "16-bit floats would be rounded in between");
  auto* o = static_cast<T*>(out);
  auto *x = static_cast<const T*>(a), *y = static_cast<const T*>(b), *z = static_cast<const T*>(c);
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) o[i] = apply<op, T>(apply<op, T>(x[i], y[i]), z[i]);
}

using Widen = void (*)(float* out, const void* in, std::size_t count);
using Narrow = void (*)(void* out, const float* in, std::size_t count);
using Accumulate = void (*)(float* sum, const void* in, std::size_t count);
using AccumulateTwo = void (*)(float* sum, const void* a, const void* b, std::size_t count);

template <class T>
RINGDP_CLONES void widen(float* out, const void* in, std::size_t count) {
  auto* x = static_cast<const T*>(in);
  for (std::size_t i = 0; i < count; ++i) out[i] = float(x[i]);
}

template <class T>
RINGDP_CLONES void narrow(void* out, const float* in, std::size_t count) {
  auto* o = static_cast<T*>(out);
  for (std::size_t i = 0; i < count; ++i) o[i] = Wide<T>::narrow(in[i]);
}

template <Op op, class T>
RINGDP_CLONES void accumulate(float* sum, const void* in, std::size_t count) {
  auto* x = static_cast<const T*>(in);
  for (std::size_t i = 0; i < count; ++i) sum[i] = apply<op, float>(sum[i], float(x[i]));
}

template <Op op, class T>
RINGDP_CLONES void accumulate_two(float* sum, const void* a, const void* b, std::size_t count) {
  auto *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
  for (std::size_t i = 0; i < count; ++i)
    sum[i] = apply<op, float>(apply<op, float>(sum[i], float(x[i])), float(y[i]));
}

using Divide = void (*)(void* sum, std::size_t count, int by);

template <class T>
RINGDP_CLONES void divide(void* sum, std::size_t count, int by) {
  auto* x = static_cast<T*>(sum);
  for (std::size_t i = 0; i < count; ++i) x[i] = T(x[i] / by);
}

// The functions of a dtype and an op. A 16-bit float is `wide`: its sums stay in float32 and are rounded
// once, when they are read.
struct Dtype {
  std::size_t size;
  Combine combine;
  CombineTwo combine_two = nullptr;  // if it is not wide
  Widen widen = nullptr;             // these, if it is
  Narrow narrow = nullptr;
  Accumulate accumulate = nullptr;
  AccumulateTwo accumulate_two = nullptr;
  Divide divide = nullptr;  // for an average: applied to the result of `combine` or `accumulate`
  bool wide() const { return widen != nullptr; }
};

template <Op op, class T>
Dtype made() {
  if constexpr (std::is_same_v<typename Wide<T>::type, T>)
    return {sizeof(T), combine<op, T>, combine_two<op, T>};
  else
    return {sizeof(T), combine<op, T>, nullptr, widen<T>, narrow<T>, accumulate<op, T>, accumulate_two<op, T>};
}

template <class T>
Dtype pick(Op op) {
  Dtype sum = made<Op::sum, T>();
  switch (op) {
    case Op::sum: return sum;
    case Op::avg: sum.divide = divide<typename Wide<T>::type>; return sum;
    case Op::prod: return made<Op::prod, T>();
    case Op::min: return made<Op::min, T>();
    case Op::max: return made<Op::max, T>();
    default: break;
  }
  if constexpr (kHasBits<T>) {
    if (op == Op::band) return made<Op::band, T>();
    if (op == Op::bor) return made<Op::bor, T>();
    if (op == Op::bxor) return made<Op::bxor, T>();
  }
  throw std::invalid_argument("no such op for this dtype");
}

// `code` and `op` are indices of transport.base.DTYPES and REDUCE_OPS.
inline Dtype dtype(int code, int op) {
#define RINGDP_PICK(name, T) \
  if (code-- == 0) return pick<T>(Op(op));
  RINGDP_EACH_DTYPE(RINGDP_PICK)
  throw std::invalid_argument("unknown dtype code");
}

constexpr std::size_t kBlock = 1024;  // elements of a block: what is read again is still in the nearest cache

// Elements that a fold of n inputs does at a time. In each 4 KiB of an input the processor begins to prefetch
// anew. With half a block it does so for several inputs at about the same time: 4 or 8 from memory take 1.2 or
// 1.4 times as long with a whole one.
constexpr std::size_t fold_step(int n) { return n > 3 ? kBlock / 2 : kBlock; }

// Folds at most kBlock elements, from byte `at` of each input on, into `to`: see `fold`.
inline void fold_block(const Dtype& dtype, std::byte* to, const std::byte* const* in, int n, std::size_t at,
                       std::size_t count) {
  alignas(64) std::byte block[kBlock * 8];
  const auto input = [&](int r) { return in[r] + at; };
  int r = 1;  // inputs that are folded
  if (n == 1) {
    copy_bytes(to, input(0), count * dtype.size);
  } else if (n == 2 && !(dtype.wide() && dtype.divide)) {
    dtype.combine(to, input(0), input(1), count);
  } else if (dtype.wide()) {
    auto* const sum = reinterpret_cast<float*>(block);
    dtype.widen(sum, input(0), count);
    if (n % 2 == 0) dtype.accumulate(sum, input(r++), count);
    for (; r < n; r += 2) dtype.accumulate_two(sum, input(r), input(r + 1), count);
    if (dtype.divide) dtype.divide(sum, count, n);
    dtype.narrow(to, sum, count);
  } else {
    const std::byte* sum = input(0);
    if (n % 2 == 0) dtype.combine(block, sum, input(r++), count), sum = block;
    for (; r < n; r += 2, sum = block)
      dtype.combine_two(r + 2 < n ? block : to, sum, input(r), input(r + 1), count);
  }
  if (dtype.divide && !dtype.wide()) dtype.divide(to, count, n);
}

// Computes out = in[0] op in[1] op ... op in[n - 1], in this order. A wide dtype is rounded once, an
// average after the division. `put` then copies `out` to each of the `copies`. These and `out` may be among
// the inputs.
inline void fold(const Dtype& dtype, std::byte* out, const std::byte* const* in, int n,
                 std::size_t count, std::byte* const* copies = nullptr, int copy_count = 0,
                 decltype(&copy_bytes) put = copy_bytes) {
  const std::size_t step = fold_step(n);
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t last = std::min(count, first + kBlock), at = first * dtype.size;
    for (std::size_t i = first; i < last; i += step)
      fold_block(dtype, out + i * dtype.size, in, n, i * dtype.size, std::min(step, last - i));
    for (int c = 0; c < copy_count; ++c) put(copies[c] + at, out + at, (last - first) * dtype.size);
  }
}

// Divides sums that are already rounded, as torch does. `dtype` must be that of an average.
inline void average(const Dtype& dtype, std::byte* sums, std::size_t count, int by) {
  if (!dtype.wide()) return dtype.divide(sums, count, by);
  float block[kBlock];
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t some = std::min(kBlock, count - first);
    std::byte* const at = sums + first * dtype.size;
    dtype.widen(block, at, some);
    dtype.divide(block, some, by);
    dtype.narrow(at, block, some);
  }
}

}  // namespace ringdp
