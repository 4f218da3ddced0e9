// Denormals stay, whatever this thread was told of them. torch.set_flush_denormal is a thread's own,
// and a collective is run by its caller or by a thread beside it, as it comes: ranks that all had set
// it had sums that differed.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace ringdp {

// As long as it lives, in its thread.
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
