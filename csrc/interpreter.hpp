// Runs one rank's rows over the FIFO channels, slab by slab: the whole program on the first slab of
// every chunk, then on the second, and so on, so a channel needs only `depth` slots, not a whole chunk.
//
// Over a link, where messages take long, each pass takes `stride` slabs and channels have `stride` times
// the slots: a row's first slab travels while the row sends its next ones.
//
// A row ends with the last slab of its chunk. Both ends of a transfer know that from the chunk's length,
// so ranks need not agree on the lengths of chunks that they do not exchange. Ending rows early cannot
// stall: leaving out both ends of a message only removes waits.
//
// It can be interrupted at a row and resumed, as a row waits before it changes anything. Between two
// passes it stops if its time slice is over.
//
// Note [one rounding]
//   A chunk of 16-bit floats that is reduced into stays in float32 until its value is read: sent, copied,
//   added elsewhere, or at the end. So a sum made in one place is rounded once, and a value that is sent
//   has the same bits on both ranks. The simulator does the same.
#pragma once

#include <algorithm>
#include <vector>

#include "combine.hpp"
#include "link.hpp"
#include "peers.hpp"

namespace ringdp {

enum Flag : std::int32_t { kReduce = 1, kStore = 2 };

struct Row {  // schedule.program.Row
  std::int32_t round, recv_peer, send_peer, src_chunk, dst_chunk, flags;
};

// A program and its buffer.
struct Rows {
  const Row* rows;
  std::size_t count;
  const std::int64_t* bounds;  // [chunks + 1], in elements
  int chunks, scratch;
  std::byte* buffer;
};

class Interpreter {
 public:
  Interpreter(Segment& segment, int rank, Peers& peers, Put& put, Link link)
      : segment_(segment), rank_(rank), peers_(peers), put_(put), link_(link), stride_(link.stride) {}

  void begin(const Rows& job, const Dtype& dtype, std::uint64_t number, std::uint64_t digest) {
    job_ = job, dtype_ = dtype, number_ = number, digest_ = digest;
    slab_ = segment_.slab() / dtype.size;
    const std::size_t scratch = std::size_t(job.scratch) * stride_;
    scratch_.resize(std::max(scratch_.size(), scratch * segment_.slab()));
    scratch_pieces_.assign(scratch, {});
    unfinished_.assign(job.count, true);
    left_ = job.count;
    if (!link_.is_none()) find_messages(), late_ = 0;
    sums_.resize(std::max(sums_.size(), std::size_t(job.chunks + job.scratch) * stride_));
    for (auto& sum : sums_) sum.clear();
    first_ = row_ = turn_ = 0;
  }

  void run() {
    while (left_ > 0) {
      for (; row_ < job_.count; ++row_, turn_ = 0)
        for (; turn_ < stride_ && unfinished_[row_]; ++turn_)
          if (!run_row(job_.rows[row_])) unfinished_[row_] = false, --left_;
      for (; turn_ < stride_; ++turn_)
        for (int c = 0; c < job_.chunks; ++c) round(c);
      row_ = turn_ = 0;
      first_ += stride_ * slab_;
      if (left_ > 0) peers_.check_slice();
    }
  }

 private:
  // One slab of a chunk.
  struct Piece {
    std::byte* data = nullptr;
    std::size_t count = 0;
    bool more = false;  // whether more slabs of its chunk follow
    int from = -1;      // the peer that gave the count; -1: this rank
  };

