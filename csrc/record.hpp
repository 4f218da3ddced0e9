// What a rank is doing and did last, readable by its peers and `ringdp doctor` even while it is stuck.
//
//   RankRecord = its progress | its finding | the message that it waits for
//              | Call[kCalls], call k in place k % kCalls
//
// It holds only numbers and text of a fixed size; readers check each of them and trust none. A record has
// a single writer. Only `pid`, `begun` and a Call's fields order other memory; the rest is for reports, so
// it is relaxed.
#pragma once

#include <time.h>

#include <array>
#include <cstring>
#include <optional>

#include "fifo.hpp"

namespace ringdp {

constexpr std::size_t kSite = 96;     // bytes for "file:line" of the user's call, padded with zeros
constexpr std::uint64_t kCalls = 32;  // calls that a record keeps: more than fit in a rank's FIFOs

// Identifies a message; the receiver compares it with what it expects.
struct Stamp {
  std::uint64_t number;
  std::uint64_t bytes;
  std::uint64_t digest;   // of the kinds of this collective and all before it: see Progress::begin
  std::uint64_t arrival;  // ns, over an emulated link: when the receiver may read it
  std::uint64_t more;     // whether more slabs of this chunk follow
};

// One collective as the user called it.
struct CallInfo {
  std::uint64_t number, kind, elements;
  std::array<std::uint64_t, kSite / 8> site;
};

// A CallInfo in shared memory, under a sequence lock.
class alignas(kLine) Call {
 public:
  void write(std::uint64_t number, std::uint64_t kind, std::uint64_t elements, const char* site) {
    // release, all of them: a reader that sees any field of the new call also sees the cleared count
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

  // Marks the call as over. relaxed: no field changes with it.
  void clear() { count_.store(0, std::memory_order_relaxed); }

  // Returns the call, or nothing if there is none or it is half written.
  std::optional<CallInfo> read() const {
    // acquire, all of them: if the count is the same before and after, all fields belong to that call
    const auto count = count_.load(std::memory_order_acquire);
    if (count == 0) return std::nullopt;
    CallInfo info{count - 1, kind_.load(std::memory_order_acquire),
                  elements_.load(std::memory_order_acquire), {}};
    for (std::size_t i = 0; i < kSite / 8; ++i) info.site[i] = site_[i].load(std::memory_order_acquire);
    if (count_.load(std::memory_order_relaxed) != count) return std::nullopt;
    return info;
  }

 private:
  std::atomic<std::uint64_t> count_;  // 1 + its number; 0: none, or half written
  std::atomic<std::uint64_t> kind_, elements_;
  std::atomic<std::uint64_t> site_[kSite / 8];
};

// The mismatched message behind a failure. Written once, before the header's `failed` publishes it.
struct Finding {
  Stamp expected, found;
};

struct alignas(kLine) RankRecord {
  std::atomic<std::uint64_t> begun, finished;  // collectives; one between the two is running
  std::atomic<std::uint64_t> changed;          // when either last changed, in ns of `coarse_clock`
  std::atomic<std::int32_t> round, peer;       // of the running one; peer: whom it waits for, or -1
  std::atomic<std::int32_t> pid;               // 0 before it has attached, -1 once it has closed
  Finding finding;
  Call message;                                // a send or recv that has waited for a while
  Call calls[kCalls];

  // Records that the rank is about to run this collective. 15 ns.
  void begin(std::uint64_t number, std::uint64_t kind, std::uint64_t elements, const char* site) {
    calls[number % kCalls].write(number, kind, elements, site);
    round.store(-1, std::memory_order_relaxed);
    peer.store(-1, std::memory_order_relaxed);
    changed.store(coarse_clock(), std::memory_order_relaxed);
    begun.store(number + 1, std::memory_order_release);  // release: the call before the count
  }
  void end() {
    changed.store(coarse_clock(), std::memory_order_relaxed);
    finished.store(begun.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
  std::optional<CallInfo> call(std::uint64_t number) const {
    const auto found = calls[number % kCalls].read();
    return found && found->number == number ? found : std::nullopt;
  }

  // CLOCK_MONOTONIC, which all processes of a host share, to within 4 ms at a quarter of the cost.
  static std::uint64_t coarse_clock() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return std::uint64_t(now.tv_sec) * 1'000'000'000u + now.tv_nsec;
  }
};

// The records of all ranks, in a communicator's own segment or in one seen from outside.
struct Records {
  virtual int ranks() const = 0;
  virtual const RankRecord& record(int rank) const = 0;
};

}  // namespace ringdp
