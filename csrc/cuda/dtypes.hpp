// Instantiates a kernel for every dtype in transport.base.DTYPES, named as in torch.
#pragma once

#define RINGDP_EACH_DTYPE(KERNEL)                                                          \
  KERNEL(float32, float)                                                                   \
  KERNEL(float64, double)                                                                  \
  KERNEL(float16, ringdp::float16)                                                         \
  KERNEL(bfloat16, ringdp::bfloat16)                                                       \
  KERNEL(int8, std::int8_t)                                                                \
  KERNEL(uint8, std::uint8_t)                                                              \
  KERNEL(int32, std::int32_t)                                                              \
  KERNEL(int64, std::int64_t)                                                              \
  KERNEL(bool, bool)                                                                       \
  KERNEL(int16, std::int16_t)
