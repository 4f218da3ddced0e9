// Writes what another core has read and will read again: the slots between ranks.
//
// A cache line that two cores hold has to be taken from the other before it is written. Where they
// share a cache that is nothing; where they don't, 4 MiB through slots of 64 KiB came at 2.3 GB/s,
// and with stores that go around the caches at 22 (two virtual cores of an AMD EPYC). Where they do
// share one, plain stores win for a message of 256 KiB; and the same two virtual cores may change from
// the one to the other within seconds. So the time of a plain copy, now and then, decides.
//
// Not kept: reading peers' private memory by process_vm_readv, at 6 GB/s where memcpy from shared
// memory has 20; and stores around the caches into buffers of the arena, which came out slower.
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

// An empty tensor's pointer is null, which memcpy must not be given.
inline void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes && to != from) std::memcpy(to, from, bytes);
}

// The same around the caches.
inline void stream_bytes(void* to, const void* from, std::size_t bytes) {
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)  // which does not see such stores
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
  _mm_sfence();  // such stores are not ordered by a later release
#else
  copy_bytes(to, from, bytes);
#endif
}

class Put {
 public:
  using Copy = decltype(&copy_bytes);

  // The better way at the moment.
  Copy way() const { return around_ ? stream_bytes : copy_bytes; }

  void operator()(void* to, const void* from, std::size_t bytes) {
    if (bytes < kMeasured && (bytes < kTimed || ++shorter_ % kEvery)) return way()(to, from, bytes);
    const auto start = Clock::now();
    if (around_ && start < again_) return stream_bytes(to, from, bytes);
    copy_bytes(to, from, bytes);
    const auto end = Clock::now();
    around_ = double(bytes) < kSlow * std::chrono::duration<double>(end - start).count();
    trust_ = around_ ? std::min(2 * trust_, kMost) : kLeast;
    again_ = end + trust_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  // Bytes. Each copy of kMeasured or more is timed, of kTimed or more one in kEvery, and none below: it
  // costs less than to find out. (Where two cores share no cache an all_reduce of 8 KiB took 4.7 us when
  // no copy of it was timed, 2.2 like this; where they share one, 1.5 both ways.)
  static constexpr std::size_t kTimed = 2 << 10, kMeasured = 16 << 10;
  static constexpr unsigned kEvery = 16;
  static constexpr double kSlow = 6e9;                          // bytes/s
  // For how long the slow way is taken for slow: little at first, since a copy may only have been
  // the first after a pause, or have lost its core meanwhile.
  static constexpr Clock::duration kLeast = std::chrono::microseconds(50);
  static constexpr Clock::duration kMost = std::chrono::milliseconds(5);

  unsigned shorter_ = 0;  // copies of kTimed to kMeasured bytes so far
  bool around_ = false;
  Clock::duration trust_ = kLeast;
  Clock::time_point again_{};
};

}  // namespace ringdp