  // Runs a row on one slab. Returns whether the row goes on with the next slab.
  bool run_row(const Row& row) {
    peers_.round(row.round);
    const auto size = dtype_.size;
    const bool receives = row.recv_peer >= 0, sends = row.send_peer >= 0;
    std::byte* out = sends ? room(row.send_peer) : nullptr;
    Piece target = row.dst_chunk >= 0 ? piece(row.dst_chunk) : Piece{};
    Piece value{};
    if (receives) {
      Stamp& slot = receive(row.recv_peer);
      const Stamp stamp = slot;  // copied, so that a peer cannot change it after the check
      const bool any = row.dst_chunk >= job_.chunks && !(row.flags & kReduce);
      const Stamp expected{number_, any ? stamp.bytes : target.count * size, digest_, 0,
                           any ? stamp.more : target.more};
      if (stamp.number != expected.number || stamp.digest != expected.digest ||
          stamp.bytes != expected.bytes || stamp.more != expected.more ||
          stamp.bytes > segment_.slab() || stamp.bytes % size)
        throw Failed{Failure::mismatch, row.recv_peer, expected, stamp};
      value = {Fifo<Stamp>::data(slot), stamp.bytes / size, stamp.more != 0, row.recv_peer};
    } else {
      round(row.src_chunk);
      value = piece(row.src_chunk);
    }
    // Scratch takes any length, so a value read from it may not fit the chunk.
    const bool exact = row.flags & kReduce || (row.flags & kStore && row.dst_chunk < job_.chunks);
    if (exact && (value.count != target.count || value.more != target.more))
      throw Failed{Failure::mismatch, value.from, {number_, target.count * size, digest_, 0, target.more},
                   {number_, value.count * size, digest_, 0, value.more}};
    if (row.flags & kReduce) {
      reduce(row, target, value, out);
    } else {
      if (row.flags & kStore) store(row.dst_chunk, target, value);
      if (sends) put_(out, value.data, value.count * size);
    }
    if (sends) send(row.send_peer, value.count * size, value.more);
    if (receives) segment_.channel(row.recv_peer, rank_).pop();
    if (peers_.tape.active) note(row, value.count * size);
    return value.more;
  }

  void note(const Row& row, std::size_t bytes) {
    peers_.tape.add(What::row, number_, bytes, row.round, row.recv_peer, row.send_peer, row.src_chunk,
                    row.dst_chunk, std::int32_t(first_ / slab_ + turn_));
  }

  void store(int chunk, Piece target, Piece value) {
    if (chunk >= job_.chunks)
      scratch_pieces_[scratch_at(chunk)] = {target.data, value.count, value.more, value.from};
    sum_of(chunk).clear();
    copy_bytes(target.data, value.data, value.count * dtype_.size);
  }

  void reduce(const Row& row, Piece target, Piece value, std::byte* out) {
    const bool stores = row.flags & kStore;
    if (!dtype_.wide()) {
      std::byte* sum = stores ? target.data : out;
      dtype_.combine(sum, target.data, value.data, value.count);
      if (out && sum != out) put_(out, sum, value.count * dtype_.size);
      return;
    }
    std::vector<float>& sum = sum_of(row.dst_chunk);  // see Note [one rounding]
    if (sum.empty()) {
      sum.resize(target.count);
      dtype_.widen(sum.data(), target.data, target.count);
    }
    dtype_.accumulate(sum.data(), value.data, value.count);
    if (!out) return;
    narrow(out, sum);
    if (stores) copy_bytes(target.data, out, value.count * dtype_.size);
  }

  // Rounds the chunk's sum, if it has one, because its value is about to be read.
  void round(int chunk) {
    std::vector<float>& sum = sum_of(chunk);
    if (!sum.empty()) narrow(piece(chunk).data, sum);
  }

  void narrow(std::byte* to, std::vector<float>& sum) {
    if (dtype_.divide) dtype_.divide(sum.data(), sum.size(), segment_.ranks());
    dtype_.narrow(to, sum.data(), sum.size());
    sum.clear();
  }

  std::size_t scratch_at(int chunk) const { return (chunk - job_.chunks) * stride_ + turn_; }
  std::vector<float>& sum_of(int chunk) { return sums_[chunk * stride_ + turn_]; }

