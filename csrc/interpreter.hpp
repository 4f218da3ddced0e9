// Runs one rank's rows over the FIFO channels, slab by slab: the whole program on the first slab of
// every chunk, then on the second, ... so that a channel needs `depth` slots and not a chunk's worth.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "combine.hpp"
#include "segment.hpp"

namespace ringdp {

enum class Failure : std::uint32_t { none, lost, timeout, mismatch, stopped, aborted };

// Thrown through the interpreter; becomes a Python error at the edge.
struct Failed {
  Failure failure;
  int rank = -1;              // the rank at fault, or that gave up first
  Stamp expected{}, found{};  // of a message that is none of ours; else zeros
  int reporter = -1;          // the rank that found it; -1 is this one
};

enum Flag : std::int32_t { kReduce = 1, kStore = 2 };

struct Row {  // schedule.program.Row
  std::int32_t round, recv_peer, send_peer, src_chunk, dst_chunk, flags;
};

struct Job {
  const Row* rows;
  std::size_t row_count;
  const std::int64_t* bounds;  // [chunks + 1], in elements
  int chunks, scratch;
  std::byte* buffer;
  Dtype dtype;
  std::uint64_t number, kind;
  const char* site;  // [kSite]
};

class Interpreter {
 public:
  Interpreter(Segment& segment, int rank, const std::atomic<bool>& stop)
      : segment_(segment), record_(segment.record(rank)), rank_(rank), stop_(stop) {}

  // What another rank has given up for.
  std::optional<Failed> reported() {
    // acquire: pairs with Progress::announce
    const auto f = segment_.header().failed.load(std::memory_order_acquire);
    if (f == 0) return std::nullopt;
    Failed failed{Failure(f >> 32), int(f & 0xffff) - 1, {}, {}, int(f >> 16 & 0xffff) - 1};
    if (failed.reporter >= 0 && failed.reporter < segment_.ranks()) {
      const Finding& finding = segment_.record(failed.reporter).finding;
      failed.expected = finding.expected;
      failed.found = finding.found;
    }
    return failed;
  }

  std::atomic<std::uint64_t> sent_bytes{0};

  void run(const Job& job) {
    record_.begin(job.number, job.kind, job.bounds[job.chunks], job.site);
    const std::size_t slab = segment_.slab() / job.dtype.size;  // in elements
    std::size_t longest = 0;
    for (int c = 0; c < job.chunks; ++c)
      longest = std::max(longest, std::size_t(job.bounds[c + 1] - job.bounds[c]));
    if (scratch_.size() < job.scratch * segment_.slab()) scratch_.resize(job.scratch * segment_.slab());
    scratch_count_.assign(job.scratch, 0);
    for (std::size_t first = 0; first == 0 || first < longest; first += slab)
      for (std::size_t i = 0; i < job.row_count; ++i) run_row(job, job.rows[i], first, slab);
    record_.end();
  }

 private:
  struct Piece {
    std::byte* data;
    std::size_t count;
  };

  void run_row(const Job& job, const Row& row, std::size_t first, std::size_t slab) {
    record_.round.store(row.round, std::memory_order_relaxed);
    const auto size = job.dtype.size;
    const bool receives = row.recv_peer >= 0, sends = row.send_peer >= 0;
    Piece target = row.dst_chunk >= 0 ? piece(job, row.dst_chunk, first, slab) : Piece{};
    Piece value = receives ? Piece{} : piece(job, row.src_chunk, first, slab);
    if (receives) {
      Stamp& stamp = receive(row.recv_peer);
      const bool any = row.dst_chunk >= job.chunks && !(row.flags & kReduce);
      const Stamp expected{job.number, any ? stamp.bytes : target.count * size, job.kind};
      if (stamp.number != expected.number || stamp.kind != expected.kind ||
          stamp.bytes != expected.bytes || stamp.bytes > segment_.slab())
        throw Failed{Failure::mismatch, row.recv_peer, expected, stamp};
      value = {reinterpret_cast<std::byte*>(&stamp + 1), stamp.bytes / size};
    }
    if (row.flags & kStore && row.dst_chunk >= job.chunks)
      scratch_count_[row.dst_chunk - job.chunks] = target.count = value.count;
    std::byte* out = sends ? outgoing(row.send_peer) : nullptr;
    if (row.flags & kReduce) {
      std::byte* sum = row.flags & kStore ? target.data : out;
      job.dtype.combine(sum, target.data, value.data, value.count);
      if (sends && sum != out) copy(out, sum, value.count * size);
    } else {
      if (row.flags & kStore) copy(target.data, value.data, value.count * size);
      if (sends) copy(out, value.data, value.count * size);
    }
    if (sends) publish(row.send_peer, {job.number, value.count * size, job.kind});
    if (receives) release(row.recv_peer);
  }

