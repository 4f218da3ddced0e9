// The state of a collective that uses no channels, and a rank's message to all others: in lines that carry
// their own flags, or laid out whole. direct.hpp says which is used when.
//
// Note [two slots are enough]
//   Message k overwrites message k-2. A rank writes message k after it has finished collective k-1, for
//   which it has read every peer's message k-1; and a peer writes its message k-1 only after it has
//   finished reading the messages k-2.
//
// Note [short messages]
//   1 KiB took 0.21 us: writing 0.05, waiting 0.07, reading 0.06. 4 KiB took 0.57: 0.20, 0.12, 0.18 (two
//   cores that share a cache). Tried without gain: prefetching the lines of the next message for writing,
//   after a call (0.33, 0.83) or before writing (0.31, 0.91); prefetching all of the peer's lines before
//   reading them (0.20, 0.60: the same); non-temporal stores (0.51, 1.28); lines with flags beyond kTiny.
//
// Note [room]
//   A cache line that a peer has read stays in the peer's cache until it is evicted, and must be fetched
//   from there before it is written again. 64 KiB took 9.4 us through two slots and 4.2 through eight;
//   4 MiB took 475 us through tiles of 64 KiB and 180 through tiles of 256 KiB (two cores with 1 MiB of
//   cache each and 32 MiB shared). So long messages cycle through more memory than such a cache holds.
//   Short messages, which the caches keep anyway, use two slots: there, a line from memory costs more.
//
//   A core with 2 MiB of cache reads what another has just written at 18 GB/s, and at 25 from four places
//   at once, as prefetching stops at page ends. Rejected: summing in four streams gained 5 to 15 % from
//   128 KiB to 1 MiB and lost as much elsewhere, and copying so lost up to 60 %. Having both of two ranks
//   add up everything, so that no results are collected, gained 5 % up to 1 MiB and lost 10 % beyond.
#pragma once

#include <algorithm>
#include <vector>

#include "combine.hpp"
#include "peers.hpp"

namespace ringdp {

enum class Collective { all_reduce, reduce_scatter, all_gather, all_to_all };  // base.DIRECT's order

// A collective and one rank's buffers. Shard r of the whole buffer is [bounds[r], bounds[r + 1]). In an
// uneven all_to_all every rank has bounds of its own, which are its message, and `received`.
struct Exchange {
  Collective collective;
  const std::int64_t* bounds;  // [ranks + 1], in elements
  std::byte* whole;            // all_reduce: in place; all_gather: output; else the input
  std::byte* part;             // all_gather: input; else output (all_to_all: pieces of this shard's length)
  int root = -1;               // the only reader of an all_gather, or the only one read in an all_to_all
  const std::int64_t* received = nullptr;  // [ranks + 1]: an uneven all_to_all's pieces in `part`
};

// Memory that all ranks have mapped, at `base` in this process.
struct Arena {
  std::byte* base = nullptr;
  std::size_t bytes = 0;

  std::int64_t offset(const std::byte* at) const {
    return at >= base && at < base + bytes ? at - base : -1;
  }
};

class Messages {
 public:
  Messages(Segment& segment, int rank, Peers& peers, Put& put, Arena arena)
      : segment_(segment), rank_(rank), ranks_(segment.ranks()), peers_(peers), put_(put), arena_(arena),
        from_(ranks_), offsets_(ranks_), places_(ranks_), inbox_(kTiny * ranks_) {}

 protected:
  static constexpr std::size_t kShort = 16 << 10;  // bytes of the longest message in two slots
  // Bytes of the longest message that is copied although it lies in the arena: reading it in place saves
  // less than one more wait for all costs. (all_reduce of 8 KiB: 2.2 us copied, 1.3 in place; of 256 KiB
  // 25 and 8; two cores.)
  static constexpr std::size_t kCopied = 4 << 10;

  void begin(const Exchange& job, const Dtype& dtype, std::uint64_t number, std::uint64_t digest) {
    job_ = job, dtype_ = dtype;
    heading_ = {number, digest, uneven() ? 0 : std::uint64_t(job.bounds[ranks_]), 0};
    for (int r = 1; r < ranks_ && !uneven(); ++r)  // FNV-1a, a number at a time
      heading_.cuts = (heading_.cuts ^ std::uint64_t(job.bounds[r])) * 0x100000001b3;
    step_ = 0;
  }

  bool gathers() const { return job_.collective == Collective::all_gather; }
  bool permutes() const { return job_.collective == Collective::all_to_all; }
  bool folds() const { return !gathers() && !permutes(); }
  bool uneven() const { return job_.received; }
  bool reads() const { return !gathers() || job_.root < 0 || job_.root == rank_; }
  bool is_read(int r) const { return !permutes() || job_.root < 0 || job_.root == r; }

