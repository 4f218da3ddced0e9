// The direct algorithms, run without channels: every rank lays out what it has on its desk, where all
// others read it, and folds what it owns in rank order. Same values, same order of additions and so
// the same bits as the rows of the `direct` schedule; fewer copies.
//
//   up to kTiny     lines    the message and its flag in the same cache lines
//   up to kWhole    whole    one copy of the message; everyone reads all of them
//   beyond          tiles    A: lay out the parts of tile t for their owners
//                            B: fold, or take, tile t-1; lay out the result
//                            C: collect the results of tile t-2
//
// A buffer in the arena is read where it is, so its rank lays out nothing; where all of them are, an
// owner writes its sums to all buffers itself and nobody collects.
//
// It may stop between two steps and go on later: a step waits before it does anything, or can be
// done again.
//
// Note [two slots are enough]
//   A message is overwritten by the next but one. Whoever writes message k has finished collective
//   k-1, for which it has read every peer's message k-1, and a peer writes that one only when it has
//   finished reading the messages k-2.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "combine.hpp"
#include "peers.hpp"

namespace ringdp {

enum class Collective { all_reduce, reduce_scatter, all_gather, all_to_all };  // base.DIRECT's order

// What one rank has to do. Shard r of the whole buffer is [bounds[r], bounds[r + 1]).
struct Exchange {
  Collective collective;
  const std::int64_t* bounds;  // [ranks + 1], in elements
  std::byte* whole;            // all_reduce: in place; all_gather: output; else the input
  std::byte* part;             // all_gather: input; all_to_all: pieces of this rank's shard's length
  int root = -1;               // who alone reads an all_gather, or is read in an all_to_all
};

// Memory that all ranks have mapped, at `base` in this one.
struct Arena {
  std::byte* base = nullptr;
  std::size_t bytes = 0;

  std::int64_t offset(const std::byte* at) const {
    return at >= base && at < base + bytes ? at - base : -1;
  }
};

class Direct {
 public:
  Direct(Segment& segment, int rank, Peers& peers, Put& put, Arena arena)
      : segment_(segment), rank_(rank), ranks_(segment.ranks()), peers_(peers), put_(put), arena_(arena),
        from_(ranks_), offsets_(ranks_), inbox_(kTiny * ranks_) {}

  void begin(const Exchange& job, const Dtype& dtype, std::uint64_t number, std::uint64_t digest) {
    job_ = job, dtype_ = dtype;
    heading_ = {number, digest, std::uint64_t(job.bounds[ranks_]), 0};
    for (int r = 1; r < ranks_; ++r)  // FNV-1a, a number at a time
      heading_.cuts = (heading_.cuts ^ std::uint64_t(job.bounds[r])) * 0x100000001b3;
    step_ = 0;
    std::size_t longest = 0;
    for (int r = 0; r < ranks_; ++r) longest = std::max(longest, bytes(r));
    const std::size_t message = gathers() ? longest : bytes(0, ranks_);
    slab_ = segment_.slab() / dtype.size * dtype.size;
    count_ = (longest + slab_ - 1) / slab_;
    path_ = ranks_ == 1         ? Path::alone
            : message <= kTiny  ? Path::lines
            : message <= whole_limit() ? Path::whole
                                : Path::tiles;
  }

  void run() {
    peers_.round(0);
    switch (path_) {
      case Path::alone: finish_whole(); break;
      case Path::lines: run_lines(); break;
      case Path::whole: run_whole(); break;
      case Path::tiles: run_tiles(); break;
    }
    peers_.sent_bytes.fetch_add(sent(), std::memory_order_relaxed);
  }

 private:
  enum class Path { alone, lines, whole, tiles };

  bool gathers() const { return job_.collective == Collective::all_gather; }
  bool permutes() const { return job_.collective == Collective::all_to_all; }
  bool reads() const { return !gathers() || job_.root < 0 || job_.root == rank_; }
  bool is_read(int r) const { return !permutes() || job_.root < 0 || job_.root == r; }