  // An empty tensor's pointer is null, which memcpy must not be given.
  static void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    if (bytes) std::memcpy(to, from, bytes);
  }

  // The elements [first, first + slab) of a chunk; a scratch chunk holds one slab at a time.
  Piece piece(const Job& job, int chunk, std::size_t first, std::size_t slab) {
    if (chunk >= job.chunks) {
      const int s = chunk - job.chunks;
      return {scratch_.data() + s * segment_.slab(), scratch_count_[s]};
    }
    const std::size_t length = job.bounds[chunk + 1] - job.bounds[chunk];
    const std::size_t begin = std::min(first, length), end = std::min(first + slab, length);
    return {job.buffer + (job.bounds[chunk] + begin) * job.dtype.size, end - begin};
  }

  Stamp& receive(int peer) {
    Cursors& c = segment_.cursors(peer, rank_);
    const auto tail = c.tail.load(std::memory_order_relaxed);  // only we write it
    // acquire: the slot's contents, written before the release of `head`, are visible now
    await(peer, [&] { return c.head.load(std::memory_order_acquire) > tail; });
    return segment_.slot(peer, rank_, tail);
  }
  void release(int peer) {
    Cursors& c = segment_.cursors(peer, rank_);
    // release: our reads of the slot come before the producer's next write to it
    c.tail.store(c.tail.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }
  std::byte* outgoing(int peer) {
    Cursors& c = segment_.cursors(rank_, peer);
    const auto head = c.head.load(std::memory_order_relaxed);  // only we write it
    // acquire: pairs with `release`, so that the consumer has done with the slot that we refill
    await(peer, [&] {
      return head - c.tail.load(std::memory_order_acquire) < std::uint64_t(segment_.depth());
    });
    return reinterpret_cast<std::byte*>(&segment_.slot(rank_, peer, head) + 1);
  }
  void publish(int peer, Stamp stamp) {
    Cursors& c = segment_.cursors(rank_, peer);
    const auto head = c.head.load(std::memory_order_relaxed);
    segment_.slot(rank_, peer, head) = stamp;
    c.head.store(head + 1, std::memory_order_release);  // release: the slot before its count
    sent_bytes.fetch_add(stamp.bytes, std::memory_order_relaxed);
  }

  // Spins a little, then yields, then sleeps, so that more ranks than cores make progress; looks
  // around every few milliseconds for a reason to give up.
  template <class Ready>
  void await(int peer, Ready ready) {
    for (int i = 0; i < 256; ++i) {
      if (ready()) return;
      pause();
    }
    record_.peer.store(peer, std::memory_order_relaxed);
    for (int i = 0; i < 64; ++i) {
      if (ready()) return record_.peer.store(-1, std::memory_order_relaxed);
      sched_yield();
    }
    for (int i = 0;; ++i) {
      if (ready()) return record_.peer.store(-1, std::memory_order_relaxed);
      if (i % 32 == 0) give_up_if_hopeless(peer, ready);
      timespec nap{0, i < 64 ? 20'000 : 100'000};
      nanosleep(&nap, nullptr);
    }
  }

  template <class Ready>
  void give_up_if_hopeless(int peer, Ready ready) {
    if (stop_.load(std::memory_order_relaxed)) throw Failed{Failure::stopped, rank_};
    if (auto f = reported()) throw *f;
    if (!segment_.gone(peer) || ready()) return;  // its last messages came after our last look
    if (auto f = reported()) throw *f;            // it ended because of what it reported
    throw Failed{Failure::lost, peer};
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  Segment& segment_;
  RankRecord& record_;
  int rank_;
  const std::atomic<bool>& stop_;
  std::vector<std::byte> scratch_;
  std::vector<std::size_t> scratch_count_;
};

}  // namespace ringdp
