// Runs one rank's rows on one channel, as csrc/interpreter.hpp does: the whole program on the first
// slab of every chunk, then on the second, and so on. Channels share nothing: each has its part of
// every chunk and its own slots.
//
// One thread, the leader, reads rows, waits and plans. Then the whole team moves the data, with a
// barrier before and after. So all state has one writer, and the leader's release covers what the
// team has written.
#pragma once

#include <new>

#include "move.hpp"
#include "near.hpp"

namespace ringdp {

// Lies in the team's shared memory. The other threads read only `move` and `ended`.
template <class T>
class Leader {
 public:
  Move move;
  int ended = 0;

  RINGDP_DEVICE Leader(const Near& near, i64 channel)
      : job_(near.job),
        held_(near.held),
        going_(near.going),
        live_(near.live),
        channel_{&job_, channel, 0},
        left_(near.job.count) {
    static_assert(sizeof(Leader) <= kLeader, "the host counts on it");
  }

  // Publishes and releases the slots of the last `move`, then plans the next one or sets `ended`.
  RINGDP_DEVICE void next() {
    if (send_to_ >= 0) channel_.publish(send_to_, sent_bytes_, sent_more_);
    if (take_from_ >= 0) channel_.release(take_from_);
    send_to_ = take_from_ = -1;
    ended = !advance();
  }

 private:
  RINGDP_DEVICE bool advance() {
    while (left_ > 0 || row_ > 0) {
      for (; row_ < job_.count; ++row_) {
        if (!going_[row_]) continue;
        const Row row = job_.rows[row_];
        channel_.round = row.round;
        if (row.src_chunk >= 0 && live_[row.src_chunk]) return round(row.src_chunk);
        if (!plan(row)) return false;
        ++row_;
        return true;
      }
      for (; chunk_ < job_.chunks; ++chunk_)
        if (live_[chunk_]) return round(chunk_);
      row_ = chunk_ = 0;
      first_ += slab();
    }
    return false;
  }

  struct Piece {
    char* data;
    unsigned count, more;
  };

  // Length of a slab in elements.
  RINGDP_DEVICE i64 slab() const { return job_.slab / i64(sizeof(T)); }

  // Elements [first_, first_ + slab) of this channel's part of the chunk. A scratch chunk holds one slab.
  RINGDP_DEVICE Piece piece(int chunk) const {
    if (chunk >= job_.chunks) {
      const i64 s = chunk - job_.chunks;
      char* data = job_.room + (channel_.channel * job_.scratch + s) * job_.slab;
      return {data, held_[s].bytes / unsigned(sizeof(T)), held_[s].more};
    }
    const i64 length = job_.bounds[chunk + 1] - job_.bounds[chunk];
    const i64 part = ((length + job_.active - 1) / job_.active + 15) / 16 * 16;  // keeps alignment
    const i64 end = least(length, part * (channel_.channel + 1));
    const i64 begin = least(end, part * channel_.channel + first_);
    const i64 last = least(end, begin + slab());
    return {job_.buffer + (job_.bounds[chunk] + begin) * i64(sizeof(T)), unsigned(last - begin),
            unsigned(last < end)};
  }
  static RINGDP_DEVICE i64 least(i64 a, i64 b) { return a < b ? a : b; }

  RINGDP_DEVICE float* sum(int chunk) const {
    auto* sums = reinterpret_cast<float*>(job_.room + job_.active * job_.scratch * job_.slab);
    return sums + (channel_.channel * (job_.chunks + job_.scratch) + chunk) * slab();
  }

  // Plans rounding the chunk's sum, as its value is about to be read. See Note [one rounding].
  RINGDP_DEVICE bool round(int chunk) {
    const Piece p = piece(chunk);
    live_[chunk] = 0;
    move = {nullptr, nullptr, sum(chunk), p.data, nullptr, p.count, 0};
    return true;
  }

  RINGDP_DEVICE bool plan(const Row& row) {
    const bool reduces = row.flags & kReduce, stores = row.flags & kStore;
    const bool receives = row.recv_peer >= 0, sends = row.send_peer >= 0;
    char* out = sends ? channel_.outgoing(row.send_peer) : nullptr;
    if (sends && !out) return false;
    const Piece target = row.dst_chunk >= 0 ? piece(row.dst_chunk) : Piece{nullptr, 0, 0};
    Piece value = {nullptr, 0, 0};  // stays empty for a row without data: see peer.jobs.greeted
    if (receives) {
      Stamp* stamp = channel_.incoming(row.recv_peer);
      if (!stamp) return false;
      if (stamp->number != u64(job_.number) || i64(stamp->bytes) > job_.slab)
        return channel_.fail(Fault::mismatch, row.recv_peer);
      value = {Channel::data(stamp), stamp->bytes / unsigned(sizeof(T)), stamp->more};
    } else if (row.src_chunk >= 0) {
      value = piece(row.src_chunk);
    }
    const bool spare = row.dst_chunk >= job_.chunks;  // a scratch chunk takes any length
    if ((reduces || (stores && !spare)) &&
        (value.count != target.count || value.more != target.more))
      return channel_.fail(Fault::mismatch, receives ? row.recv_peer : int(job_.rank));
    if (stores && spare && !reduces)
      held_[row.dst_chunk - job_.chunks] = {value.count * unsigned(sizeof(T)), value.more};
    describe(row, target, value, out);
    if (!value.more) going_[row_] = 0, --left_;
    send_to_ = row.send_peer, take_from_ = row.recv_peer;
    sent_bytes_ = value.count * unsigned(sizeof(T)), sent_more_ = value.more;
    return true;
  }

  RINGDP_DEVICE void describe(const Row& row, Piece target, Piece value, char* out) {
    constexpr bool wide = !std::is_same_v<typename Wide<T>::type, T>;
    const bool stores = row.flags & kStore;
    move = {value.data, nullptr, nullptr, stores ? target.data : nullptr, out, value.count, 0};
    if (!(row.flags & kReduce)) {
      if (stores) live_[row.dst_chunk] = 0;
      return;
    }
    char& live = live_[row.dst_chunk];
    move.reduces = 1;
    if (wide) move.sum = sum(row.dst_chunk);
    if (!live) move.with = target.data;
    live = wide && !out;  // it stays in float32 until it is read
    if (live) move.store = nullptr;
  }

  const Job job_;
  Held* const held_;
  char *const going_, *const live_;
  Channel channel_;
  i64 left_;  // rows that have more slabs to move
  i64 first_ = 0, row_ = 0, chunk_ = 0;
  int send_to_ = -1, take_from_ = -1;
  unsigned sent_bytes_ = 0, sent_more_ = 0;
};

// The team's main loop. Nonzero fields of `given` replace the job's. `memory` has shared_bytes(job)
// bytes, aligned to 16, and is shared by the team.
template <class T>
RINGDP_DEVICE void run_rows(const Team& team, const Job& job, const Given& given, i64 channel, char* memory) {
  auto* leader = reinterpret_cast<Leader<T>*>(memory);
  Near near = copy_near(team, job, channel, memory + kLeader);
  if (given.buffer) near.job.buffer = given.buffer;
  if (given.room) near.job.room = given.room;
  if (given.number) near.job.number = given.number;
  team.meet();
  if (team.thread == 0) new (leader) Leader<T>(near, channel);
  for (;;) {
    if (team.thread == 0) leader->next();
    team.meet();
    if (leader->ended) break;
    const Move planned = leader->move;
    move_elements<T>(team, planned, Op(near.job.op), int(near.job.ranks));
    team.meet();
  }
  keep_counts(team, near, job, channel);
}

}  // namespace ringdp
