// a op b for one element, for every dtype and op, and the wider type that 16-bit floats are combined in.
// Shared by the host's loops and the CUDA kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define RINGDP_DEVICE __host__ __device__
#else
#define RINGDP_DEVICE
#endif

namespace ringdp {

enum class Op { sum, prod, min, max, band, bor, bxor, avg };  // the order of transport.base.REDUCE_OPS

// A byte that is true unless it is 0, as in torch, where `view(torch.bool)` makes any. C++'s bool may only be
// 0 or 1: as its bytes, 1 && 2 was false.
struct boolean {
  std::uint8_t byte;
  boolean() = default;
  RINGDP_DEVICE boolean(bool x) : byte(x) {}
  RINGDP_DEVICE operator bool() const { return byte != 0; }
};

template <class T>
constexpr bool kHasBits = std::is_integral_v<T> || std::is_same_v<T, boolean>;  // for band, bor and bxor

struct bfloat16 {
  std::uint16_t bits;
  RINGDP_DEVICE operator float() const {
    std::uint32_t wide = std::uint32_t(bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
  }
  static RINGDP_DEVICE bfloat16 round(float x) {
    std::uint32_t wide;
    std::memcpy(&wide, &x, 4);
    std::uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    return {std::uint16_t((wide & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded)};  // NaN stays NaN
  }
};

#if !defined(__CUDACC__)  // there it is __half
// Not _Float16, which not every compiler has, and GCC 12 does not vectorize: sums take 1.5 times as
// long, and minima 9 times.
class float16 {
 public:
  float16() = default;
  // Rounds to nearest even; a result of 2^16 or more becomes infinity.
  explicit float16(float x) {
    const auto all = as<std::uint32_t>(x), size = all & 0x7fffffff;
    std::uint32_t small = size + 0xfff + (size >> 13 & 1);  // carries if the next value is nearer
    small = (small >> 13) - (112 << 10);                      // rebiases the exponent from 127 to 15
    if (size < 0x38800000) {  // below 2^-14: multiples of 2^-24, which is float's spacing above 0.5
      small = as<std::uint32_t>(as<float>(size) + 0.5f) - as<std::uint32_t>(0.5f);
    } else if (size >= 0x477ff000) {
      small = size > 0x7f800000 ? 0x7e00 : 0x7c00;
    }
    bits_ = std::uint16_t((all >> 16 & 0x8000) | small);
  }
  // Denormals of float, which a thread may flush and which take some processors long, do not occur.
  operator float() const {
    const std::uint32_t sign = std::uint32_t(bits_ & 0x8000) << 16, size = (bits_ & 0x7fff) << 13;
    const std::uint32_t rebias = size < 0x0f800000 ? 112 << 23 : 224 << 23;  // 224: infinite, or NaN
    const float tiny = as<float>(size + (113 << 23)) - 0x1p-14f;
    return as<float>(sign | (size < 0x00800000 ? as<std::uint32_t>(tiny) : size + rebias));
  }

 private:
  template <class To, class From>
  static To as(From x) {
    To out;
    std::memcpy(&out, &x, sizeof out);
    return out;
  }
  std::uint16_t bits_;
};
#endif

// The type in which T is combined, and the conversion back.
template <class T>
struct Wide {
  using type = T;
  static RINGDP_DEVICE T narrow(T x) { return x; }
};
template <>
struct Wide<bfloat16> {
  using type = float;
  static RINGDP_DEVICE bfloat16 narrow(float x) { return bfloat16::round(x); }
};
#if !defined(__CUDACC__)
template <>
struct Wide<float16> {
  using type = float;
  static float16 narrow(float x) { return static_cast<float16>(x); }
};
#endif

// In min and max a NaN wins, as in torch, and -0 < +0, which torch leaves undefined. So the order of the
// operands affects no bit but a NaN's payload.
template <Op op, class T>
RINGDP_DEVICE inline T apply(T a, T b) {
  if constexpr ((op == Op::min || op == Op::max) && std::is_floating_point_v<T>) {
    const bool first = op == Op::min ? a < b : a > b;
    const bool negative = std::signbit(a) == (op == Op::min);
    return first || a != a || (a == b && negative) ? a : b;
  } else if constexpr (op == Op::band) {
    return a & b;
  } else if constexpr (op == Op::bor) {
    return a | b;
  } else if constexpr (op == Op::bxor) {
    return a ^ b;
  } else if constexpr (std::is_same_v<T, boolean>) {
    return op == Op::sum || op == Op::max ? a || b : a && b;
  } else if constexpr (op == Op::min) {
    return a < b ? a : b;
  } else if constexpr (op == Op::max) {
    return a > b ? a : b;
  } else if constexpr (std::is_integral_v<T>) {  // wraps around, without signed overflow
    using U = std::conditional_t<(sizeof(T) < 4), std::uint32_t, std::make_unsigned_t<T>>;
    return T(op == Op::sum ? U(a) + U(b) : U(a) * U(b));
  } else if constexpr (op == Op::sum) {
    return a + b;
  } else {
    return a * b;
  }
}

}  // namespace ringdp

// Calls a macro for every dtype, in the order of transport.base.DTYPES, with its name in torch.
#define RINGDP_EACH_DTYPE(CALL)     \
  CALL(float32, float)              \
  CALL(float64, double)             \
  CALL(float16, ringdp::float16)    \
  CALL(bfloat16, ringdp::bfloat16)  \
  CALL(int8, std::int8_t)           \
  CALL(uint8, std::uint8_t)         \
  CALL(int32, std::int32_t)         \
  CALL(int64, std::int64_t)         \
  CALL(bool, ringdp::boolean)       \
  CALL(int16, std::int16_t)
