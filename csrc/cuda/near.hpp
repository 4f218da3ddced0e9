// A team's own copy of all that its leader reads for every row, on a GPU in the block's shared
// memory. Reading it from global memory would be slow each time, because an acquire of a flag
// invalidates the cached copy, and the whole team waits while its leader plans.
#pragma once

#include "window.hpp"

namespace ringdp {

struct Held {  // what a scratch chunk holds
  unsigned bytes, more;
};

struct Near {
  Job job;      // points to copies of rows, bounds, windows and counts (only this channel's counts)
  Held* held;   // [scratch]
  char* going;  // [count]: whether the row has more slabs to move
  char* live;   // [chunks + scratch]: whether the chunk's value is in its float32 sum
};

// Bytes of shared memory: the leader's own kLeader, then what `copy_near` lays out, in that order.
constexpr i64 kLeader = 512;
RINGDP_DEVICE inline i64 shared_bytes(const Job& job) {
  return kLeader + job.ranks * i64(sizeof(char*) + kCounts * sizeof(u64)) +
         (job.chunks + 1) * i64(sizeof(i64)) + job.count * i64(sizeof(Row) + 1) +
         job.scratch * i64(sizeof(Held)) + job.chunks + job.scratch;
}

template <class X>
RINGDP_DEVICE X* copy(const Team& team, char*& to, const X* from, i64 count) {
  X* out = reinterpret_cast<X*>(to);
  for (i64 i = team.thread; i < count; i += team.threads) out[i] = from[i];
  to += count * i64(sizeof(X));
  return out;
}
template <class X>
RINGDP_DEVICE X* fill(const Team& team, char*& to, X value, i64 count) {
  X* out = reinterpret_cast<X*>(to);
  for (i64 i = team.thread; i < count; i += team.threads) out[i] = value;
  to += count * i64(sizeof(X));
  return out;
}

// Fills the copy. The whole team calls it, and must meet before any thread reads it.
RINGDP_DEVICE inline Near copy_near(const Team& team, const Job& job, i64 channel, char* to) {
  Near near{job, nullptr, nullptr, nullptr};
  near.job.windows = copy(team, to, job.windows, job.ranks);
  near.job.counts = copy(team, to, job.counts + channel * job.ranks * kCounts, job.ranks * kCounts);
  near.job.bounds = copy(team, to, job.bounds, job.chunks + 1);
  near.held = fill(team, to, Held{0, 0}, job.scratch);
  near.job.rows = copy(team, to, job.rows, job.count);
  near.going = fill(team, to, char(1), job.count);
  near.live = fill(team, to, char(0), job.chunks + job.scratch);
  return near;
}

// Writes the counts back: the next launch continues from them.
RINGDP_DEVICE inline void keep_counts(const Team& team, const Near& near, const Job& job, i64 channel) {
  char* to = reinterpret_cast<char*>(job.counts + channel * job.ranks * kCounts);
  copy(team, to, near.job.counts, job.ranks * kCounts);
}

}  // namespace ringdp