  // Returns the bytes that this rank sends by the `direct` schedule.
  std::size_t sent() const {
    const auto own = bytes(rank_), others = bytes(0, ranks_) - own;
    const std::size_t readers = job_.root < 0 ? ranks_ - 1 : job_.root != rank_;
    switch (job_.collective) {
      case Collective::all_reduce: return others + own * (ranks_ - 1);
      case Collective::reduce_scatter: return others;
      case Collective::all_gather: return own * readers;
      case Collective::all_to_all: return is_read(rank_) ? others : 0;
    }
    return 0;
  }

  std::size_t begin_of(int shard) const { return job_.bounds[shard] * dtype_.size; }
  std::size_t bytes(int shard) const { return begin_of(shard + 1) - begin_of(shard); }
  std::size_t bytes(int first, int last) const { return begin_of(last) - begin_of(first); }
  // Returns the bytes of the longest message to lay out whole. Every rank reads all of a whole message; with
  // tiles it reads only its own shard, and reads the arena in place. But a whole message never makes its
  // sender wait.
  std::size_t whole_limit() const {
    return job_.collective == Collective::all_reduce ? kWhole / (ranks_ - 1) : kShort;
  }

  // Returns the bytes of r's message; `message` is this rank's.
  std::size_t message_bytes(int r) const {
    if (uneven()) return (ranks_ + 1) * sizeof *job_.bounds;
    return gathers() ? bytes(r) : is_read(r) ? bytes(0, ranks_) : 0;
  }
  const std::byte* message() const {
    return uneven() ? reinterpret_cast<const std::byte*>(job_.bounds) : data();
  }
  const std::byte* data() const { return gathers() ? job_.part : job_.whole; }

  // Returns the bytes of this rank's result.
  std::size_t result_bytes() const {
    if (gathers()) return reads() ? bytes(0, ranks_) : 0;
    return job_.collective == Collective::all_reduce ? bytes(0, ranks_) : bytes(rank_);
  }

  void note(What what, std::size_t size, int from = -1, std::int32_t piece = 0) {
    if (peers_.tape.active)
      peers_.tape.add(what, heading_.number, size, what == What::collect, from, -1, -1, -1, piece);
  }

  // Computes this rank's result from all ranks' messages in `from_`.
  void finish_whole() {
    from_[rank_] = data();
    if (!folds()) {
      for (int r = 0; r < ranks_; ++r)
        if (const auto size = piece_bytes(r)) copy_bytes(piece_of(r), from_[r] + piece_at(), size);
    } else if (job_.collective == Collective::all_reduce) {
      fold(dtype_, job_.whole, from_.data(), ranks_, job_.bounds[ranks_]);
    } else {
      for (auto& at : from_) at += begin_of(rank_);
      fold(dtype_, job_.part, from_.data(), ranks_, bytes(rank_) / dtype_.size);
    }
  }

  // What this rank takes of r's data, unless it folds: its place in the result, its bytes, and its place in
  // the data, which is the same for all r.
  std::byte* piece_of(int r) const {
    if (gathers()) return job_.whole + begin_of(r);
    if (uneven()) return job_.part + job_.received[r] * dtype_.size;
    return job_.part + (job_.root < 0 ? r * bytes(rank_) : 0);
  }
  std::size_t piece_bytes(int r) const {
    if (!reads() || !is_read(r)) return 0;
    if (gathers()) return bytes(r);
    return uneven() ? (job_.received[r + 1] - job_.received[r]) * dtype_.size : bytes(rank_);
  }
  std::size_t piece_at() const { return gathers() ? 0 : begin_of(rank_); }

  void run_lines() {
    const auto flag = std::uint32_t(lines_ % 0xffffffff) + 1;  // never 0, the flag of an unused line
    if (step_ == 0) write_lines(flag), note(What::lay_out, message_bytes(rank_)), step_ = 1;
    for (; step_ < ranks_; ++step_) {
      const int r = (rank_ + step_) % ranks_;
      read_lines(flag, r);
      note(What::read, message_bytes(r), r);
    }
    finish_whole();
    note(What::fold, result_bytes());
    ++lines_;
  }

  void write_lines(std::uint32_t flag) {
    Line* line = segment_.lines(rank_, lines_);
    const std::byte* from = message();
    std::size_t left = message_bytes(rank_), room = sizeof(Line::data) - sizeof(Heading);
    std::memcpy(line->data, &heading_, sizeof(Heading));
    copy_bytes(line->data + sizeof(Heading), from, std::min(left, room));
    while (true) {
      line->flag.store(flag, std::memory_order_release);  // release: the data before the flag
      if (left <= room) return;
      from += room, left -= room, room = sizeof(Line::data), ++line;
      copy_bytes(line->data, from, std::min(left, room));
    }
  }