  // Bytes that this rank sends, as the schedule has it.
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
  // Everyone reads all messages whole, but only its own shard of them in tiles.
  std::size_t whole_limit() const { return gathers() ? kWhole : kWhole / (ranks_ - 1); }

  // --- messages: lines and whole ---------------------------------------------------------------

  // What `r` has to say, and how long it is.
  std::size_t message_bytes(int r) const {
    return gathers() ? bytes(r) : is_read(r) ? bytes(0, ranks_) : 0;
  }
  const std::byte* message() const { return gathers() ? job_.part : job_.whole; }

  // With every rank's message in `from_`: compute this rank's result.
  void finish_whole() {
    from_[rank_] = message();
    if (gathers()) {
      for (int r = 0; r < ranks_ && reads(); ++r)
        copy_bytes(job_.whole + begin_of(r), from_[r], bytes(r));
    } else if (permutes()) {
      for (int r = 0; r < ranks_; ++r)
        if (is_read(r)) copy_bytes(piece_of(r), from_[r] + begin_of(rank_), bytes(rank_));
    } else if (job_.collective == Collective::all_reduce) {
      fold(dtype_, job_.whole, from_.data(), ranks_, job_.bounds[ranks_]);
    } else {
      for (auto& at : from_) at += begin_of(rank_);
      fold(dtype_, job_.part, from_.data(), ranks_, bytes(rank_) / dtype_.size);
    }
  }

  // Of an all_to_all: where what r sends goes.
  std::byte* piece_of(int r) const { return job_.part + (job_.root < 0 ? r * bytes(rank_) : 0); }

  void run_lines() {
    const auto flag = std::uint32_t(lines_ % 0xffffffff) + 1;  // never that of an untouched line
    if (step_ == 0) write_lines(flag), step_ = 1;
    for (; step_ < ranks_; ++step_) read_lines(flag, (rank_ + step_) % ranks_);
    finish_whole();
    ++lines_;
  }

  void write_lines(std::uint32_t flag) {
    Line* line = segment_.lines(rank_, lines_);
    const std::byte* from = message();
    std::size_t left = message_bytes(rank_), room = sizeof(Line::data) - sizeof(Heading);
    std::memcpy(line->data, &heading_, sizeof(Heading));
    copy_bytes(line->data + sizeof(Heading), from, std::min(left, room));
    while (true) {
      line->flag.store(flag, std::memory_order_release);  // release: the data before its flag
      if (left <= room) return;
      from += room, left -= room, room = sizeof(Line::data), ++line;
      copy_bytes(line->data, from, std::min(left, room));
    }
  }

  void read_lines(std::uint32_t flag, int r) {
    const Line* line = segment_.lines(r, lines_);
    std::byte* to = inbox_.data() + r * kTiny;
    from_[r] = to;
    // acquire: the data, written before the flag
    auto await = [&] {
      peers_.await(r, [&] { return line->flag.load(std::memory_order_acquire) == flag; });
    };
    await();
    Heading said;
    std::memcpy(&said, line->data, sizeof(Heading));
    check(r, said);
    std::size_t left = message_bytes(r), room = sizeof(Line::data) - sizeof(Heading);
    copy_bytes(to, line->data + sizeof(Heading), std::min(left, room));
    while (left > room) {
      to += room, left -= room, room = sizeof(Line::data), ++line;
      await();
      copy_bytes(to, line->data, std::min(left, room));
    }
  }

  void run_whole() {
    if (step_ == 0) {
      put_(segment_.whole(rank_, posts_), message(), message_bytes(rank_));
      post(-1);
      step_ = 1;
    }
    for (; step_ < ranks_; ++step_) {
      const int r = (rank_ + step_) % ranks_;
      read_post(r);
      from_[r] = segment_.whole(r, posts_);
    }
    finish_whole();
    ++posts_;
  }

  void post(std::int64_t offset) {
    Post& mine = segment_.board(rank_).posts[posts_ % 2];
    mine.heading = heading_;
    mine.offset = offsets_[rank_] = offset;
    mine.count.store(posts_ + 1, std::memory_order_release);  // release: message and heading first
  }

