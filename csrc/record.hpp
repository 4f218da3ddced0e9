// What a rank does and did last, where its peers and `ringdp doctor` read it even while it is stuck.
//
//   RankRecord = where it is | what it found wrong | the message that it waits for
//              | Call[kCalls], call k in place k % kCalls
//
// Only numbers and text of a fixed size: whoever reads it checks every one, and trusts none. Single
// writer. Nothing but `pid`, `begun` and a Call's parts orders anything; the rest informs people.
#pragma once

#include <time.h>

#include <array>
#include <cstring>
#include <optional>

#include "fifo.hpp"

namespace ringdp {

constexpr std::size_t kSite = 96;     // bytes of "file:line" of the user's call, the rest zeros
constexpr std::uint64_t kCalls = 32;  // how many calls a rank remembers: more than fit its FIFOs

// What a message belongs to; the receiver compares it with what it expects.
struct alignas(kLine) Stamp {
  std::uint64_t number;
  std::uint64_t bytes;
  std::uint64_t digest;   // of the kinds of this collective and all before it: see Progress::begin
  std::uint64_t arrival;  // over an emulated link: not to be read before, in ns
  std::uint64_t more;     // whether slabs of this chunk are still to come
};

// One collective as the user called it.
struct CallInfo {
  std::uint64_t number, kind, elements;
  std::array<std::uint64_t, kSite / 8> site;
};

class alignas(kLine) Call {
 public:
  void write(std::uint64_t number, std::uint64_t kind, std::uint64_t elements, const char* site) {
    // release, all of them: who sees a part of the new call sees that the old one is no more
    count_.store(0, std::memory_order_relaxed);
    kind_.store(kind, std::memory_order_release);
    elements_.store(elements, std::memory_order_release);
    for (std::size_t i = 0; i < kSite / 8; ++i) {
      std::uint64_t word;
      std::memcpy(&word, site + 8 * i, 8);
      site_[i].store(word, std::memory_order_release);
    }
    count_.store(number + 1, std::memory_order_release);
  }

  // It is over, and there is no other yet.
  void clear() { count_.store(0, std::memory_order_relaxed); }

  // Nothing where there is none, or one half written.
  std::optional<CallInfo> read() const {
    // acquire, all of them: the parts are of this call if it is there before and after
    const auto count = count_.load(std::memory_order_acquire);
    if (count == 0) return std::nullopt;
    CallInfo info{count - 1, kind_.load(std::memory_order_acquire),
                  elements_.load(std::memory_order_acquire), {}};
    for (std::size_t i = 0; i < kSite / 8; ++i) info.site[i] = site_[i].load(std::memory_order_acquire);
    if (count_.load(std::memory_order_relaxed) != count) return std::nullopt;
    return info;
  }

 private:
  std::atomic<std::uint64_t> count_;  // 1 + its number; 0 while it is written
  std::atomic<std::uint64_t> kind_, elements_;
  std::atomic<std::uint64_t> site_[kSite / 8];
};

// What a rank found wrong. Written once, before the header says that it is there to be read.
struct Finding {
  Stamp expected, found;
};

struct alignas(kLine) RankRecord {
  std::atomic<std::uint64_t> begun, finished;  // collectives; between the two is the one under way
  std::atomic<std::uint64_t> changed;          // when one of them last did: ns of `coarse_clock`
  std::atomic<std::int32_t> round, peer;       // of the one under way; peer: whom it waits for, or -1
  std::atomic<std::int32_t> pid;               // 0 before it has attached, -1 once it has closed
  Finding finding;
  Call message;                                // a send or recv that has waited for a while
  Call calls[kCalls];

  // The rank is about to run this collective. 15 ns.
  void begin(std::uint64_t number, std::uint64_t kind, std::uint64_t elements, const char* site) {
    calls[number % kCalls].write(number, kind, elements, site);
    round.store(-1, std::memory_order_relaxed);
    peer.store(-1, std::memory_order_relaxed);
    changed.store(coarse_clock(), std::memory_order_relaxed);
    begun.store(number + 1, std::memory_order_release);  // release: the call before its count
  }
  void end() {
    changed.store(coarse_clock(), std::memory_order_relaxed);
    finished.store(begun.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
  std::optional<CallInfo> call(std::uint64_t number) const {
    const auto found = calls[number % kCalls].read();
    return found && found->number == number ? found : std::nullopt;
  }

  // CLOCK_MONOTONIC, the same in all processes of a host, to some 4 ms for a quarter of the price.
  static std::uint64_t coarse_clock() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return std::uint64_t(now.tv_sec) * 1'000'000'000u + now.tv_nsec;
  }
};

// Those of all ranks: in a communicator's own segment, or in one seen from outside.
struct Records {
  virtual int ranks() const = 0;
  virtual const RankRecord& record(int rank) const = 0;
};

}  // namespace ringdp
