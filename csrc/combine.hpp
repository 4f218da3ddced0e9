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

using Widen = void (*)(float* out, const void* in, std::size_t count);
using Narrow = void (*)(void* out, const float* in, std::size_t count);
using Accumulate = void (*)(float* sum, const void* in, std::size_t count);

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
  Widen widen = nullptr;
  Narrow narrow = nullptr;
  Accumulate accumulate = nullptr;
  Divide divide = nullptr;  // for an average: applied to the result of `combine` or `accumulate`
  bool wide() const { return widen != nullptr; }
};

template <Op op, class T>
Dtype made() {
  if constexpr (std::is_same_v<typename Wide<T>::type, T>) return {sizeof(T), combine<op, T>};
  else return {sizeof(T), combine<op, T>, widen<T>, narrow<T>, accumulate<op, T>};
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
  if constexpr (std::is_integral_v<T>) {
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

// Computes out = in[0] op in[1] op ... op in[n - 1], in this order. A wide dtype is rounded once, an
// average after the division. `put` then copies `out` to each of the `copies`. These and `out` may be among
// the inputs. It works block by block, so that what is read again is still in the nearest cache.
inline void fold(const Dtype& dtype, std::byte* out, const std::byte* const* in, int n,
                 std::size_t count, std::byte* const* copies = nullptr, int copy_count = 0,
                 decltype(&copy_bytes) put = copy_bytes) {
  constexpr std::size_t kBlock = 1024;  // elements: 8 KiB of the widest
  alignas(64) std::byte block[kBlock * 8];
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t some = std::min(kBlock, count - first), at = first * dtype.size;
    std::byte* to = out + at;
    if (n == 1) {
      copy_bytes(to, in[0] + at, some * dtype.size);
    } else if (n == 2 && !(dtype.wide() && dtype.divide)) {
      dtype.combine(to, in[0] + at, in[1] + at, some);
    } else if (dtype.wide()) {
      auto* sum = reinterpret_cast<float*>(block);
      dtype.widen(sum, in[0] + at, some);
      for (int r = 1; r < n; ++r) dtype.accumulate(sum, in[r] + at, some);
      if (dtype.divide) dtype.divide(sum, some, n);
      dtype.narrow(to, sum, some);
    } else {
      const std::byte* sum = in[0] + at;
      for (int r = 1; r < n; ++r) {
        std::byte* next = r + 1 < n ? block : to;
        dtype.combine(next, sum, in[r] + at, some);
        sum = next;
      }
    }
    if (dtype.divide && !dtype.wide()) dtype.divide(to, some, n);
    for (int c = 0; c < copy_count; ++c) put(copies[c] + at, to, some * dtype.size);
  }
}

// Divides sums that are already rounded, as torch does. `dtype` must be that of an average.
inline void average(const Dtype& dtype, std::byte* sums, std::size_t count, int by) {
  if (!dtype.wide()) return dtype.divide(sums, count, by);
  constexpr std::size_t kBlock = 1024;
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