  void read_post(int r) {
    const Post& theirs = segment_.board(r).posts[posts_ % 2];
    // acquire: the heading, and the message if it lies whole, were written before the count
    peers_.await(r, [&] { return theirs.count.load(std::memory_order_acquire) == posts_ + 1; });
    check(r, theirs.heading);
    offsets_[r] = theirs.offset;
    if (offsets_[r] >= 0 && std::size_t(offsets_[r]) + message_bytes(r) > arena_.bytes)
      throw Failed{Failure::mismatch, r, stamp(heading_), stamp(theirs.heading)};
  }

  void check(int r, const Heading& said) const {
    if (said.number != heading_.number || said.digest != heading_.digest ||
        said.elements != heading_.elements || said.cuts != heading_.cuts)
      throw Failed{Failure::mismatch, r, stamp(heading_), stamp(said)};
  }
  Stamp stamp(const Heading& h) const { return {h.number, h.elements * dtype_.size, h.digest, 0, 0}; }

  // --- tiles -----------------------------------------------------------------------------------

  bool registered(int r) const { return offsets_[r] >= 0; }
  std::byte* at(int r) const { return arena_.base + offsets_[r]; }

  // The part of a shard that tile t covers: its first byte within the shard, and its length.
  struct Span {
    std::size_t first, bytes;
  };
  Span span(int shard, std::size_t t) const {
    const std::size_t length = bytes(shard), first = std::min(t * slab_, length);
    return {first, std::min(slab_, length - first)};
  }

  void run_tiles() {
    if (step_ == 0) post(arena_.offset(message())), step_ = 1;
    for (; step_ < ranks_; ++step_) read_post((rank_ + step_) % ranks_);
    all_registered_ = std::all_of(offsets_.begin(), offsets_.end(), [](auto o) { return o >= 0; });
    const std::size_t steps = 3 * (count_ + 2);
    for (; step_ < std::int64_t(ranks_ + steps); ++step_) {
      const std::size_t s = step_ - ranks_, t = s / 3;
      if (s % 3 == 0 && t < count_) lay_out(t);
      if (s % 3 == 1 && t >= 1 && t - 1 < count_) take(t - 1);
      if (s % 3 == 2 && t >= 2) collect(t - 2);
    }
    const auto end = tiles_ + count_;
    if (registered(rank_)) {  // until nobody reads or writes our buffer any more
      const bool results = job_.collective == Collective::all_reduce && !all_registered_;
      await_all(results ? &Board::collected : &Board::taken, end);
    }
    Board& mine = segment_.board(rank_);  // those that this collective had no use for, too
    mine.laid.store(end, std::memory_order_release);
    mine.taken.store(end, std::memory_order_release);
    mine.collected.store(end, std::memory_order_release);
    tiles_ = end;
    ++posts_;
  }

  // A: for each owner its part of the tile; when gathering, what is for all.
  void lay_out(std::size_t t) {
    const auto tile = tiles_ + t;
    bool ready = registered(rank_) || !is_read(rank_);  // nobody asks for what is in our slots
    for (int owner = 0; owner < ranks_ && !ready; ++owner) {
      const Span s = span(owner, t);
      if (s.bytes == 0 || gathers() != (owner == rank_)) continue;
      if (tile >= kTiles) await_all(&Board::taken, tile - kTiles + 1);  // the slots are free again
      if (gathers())
        put_(segment_.result(rank_, tile), job_.part + s.first, s.bytes);
      else
        put_(segment_.part(rank_, owner, tile), job_.whole + begin_of(owner) + s.first, s.bytes);
    }
    // release: the parts before their count
    segment_.board(rank_).laid.store(tile + 1, std::memory_order_release);
  }

  // B: fold this rank's part of the tile, or take what the others have for it.
  void take(std::size_t t) {
    if (!gathers())
      take_part(t, span(rank_, t));
    else if (reads())
      take_shards(t);
    // release: our reads of the parts, and the result, before their count
    segment_.board(rank_).taken.store(tiles_ + t + 1, std::memory_order_release);
  }

