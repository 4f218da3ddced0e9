// The direct algorithms, run without channels: every rank lays out its data in its outbox, which all others
// read, and folds the shard that it owns in rank order. The values and the order of additions, hence the
// bits, are those of the `direct` schedule's rows, with fewer copies.
//
//   size            path     method
//   up to kTiny     lines    the message shares its cache lines with its flags
//   short           whole    one copy of the message, and everyone reads all messages (but tiles, if any
//                            rank's buffer lies in the arena, where it need not be copied)
//   longer          tiles    A: lay out the parts of tile t for their owners
//                            B: fold, or take, tile t-1; lay out the result
//                            C: collect the results of tile t-2
//
// In an uneven all_to_all no rank knows the others' lengths. So it takes the path of tiles whatever its size,
// and its ranks first send one another their bounds, as a whole message.
//
// A buffer in the arena is read in place, so its rank lays out nothing. If all buffers are in the arena, an
// owner writes its sums to all of them, and nobody collects.
//
// Over a link its end is delayed: see Note [held back] in link.hpp.
//
// It can be interrupted at a step and resumed: a step waits before it changes anything, or can be repeated.
#pragma once

#include "link.hpp"
#include "exchange.hpp"

namespace ringdp {

class Direct : private Messages {
 public:
  Direct(Segment& segment, int rank, Peers& peers, Put& put, Arena arena, Link link)
      : Messages(segment, rank, peers, put, arena), link_(link) {}

  void begin(const Exchange& job, const Dtype& dtype, std::uint64_t number, std::uint64_t digest) {
    Messages::begin(job, dtype, number, digest);
    moved_all_ = false;
    if (!link_.is_none()) latest_ = now();
    longest_ = 0;
    for (int r = 0; r < ranks_; ++r) longest_ = std::max(longest_, bytes(r));
    const std::size_t message = gathers() ? longest_ : bytes(0, ranks_);
    path_ = ranks_ == 1         ? Path::alone
            : message <= kTiny && link_.is_none() ? Path::lines  // lines don't carry `began`
            : message <= whole_limit() ? Path::whole
                                : Path::tiles;
    if (uneven() && ranks_ > 1) path_ = Path::tiles;
    part_ = segment_.part() / dtype_.size * dtype_.size;
  }

  void run() {
    if (!moved_all_) {
      peers_.round(0);
      switch (path_) {
        case Path::alone: finish_whole(); break;
        case Path::lines: run_lines(); break;
        case Path::whole:
          if (run_whole()) break;
          path_ = Path::tiles;
          [[fallthrough]];
        case Path::tiles: run_tiles(); break;
      }
      peers_.count_sent(sent());
      moved_all_ = true;
    }
    if (!link_.is_none()) peers_.await_time(latest_ + link_.takes(messages(), longest_));
  }

 private:
  enum class Path { alone, lines, whole, tiles };
  static constexpr std::size_t kMost = 1ull << 48;  // bytes: no memory holds as many

  // Messages that a rank would send over a link, one after the other: a shard to every other rank.
  std::size_t messages() const {
    return (job_.collective == Collective::all_reduce ? 2 : 1) * std::size_t(ranks_ - 1);
  }

  bool registered(int r) const { return offsets_[r] >= 0; }
  std::byte* at(int r) const { return arena_.base + offsets_[r]; }

  // The part of a shard that tile t covers: its first byte within the shard, and its length.
  struct Span {
    std::size_t first, bytes;
  };
  Span span(int shard, std::size_t t) const { return span_of(bytes(shard), t); }
  Span span_of(std::size_t length, std::size_t t) const {
    const std::size_t first = std::min(t * part_, length);
    return {first, std::min(part_, length - first)};
  }

  void run_tiles() {
    if (step_ == 0) {
      if (uneven())
        post_whole();
      else
        post(arena_.offset(message()));
      peers_.ring();
      step_ = 1;
    }
    for (; step_ < ranks_; ++step_) {
      const int r = (rank_ + step_) % ranks_;
      read_post(r, Other::rings);
      if (uneven()) read_bounds(r);
    }
    count_ = (longest_ + part_ - 1) / part_;
    const auto known = [](auto offset) { return offset >= 0; };
    all_registered_ = std::all_of(offsets_.begin(), offsets_.end(), known);
    any_registered_ = std::any_of(offsets_.begin(), offsets_.end(), known);
    const std::size_t steps = 3 * (count_ + 2);
    while (step_ < std::int64_t(ranks_ + steps)) {
      const std::size_t s = step_ - ranks_, t = s / 3;
      moved_ = 0;  // an interrupted step starts anew
      if (s % 3 == 0 && t < count_) lay_out(t), note_tile(What::lay_out, t);
      if (s % 3 == 1 && t >= 1 && t - 1 < count_) take(t - 1), note_tile(What::take, t - 1);
      if (s % 3 == 2 && t >= 2) collect(t - 2), note_tile(What::collect, t - 2);
      ++step_;
      peers_.check_slice();
    }
    const auto end = tiles_ + count_;
    if (registered(rank_)) {  // wait until nobody reads or writes our buffer any more
      const bool results = job_.collective == Collective::all_reduce && !all_registered_;
      await_all(results ? &Board::collected : &Board::taken, end);
    }
    tiles_ = end;
    ++posts_;
  }

