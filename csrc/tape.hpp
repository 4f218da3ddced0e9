// A trace of what a rank did and when: an entry for every row, tile and wait, and one for every collective.
// One thread writes and one reads. A full tape never blocks: it drops entries and counts them. A collective
// is on tape if tracing was on when it began, so checking within one costs only a read of the writer's
// plain flag.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace ringdp {

using Clock = std::chrono::steady_clock;

// Returns ns on a clock that all processes of a machine share.
inline std::uint64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

// Returns the time so many seconds from now.
inline Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// In the order of transport.tape.WHAT. A CallCells follows `call` and `failed`, in kCallCells - 1 cells.
enum class What : std::int32_t { row, lay_out, read, fold, take, collect, wait, call, failed };

struct Entry {
  std::uint64_t begin, end;  // ns
  std::uint64_t number;      // of the collective; of a wait: its ticket
  std::uint64_t bytes;       // of a call: its elements
  What what;
  std::int32_t round, from, to;  // peers, or -1
  std::int32_t src, dst;         // chunks, or -1; of a wait: src is the thread
  std::int32_t piece;            // index of the slab or tile
  std::uint32_t waited;          // for peers, in units of 100 ns
};
static_assert(sizeof(Entry) == 64);

struct CallCells {
  std::uint64_t issued, ticket, kind, rows;  // rows: their address, 0 for an exchange
  std::uint64_t background;
  char site[152];  // padded with zeros
};
constexpr std::size_t kCallCells = 1 + sizeof(CallCells) / sizeof(Entry);
static_assert(sizeof(CallCells) % sizeof(Entry) == 0);

class Tape {
 public:
  bool active = false;  // the writer's: whether the running collective is on tape

  bool on() const { return on_.load(std::memory_order_acquire); }  // acquire: sees the allocated cells

  // Allocates the cells, once, and starts recording. The writer may notice at any time.
  void switch_on(std::size_t entries) {
    if (cells_.empty()) cells_.resize(entries);
    on_.store(true, std::memory_order_release);  // release: the cells before the flag
  }
  void switch_off() { on_.store(false, std::memory_order_relaxed); }  // relaxed: the cells stay

  void begin() {
    active = on();
    if (active) start_ = mark_ = now(), waited_ = call_waited_ = 0;
  }

  // Records what was done since the last entry.
  void add(What what, std::uint64_t number, std::uint64_t bytes, std::int32_t round, std::int32_t from,
           std::int32_t to, std::int32_t src, std::int32_t dst, std::int32_t piece) {
    const auto end = now();
    const Entry entry{mark_, end, number, bytes, what, round, from, to, src, dst, piece, coarse(waited_)};
    write(&entry, 1);
    mark_ = end, call_waited_ += waited_, waited_ = 0;
  }

  void call(bool ended, std::uint64_t number, std::uint64_t elements, const CallCells& more) {
    Entry cells[kCallCells]{{start_, now(), number, elements, ended ? What::call : What::failed, -1, -1,
                             -1, -1, -1, -1, coarse(call_waited_ + waited_)}};
    std::memcpy(static_cast<void*>(cells + 1), &more, sizeof more);
    write(cells, kCallCells);
    active = false;
  }

  void wait(std::uint64_t begin, std::uint64_t ticket, std::int32_t thread) {
    const Entry entry{begin, now(), ticket, 0, What::wait, -1, -1, -1, thread, -1, -1, 0};
    write(&entry, 1);
  }

  void waited(std::uint64_t ns) { waited_ += ns; }

  // For the reader: returns all entries since the last call.
  std::string take() {
    if (cells_.empty()) return {};
    const auto tail = tail_.load(std::memory_order_relaxed);  // relaxed: our own
    const auto head = head_.load(std::memory_order_acquire);  // acquire: the cells before the count
    std::string taken;
    taken.reserve((head - tail) * sizeof(Entry));
    for (auto at = tail; at < head; ++at)
      taken.append(reinterpret_cast<const char*>(&cells_[at % cells_.size()]), sizeof(Entry));
    tail_.store(head, std::memory_order_release);  // release: our reads before they are overwritten
    return taken;
  }
  std::uint64_t lost() const { return lost_.load(std::memory_order_relaxed); }

 private:
  static std::uint32_t coarse(std::uint64_t ns) {
    return std::uint32_t(std::min<std::uint64_t>(ns / 100, std::numeric_limits<std::uint32_t>::max()));
  }

  void write(const Entry* entries, std::size_t count) {
    const auto head = head_.load(std::memory_order_relaxed);  // relaxed: our own
    // acquire: the reader has read the cells that we overwrite
    if (head + count - tail_.load(std::memory_order_acquire) > cells_.size()) {
      lost_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    for (std::size_t i = 0; i < count; ++i) cells_[(head + i) % cells_.size()] = entries[i];
    head_.store(head + count, std::memory_order_release);  // release: the cells before the count
  }

  std::atomic<bool> on_{false};
  std::vector<Entry> cells_;
  std::atomic<std::uint64_t> head_{0}, tail_{0}, lost_{0};
  std::uint64_t start_ = 0, mark_ = 0;          // start of the collective; end of the last entry
  std::uint64_t waited_ = 0, call_waited_ = 0;  // ns waited since `mark_`; before it
};

}  // namespace ringdp