  void take_shards(std::size_t t) {
    for (int i = 0; i < ranks_; ++i) {
      const int r = (rank_ + i) % ranks_;
      const Span s = span(r, t);
      if (s.bytes == 0) continue;
      const std::byte* from = job_.part;
      if (r != rank_) from = registered(r) ? at(r) : laid(r, tiles_ + t, segment_.result(r, tiles_ + t));
      if (r == rank_ || registered(r)) from += s.first;
      copy_bytes(job_.whole + begin_of(r) + s.first, from, s.bytes);
    }
  }

  void take_part(std::size_t t, Span s) {
    if (s.bytes == 0) return;
    const auto tile = tiles_ + t;
    const auto own = begin_of(rank_) + s.first;
    for (int i = 0; i < ranks_; ++i) {
      const int r = (rank_ + i) % ranks_;
      if (!is_read(r)) continue;
      from_[r] = r == rank_      ? job_.whole + own
                 : registered(r) ? at(r) + own
                                 : laid(r, tile, segment_.part(r, rank_, tile));
      if (permutes()) copy_bytes(piece_of(r) + s.first, from_[r], s.bytes);
    }
    if (!permutes()) fold_part(tile, own, s);
  }

  // A slot, once its tile has been laid out.
  const std::byte* laid(int r, std::uint64_t tile, const std::byte* slot) {
    await(r, &Board::laid, tile + 1);
    return slot;
  }

  void fold_part(std::uint64_t tile, std::size_t own, Span s) {
    const auto count = s.bytes / dtype_.size;
    if (job_.collective == Collective::reduce_scatter)
      return fold(dtype_, job_.part + s.first, from_.data(), ranks_, count);
    copies_.clear();
    if (all_registered_) {
      for (int i = 1; i < ranks_; ++i) copies_.push_back(at((rank_ + i) % ranks_) + own);
    } else if (!registered(rank_)) {
      if (tile >= kTiles) await_all(&Board::collected, tile - kTiles + 1);
      copies_.push_back(segment_.result(rank_, tile));
    }
    fold(dtype_, job_.whole + own, from_.data(), ranks_, count, copies_.data(), int(copies_.size()),
         all_registered_ ? copy_bytes : put_.way());
  }

  // C: the results of the other owners.
  void collect(std::size_t t) {
    const auto tile = tiles_ + t;
    if (job_.collective == Collective::all_reduce && !all_registered_) {
      peers_.round(1);
      for (int i = 1; i < ranks_; ++i) {
        const int r = (rank_ + i) % ranks_;
        const Span s = span(r, t);
        if (s.bytes == 0) continue;
        await(r, &Board::taken, tile + 1);
        const auto place = begin_of(r) + s.first;
        copy_bytes(job_.whole + place, registered(r) ? at(r) + place : segment_.result(r, tile), s.bytes);
      }
    }
    // release: our reads of the results before their count
    segment_.board(rank_).collected.store(tile + 1, std::memory_order_release);
  }

  void await(int r, std::atomic<std::uint64_t> Board::* counter, std::uint64_t least) {
    const auto& count = segment_.board(r).*counter;
    // acquire: what the rank did before it counted
    peers_.await(r, [&] { return count.load(std::memory_order_acquire) >= least; });
  }
  void await_all(std::atomic<std::uint64_t> Board::* counter, std::uint64_t least) {
    for (int i = 1; i < ranks_; ++i) await((rank_ + i) % ranks_, counter, least);
  }

  Segment& segment_;
  int rank_, ranks_;
  Peers& peers_;
  Put& put_;
  Arena arena_;

  Exchange job_{};
  Dtype dtype_{};
  Heading heading_{};
  Path path_ = Path::alone;
  std::size_t slab_ = 0, count_ = 0;  // bytes of a tile's part; how many tiles
  std::int64_t step_ = 0;
  bool all_registered_ = false;
  std::uint64_t lines_ = 0, posts_ = 0, tiles_ = 0;  // so far, the same on every rank
  std::vector<const std::byte*> from_;               // by rank: whence to read
  std::vector<std::int64_t> offsets_;                // by rank: of its buffer in the arena, or -1
  std::vector<std::byte*> copies_;
  std::vector<std::byte> inbox_;
};

}  // namespace ringdp
