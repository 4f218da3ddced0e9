// What a rank did and when, for whoever traces it: an entry for every row, tile and wait, and one for
// every collective. One thread writes and one reads, so a full tape loses entries and counts them; it
// waits for nobody. A collective is on tape if tracing was on when it began, so that in the middle of
// one the question costs a look at a plain flag of this thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace ringdp {

using Clock = std::chrono::steady_clock;

// ns on the clock that all processes of a machine share
inline std::uint64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

// So many seconds from now on.
inline Clock::time_point after(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// transport.tape's order. `call` and `failed` are followed by kCallCells - 1 cells of a CallCells.
enum class What : std::int32_t { row, lay_out, read, fold, take, collect, wait, call, failed };

struct Entry {
  std::uint64_t begin, end;  // ns
  std::uint64_t number;      // of the collective; of a wait: its ticket
  std::uint64_t bytes;       // of a call: its elements
  What what;
  std::int32_t round, from, to;  // peers, or -1
  std::int32_t src, dst;         // chunks, or -1; of a wait: src is the thread
  std::int32_t piece;            // which slab or tile
  std::uint32_t waited;          // for peers, in 100 ns
};
static_assert(sizeof(Entry) == 64);

struct CallCells {
  std::uint64_t issued, ticket, kind, rows;  // rows: their address, 0 for an exchange
  std::uint64_t background;
  char site[152];  // zeros at the end
};
constexpr std::size_t kCallCells = 1 + sizeof(CallCells) / sizeof(Entry);
static_assert(sizeof(CallCells) % sizeof(Entry) == 0);

class Tape {
 public:
  bool active = false;  // of the thread that writes: whether the collective under way is on tape

  bool on() const { return on_.load(std::memory_order_acquire); }  // acquire: the room came first

  // Before `switch_on`, which the writer may see at any time, the room is there to stay.
  void switch_on(std::size_t entries) {
    if (cells_.empty()) cells_.resize(entries);
    on_.store(true, std::memory_order_release);
  }
  void switch_off() { on_.store(false, std::memory_order_relaxed); }

  void begin() {
    active = on();
    if (active) start_ = mark_ = now(), waited_ = call_waited_ = 0;
  }

  // What has been done since the last entry.
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

  // The reader's: all entries since the last time.
  std::string take() {
    if (cells_.empty()) return {};
    const auto tail = tail_.load(std::memory_order_relaxed);
    const auto head = head_.load(std::memory_order_acquire);  // acquire: the cells before their count
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
    const auto head = head_.load(std::memory_order_relaxed);
    // acquire: the reader has done with the cells that we refill
    if (head + count - tail_.load(std::memory_order_acquire) > cells_.size()) {
      lost_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    for (std::size_t i = 0; i < count; ++i) cells_[(head + i) % cells_.size()] = entries[i];
    head_.store(head + count, std::memory_order_release);  // release: the cells before their count
  }

  std::atomic<bool> on_{false};
  std::vector<Entry> cells_;
  std::atomic<std::uint64_t> head_{0}, tail_{0}, lost_{0};
  std::uint64_t start_ = 0, mark_ = 0;               // of the collective; the last entry's end
  std::uint64_t waited_ = 0, call_waited_ = 0;       // ns since `mark_`; before it
};

}  // namespace ringdp
