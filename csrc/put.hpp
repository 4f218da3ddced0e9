// Writes to memory that another core has read and will read again: the slots between ranks.
//
// Before a core writes a cache line that another core holds, it must fetch it from there. That is cheap if
// they share a cache. If not, 4 MiB through slots of 64 KiB ran at 2.3 GB/s, and at 22 with non-temporal
// stores, which bypass the caches (two virtual cores of an AMD EPYC). If they do, plain stores win for a
// message of 256 KiB. The same two virtual cores may change from one case to the other within seconds, so
// we time a plain copy now and then, and choose by that.
//
// Rejected: reading peers' private memory with process_vm_readv, at 6 GB/s where memcpy from shared memory
// has 20; and non-temporal stores to buffers in the arena, which were slower.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ringdp {

// Copies like memcpy, which may not be given an empty tensor's null pointer.
inline void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes && to != from) std::memcpy(to, from, bytes);
}

// Copies with non-temporal stores.
inline void stream_bytes(void* to, const void* from, std::size_t bytes) {
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)  // ThreadSanitizer does not see such stores
  auto* out = static_cast<std::byte*>(to);
  auto* in = static_cast<const std::byte*>(from);
  const std::size_t head = std::min<std::size_t>(-reinterpret_cast<std::uintptr_t>(out) & 63, bytes);
  copy_bytes(out, in, head);
  std::size_t i = head;
  for (; i + 64 <= bytes; i += 64)
    for (int k = 0; k < 64; k += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + i + k),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i + k)));
  copy_bytes(out + i, in + i, bytes - i);
  _mm_sfence();  // a later release does not order non-temporal stores
#else
  copy_bytes(to, from, bytes);
#endif
}

class Put {
 public:
  using Copy = decltype(&copy_bytes);

  // Returns the faster copy at the moment.
  Copy way() const { return streams_ ? stream_bytes : copy_bytes; }

  void operator()(void* to, const void* from, std::size_t bytes) {
    if (bytes < kMeasured && (bytes < kTimed || ++shorter_ % kEvery)) return way()(to, from, bytes);
    const auto start = Clock::now();
    if (streams_ && start < retry_) return stream_bytes(to, from, bytes);
    copy_bytes(to, from, bytes);
    const auto end = Clock::now();
    streams_ = double(bytes) < kSlow * std::chrono::duration<double>(end - start).count();
    trust_ = streams_ ? std::min(2 * trust_, kMost) : kLeast;
    retry_ = end + trust_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  // Bytes. Every copy of kMeasured or more is timed, one in kEvery of kTimed or more, and none below, as
  // timing would cost more than the copy. (If two cores share no cache, an all_reduce of 8 KiB took 4.7 us
  // with no copy timed and takes 2.2 like this; if they share one, 1.5 both ways.)
  static constexpr std::size_t kTimed = 2 << 10, kMeasured = 16 << 10;
  static constexpr unsigned kEvery = 16;
  static constexpr double kSlow = 6e9;  // bytes/s
  // How long a slow plain copy rules out the next one: briefly at first, since that copy may only have
  // been the first after a pause, or have been preempted.
  static constexpr Clock::duration kLeast = std::chrono::microseconds(50);
  static constexpr Clock::duration kMost = std::chrono::milliseconds(5);

  unsigned shorter_ = 0;  // copies of kTimed to kMeasured bytes so far
  bool streams_ = false;
  Clock::duration trust_ = kLeast;
  Clock::time_point retry_{};
};

}  // namespace ringdp