  // Reads the bounds of what r sends in an uneven all_to_all. All ranks count the tiles of the longest part.
  void read_bounds(int r) {
    const auto* from = within(segment_.messages(r), kRoom, places_[r], r);
    const auto* theirs = reinterpret_cast<const std::int64_t*>(from);
    const auto part = [&](int to) { return std::size_t(theirs[to + 1] - theirs[to]) * dtype_.size; };
    for (int to = 0; to < ranks_; ++to) longest_ = std::max(longest_, part(to));
    Stamp expected = stamp(heading_), found = expected;
    if (longest_ > kMost) throw Failed{Failure::damaged, r, expected, {}};
    expected.bytes = piece_bytes(r), found.bytes = part(rank_);
    if (found.bytes != expected.bytes) throw Failed{Failure::mismatch, r, expected, found};
  }

  // A step that moved nothing is not recorded.
  void note_tile(What what, std::size_t t) {
    if (moved_) note(what, moved_, -1, std::int32_t(t));
  }

  // A: lays out each owner's part of the tile, or in an all_gather this rank's part for all.
  void lay_out(std::size_t t) {
    const auto tile = tiles_ + t;
    bool ready = registered(rank_) || !is_read(rank_);  // nobody reads our slots
    for (int owner = 0; owner < ranks_ && !ready; ++owner) {
      const Span s = span(owner, t);
      if (s.bytes == 0 || gathers() != (owner == rank_)) continue;
      if (tile >= kTiles) await_all(&Board::taken, tile - kTiles + 1);  // until the slots are free again
      moved_ += s.bytes;
      if (gathers())
        put_(segment_.result(rank_, tile), job_.part + s.first, s.bytes);
      else
        put_(segment_.part(rank_, owner, tile), job_.whole + begin_of(owner) + s.first, s.bytes);
    }
    // release: the parts before the count
    segment_.board(rank_).laid.store(tile + 1, std::memory_order_release);
    peers_.ring();
  }

  // B: folds this rank's part of the tile, or copies the parts that the others have for it.
  void take(std::size_t t) {
    if (folds())
      take_part(t, span(rank_, t));
    else
      take_pieces(t);
    check_reported();
    // release: our reads of the parts, and the result that we wrote, before the count
    segment_.board(rank_).taken.store(tiles_ + t + 1, std::memory_order_release);
    peers_.ring();
  }

  void take_pieces(std::size_t t) {
    const auto tile = tiles_ + t;
    for (int i = 0; i < ranks_; ++i) {
      const int r = (rank_ + i) % ranks_;
      const Span s = span_of(piece_bytes(r), t);
      if (s.bytes == 0) continue;
      const auto place = piece_at() + s.first;
      const auto* const slot = gathers() ? segment_.result(r, tile) : segment_.part(r, rank_, tile);
      const auto* const from = r == rank_      ? data() + place
                               : registered(r) ? at(r) + place
                                               : laid(r, tile, slot);
      copy_bytes(piece_of(r) + s.first, from, s.bytes);
      moved_ += s.bytes;
    }
  }

  void take_part(std::size_t t, Span s) {
    if (s.bytes == 0) return;
    moved_ += s.bytes;
    const auto tile = tiles_ + t;
    const auto own = begin_of(rank_) + s.first;
    for (int i = 0; i < ranks_; ++i) {
      const int r = (rank_ + i) % ranks_;
      from_[r] = r == rank_      ? job_.whole + own
                 : registered(r) ? at(r) + own
                                 : laid(r, tile, segment_.part(r, rank_, tile));
    }
    fold_part(tile, own, s);
  }

  // Returns `slot` once rank r has laid out that tile.
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

  // C: collects the results of the other owners.
  void collect(std::size_t t) {
    const auto tile = tiles_ + t;
    if (job_.collective == Collective::all_reduce && !all_registered_) {
      peers_.round(1);
      for (int i = 1; i < ranks_; ++i) {
        const int r = (rank_ + i) % ranks_;
        const Span s = span(r, t);
        if (s.bytes == 0) continue;
        await(r, &Board::taken, tile + 1);
        moved_ += s.bytes;
        const auto place = begin_of(r) + s.first;
        copy_bytes(job_.whole + place, registered(r) ? at(r) + place : segment_.result(r, tile), s.bytes);
      }
    }
    check_reported();
    // release: our reads of the results before the count
    segment_.board(rank_).collected.store(tile + 1, std::memory_order_release);
    peers_.ring();
  }

  // Throws if any rank has reported a failure. A rank whose call has failed may reuse its buffer in the
  // arena, so what was just read there may be garbage, and nothing more may be written there.
  void check_reported() {
    if (!any_registered_) return;
    std::atomic_thread_fence(std::memory_order_acquire);  // acquire: our reads before the check
    if (auto f = peers_.reported()) throw *f;
  }

  void await(int r, std::atomic<std::uint64_t> Board::* counter, std::uint64_t least) {
    const auto& count = segment_.board(r).*counter;
    // acquire: what the rank did before it advanced the count
    peers_.await(r, [&] { return count.load(std::memory_order_acquire) >= least; }, Other::near);
  }
  void await_all(std::atomic<std::uint64_t> Board::* counter, std::uint64_t least) {
    for (int i = 1; i < ranks_; ++i) await((rank_ + i) % ranks_, counter, least);
  }

  Link link_;
  Path path_ = Path::alone;
  bool moved_all_ = false;
  std::size_t longest_ = 0;           // bytes of the longest shard or piece
  std::size_t part_ = 0, count_ = 0;  // bytes of a tile's part; number of tiles
  std::uint64_t tiles_ = 0;           // of earlier collectives, the same on every rank
  bool all_registered_ = false, any_registered_ = false;
  std::size_t moved_ = 0;  // bytes in this step
  std::vector<std::byte*> copies_;
};

}  // namespace ringdp