  // Copies r's message to the inbox. A rank whose call differs may have posted its message instead.
  void read_lines(std::uint32_t flag, int r) {
    const Line* line = segment_.lines(r, lines_);
    std::byte* to = inbox_.data() + r * kTiny;
    from_[r] = to;
    // acquire: the data, written before the flag
    auto there = [&] { return line->flag.load(std::memory_order_acquire) == flag; };
    const Post& post = segment_.board(r).posts[posts_ % 2];
    auto await = [&] {
      // acquire: the heading, and any lines, were written before the count
      peers_.await(r, [&] { return there() || post.count.load(std::memory_order_acquire) == posts_ + 1; });
      if (!there()) throw Failed{Failure::mismatch, r, stamp(heading_), stamp(post.heading)};
    };
    await();
    Heading theirs;
    std::memcpy(&theirs, line->data, sizeof(Heading));
    check(r, theirs);
    std::size_t left = message_bytes(r), room = sizeof(Line::data) - sizeof(Heading);
    copy_bytes(to, line->data + sizeof(Heading), std::min(left, room));
    while (left > room) {
      to += room, left -= room, room = sizeof(Line::data), ++line;
      await();
      copy_bytes(to, line->data, std::min(left, room));
    }
  }

  // Returns false, having moved nothing, if any rank leaves its message in the arena.
  bool run_whole() {
    if (step_ == 0) post_whole(), step_ = 1;
    for (; step_ < ranks_; ++step_) {
      const int r = (rank_ + step_) % ranks_;
      read_post(r);
      if (offsets_[r] >= 0) continue;
      from_[r] = within(segment_.messages(r), kRoom, places_[r], r);
      note(What::read, message_bytes(r), r);
    }
    if (std::any_of(offsets_.begin(), offsets_.end(), [](auto o) { return o >= 0; })) return false;
    finish_whole();
    note(What::fold, result_bytes());
    ++posts_;
    return true;
  }

  void post_whole() {
    const auto size = message_bytes(rank_);
    const auto offset = size > kCopied ? arena_.offset(message()) : -1;
    const auto place = offset < 0 ? std::int64_t(room_for(size)) : -1;
    if (place >= 0) {
      put_(segment_.messages(rank_) + place, message(), size);
      note(What::lay_out, size);
    }
    post(offset, place);
  }

  // Returns where to lay out the next message, clear of the last one. See Note [room].
  std::size_t room_for(std::size_t bytes) {
    if (bytes <= kShort) return posts_ % 2 * kShort;
    if (next_ + bytes > kRoom) next_ = 2 * kShort;
    const auto place = next_;
    next_ += (bytes + kLine - 1) / kLine * kLine;
    return place;
  }

  void post(std::int64_t offset, std::int64_t place = -1) {
    Post& ours = segment_.board(rank_).posts[posts_ % 2];
    ours.heading = heading_;
    ours.began = latest_;
    ours.offset = offsets_[rank_] = offset;
    ours.place = place;
    ours.count.store(posts_ + 1, std::memory_order_release);  // release: message and heading before it
  }

  void read_post(int r, Other other = Other::silent) {
    const Post& theirs = segment_.board(r).posts[posts_ % 2];
    // acquire: the heading, and a message that is laid out whole, were written before the count
    peers_.await(r, [&] { return theirs.count.load(std::memory_order_acquire) == posts_ + 1; }, other);
    check(r, theirs.heading);
    latest_ = std::max(latest_, theirs.began);
    offsets_[r] = theirs.offset;
    places_[r] = theirs.place;
    // bounds are never left in the arena
    if (offsets_[r] >= 0) within(arena_.base, uneven() ? 0 : arena_.bytes, offsets_[r], r);
  }

  // Returns base + offset. Throws unless r's message fits there within `limit` bytes.
  const std::byte* within(const std::byte* base, std::size_t limit, std::uint64_t offset, int r) const {
    if (offset > limit || message_bytes(r) > limit - offset)
      throw Failed{Failure::damaged, r, stamp(heading_), {}};
    return base + offset;
  }

  void check(int r, const Heading& theirs) const {
    if (theirs.number != heading_.number || theirs.digest != heading_.digest ||
        theirs.elements != heading_.elements || theirs.cuts != heading_.cuts)
      throw Failed{Failure::mismatch, r, stamp(heading_), stamp(theirs)};
  }
  Stamp stamp(const Heading& h) const { return {h.number, h.elements * dtype_.size, h.digest, 0, 0}; }

  Segment& segment_;
  int rank_, ranks_;
  Peers& peers_;
  Put& put_;
  Arena arena_;

  Exchange job_{};
  Dtype dtype_{};
  Heading heading_{};
  std::int64_t step_ = 0;
  std::uint64_t latest_ = 0;  // ns, over a link: when the last of the ranks whose post was read began
  std::uint64_t lines_ = 0, posts_ = 0;  // messages so far, the same on every rank
  std::size_t next_ = 2 * kShort;        // where the next long message goes
  std::vector<const std::byte*> from_;   // by rank: where to read its data
  std::vector<std::int64_t> offsets_;    // by rank: of its buffer in the arena, or -1
  std::vector<std::int64_t> places_;     // by other rank: of its whole message, or -1
  std::vector<std::byte> inbox_;
};

}  // namespace ringdp
