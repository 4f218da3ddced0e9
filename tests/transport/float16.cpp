// Makes the float16 of apply.hpp callable from Python.
#include "apply.hpp"

extern "C" void widen(float* out, const std::uint16_t* in, std::size_t count) {
  auto* x = reinterpret_cast<const ringdp::float16*>(in);
  for (std::size_t i = 0; i < count; ++i) out[i] = x[i];
}

extern "C" void narrow(std::uint16_t* out, const float* in, std::size_t count) {
  auto* o = reinterpret_cast<ringdp::float16*>(out);
  for (std::size_t i = 0; i < count; ++i) o[i] = ringdp::Wide<ringdp::float16>::narrow(in[i]);
}