  // Returns the current slab of a chunk. A scratch chunk holds one slab per turn.
  Piece piece(int chunk) {
    if (chunk >= job_.chunks) {
      const Piece& held = scratch_pieces_[scratch_at(chunk)];
      return {scratch_.data() + scratch_at(chunk) * segment_.slab(), held.count, held.more, held.from};
    }
    const std::size_t length = job_.bounds[chunk + 1] - job_.bounds[chunk], at = first_ + turn_ * slab_;
    const std::size_t begin = std::min(at, length), end = std::min(at + slab_, length);
    return {job_.buffer + (job_.bounds[chunk] + begin) * dtype_.size, end - begin, end < length};
  }

  Stamp& receive(int peer) {
    const auto incoming = segment_.channel(peer, rank_);
    const auto began = !link_.is_none() ? now() - late_ : 0;
    peers_.await(peer, [&] { return !incoming.empty(); });
    Stamp& stamp = incoming.front();
    if (!link_.is_none()) {
      const auto due = std::max(began, now() < stamp.arrival ? await_arrival(incoming) : stamp.arrival);
      late_ = now() - due;
    }
    return stamp;
  }
  // Sleeps once for all slabs in flight to this row: every nap takes the core from the computing thread.
  std::uint64_t await_arrival(Fifo<Stamp> incoming) {
    const auto last = std::min<std::uint64_t>(incoming.waiting(), stride_ - turn_) - 1;
    const auto moment = incoming.front(last).arrival;
    peers_.await_time(moment);
    return moment;
  }
  std::byte* room(int peer) {
    const auto outgoing = segment_.channel(rank_, peer);
    peers_.await(peer, [&] { return !outgoing.full(); });
    return outgoing.data(outgoing.back());
  }
  void send(int peer, std::size_t bytes, bool more) {
    const auto outgoing = segment_.channel(rank_, peer);
    outgoing.back() = {number_, bytes, digest_, arrival(bytes), more};
    outgoing.push();
    peers_.count_sent(bytes);
  }

  // Returns when a slab that is sent now arrives, in ns: it queues behind what this rank sent before.
  std::uint64_t arrival(std::size_t bytes) {
    if (link_.is_none()) return 0;
    const bool opens = first_ + turn_ == 0 && opens_[row_];
    const double takes = (opens ? link_.latency : 0) + double(bytes) / link_.bandwidth;
    return port_free_ = std::max(port_free_, now() - late_) + std::uint64_t(takes * 1e9);
  }

  // Finds the rows that begin a message (see Note [one message]): the first to send to their peer in a
  // round. A fused row sends in the round after the one in which it receives.
  void find_messages() {
    opens_.assign(job_.count, false);
    std::vector<int> last(segment_.ranks(), -1);  // by peer: the round of the last message
    for (std::size_t r = 0; r < job_.count; ++r) {
      const Row& row = job_.rows[r];
      if (row.send_peer < 0) continue;
      const int round = row.round + (row.recv_peer >= 0);
      opens_[r] = last[row.send_peer] != round;
      last[row.send_peer] = round;
    }
  }

  Segment& segment_;
  int rank_;
  Peers& peers_;
  Put& put_;
  Link link_;
  std::uint64_t port_free_ = 0;
  std::uint64_t late_ = 0;  // ns by which this rank lags the network: naps end late, messages do not

  Rows job_{};
  Dtype dtype_{};
  std::uint64_t number_ = 0, digest_ = 0;
  std::size_t slab_ = 0;             // in elements
  std::size_t stride_;
  std::size_t first_ = 0;            // of this pass: the first element of its `stride` slabs
  std::size_t row_ = 0, turn_ = 0;   // the current row, and the slab's index in the pass
  std::size_t left_ = 0;             // rows that have not ended
  std::vector<char> unfinished_;     // by row
  std::vector<char> opens_;          // by row, over a link: whether it begins a message
  std::vector<std::byte> scratch_;
  std::vector<Piece> scratch_pieces_;
  std::vector<std::vector<float>> sums_;  // by slab; empty: the chunk itself holds the value
};

}  // namespace ringdp
