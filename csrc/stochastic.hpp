// Stochastic rounding of float32 to bfloat16, by the formula of kernels/stochastic.py and with its bits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "combine.hpp"
#include "threads.hpp"

namespace ringdp {

using Hash = std::array<std::uint32_t, 5>;  // the first element's place, two keys, two multipliers

RINGDP_CLONES inline void stochastic_block(bfloat16* out, const float* x, std::size_t count, const Hash& hash) {
  const auto [place, key0, key1, first, second] = hash;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t h = place + std::uint32_t(i);
    h ^= (h >> 16) ^ key0;
    h = h * first + key1;
    h = (h ^ (h >> 15)) * second;
    h = (h ^ (h >> 16)) & 0xffff;
    std::uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : bits;  // torch's nan
    out[i] = {std::uint16_t((bits + h) >> 16)};
  }
}

inline void stochastic_round(bfloat16* out, const float* x, std::size_t elems, const Hash& hash,
                             std::size_t threads) {
  share(elems, threads, [=](std::size_t first, std::size_t count) {
    Hash own = hash;
    own[0] += std::uint32_t(first);
    stochastic_block(out + first, x + first, count, own);
  });
}

}  // namespace ringdp
