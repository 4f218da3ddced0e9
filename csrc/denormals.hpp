// Disables flushing of denormals in this thread. With torch.set_flush_denormal, which applies to one thread,
// even ranks that all had set it got different sums: timing decides whether a collective runs on its
// caller's thread.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace ringdp {

// Keeps denormals in the current thread for its lifetime.
class Denormals {
 public:
  Denormals() : before_(control()) {
    if (before_ & kFlush) control(before_ & ~kFlush);
  }
  ~Denormals() {
    if (before_ & kFlush) control(before_);
  }
  Denormals(const Denormals&) = delete;
  Denormals& operator=(const Denormals&) = delete;

 private:
#if defined(__SSE__)
  static constexpr std::uint64_t kFlush = 1 << 15 | 1 << 6;  // results; inputs
  static std::uint64_t control() { return _mm_getcsr(); }
  static void control(std::uint64_t word) { _mm_setcsr(std::uint32_t(word)); }
#elif defined(__aarch64__)
  static constexpr std::uint64_t kFlush = 1 << 24 | 1 << 19;  // of floats and doubles; of halves
  static std::uint64_t control() {
    std::uint64_t word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void control(std::uint64_t word) { asm volatile("msr fpcr, %0" ::"r"(word)); }
#else
  static constexpr std::uint64_t kFlush = 0;
  static std::uint64_t control() { return 0; }
  static void control(std::uint64_t) {}
#endif
  const std::uint64_t before_;
};

}  // namespace ringdp
