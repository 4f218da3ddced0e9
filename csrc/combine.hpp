// out = a op b, element by element, for every dtype and op. 16-bit floats are combined in float32
// and rounded once, to nearest even, as torch rounds them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

// The compiler makes one version for each width of vector registers; the loader picks at run time.
// (A sanitizer's build defines it empty: the loader runs before the sanitizer does.)
#if defined(RINGDP_CLONES)
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define RINGDP_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define RINGDP_CLONES
#endif

namespace ringdp {

enum class Op { sum, prod, min, max };  // the order of transport.base.OPS

struct bfloat16 {
  std::uint16_t bits;
  operator float() const {
    std::uint32_t wide = std::uint32_t(bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
  }
  static bfloat16 round(float x) {
    std::uint32_t wide;
    std::memcpy(&wide, &x, 4);
    std::uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    return {std::uint16_t((wide & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded)};  // NaN stays NaN
  }
};

// The type in which T is combined, and the way back.
template <class T>
struct Wide {
  using type = T;
  static T narrow(T x) { return x; }
};
template <>
struct Wide<bfloat16> {
  using type = float;
  static bfloat16 narrow(float x) { return bfloat16::round(x); }
};
template <>
struct Wide<_Float16> {
  using type = float;
  static _Float16 narrow(float x) { return static_cast<_Float16>(x); }
};

// For min and max a NaN wins, as in torch, and -0 is less than +0, which torch leaves to chance: so
// the order of the operands shows in no bit, but a NaN's payload.
template <Op op, class T>
inline T apply(T a, T b) {
  if constexpr ((op == Op::min || op == Op::max) && std::is_floating_point_v<T>) {
    const bool first = op == Op::min ? a < b : a > b;
    const bool negative = std::signbit(a) == (op == Op::min);
    return first || a != a || (a == b && negative) ? a : b;
  }
  if constexpr (op == Op::min) return a < b ? a : b;
  if constexpr (op == Op::max) return a > b ? a : b;
  if constexpr (std::is_integral_v<T>) {  // wraps around, without signed overflow
    using U = std::conditional_t<(sizeof(T) < 4), std::uint32_t, std::make_unsigned_t<T>>;
    return T(op == Op::sum ? U(a) + U(b) : U(a) * U(b));
  }
  if constexpr (op == Op::sum) return a + b;
  return a * b;
}

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

template <class T>
Combine pick(Op op) {
  switch (op) {
    case Op::sum: return combine<Op::sum, T>;
    case Op::prod: return combine<Op::prod, T>;
    case Op::min: return combine<Op::min, T>;
    case Op::max: return combine<Op::max, T>;
  }
  throw std::invalid_argument("unknown op");
}

struct Dtype {
  std::size_t size;
  Combine combine;
};

// The order of transport.base.DTYPES.
inline Dtype dtype(int code, int op) {
  switch (code) {
    case 0: return {4, pick<float>(Op(op))};
    case 1: return {8, pick<double>(Op(op))};
    case 2: return {2, pick<_Float16>(Op(op))};
    case 3: return {2, pick<bfloat16>(Op(op))};
    case 4: return {1, pick<std::int8_t>(Op(op))};
    case 5: return {1, pick<std::uint8_t>(Op(op))};
    case 6: return {4, pick<std::int32_t>(Op(op))};
    case 7: return {8, pick<std::int64_t>(Op(op))};
  }
  throw std::invalid_argument("unknown dtype code");
}

}  // namespace ringdp
