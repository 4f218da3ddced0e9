// A team's own copy of all that its leader reads for every row: on a GPU in the block's shared
// memory. What lies in the GPU's memory is a long trip away each time, as an acquire of a flag drops
// what caches had of it, and the whole team waits while its leader plans.
#pragma once

#include "window.hpp"

namespace ringdp {

struct Held {  // what a scratch chunk holds
  unsigned bytes, more;
};

struct Near {
  Job job;      // its rows, bounds, windows and counts are copies, the counts of this channel only
  Held* held;   // [scratch]
  char* going;  // [count]: whether the row has more to do
  char* live;   // [chunks + scratch]: whether the chunk's value is in `sums`
};

// Behind the leader's own kLeader bytes, in the order in which `copy_near` lays it out.
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

// By the whole team, which must meet before anybody reads it.
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

// The counts go on in the next launch.
RINGDP_DEVICE inline void keep_counts(const Team& team, const Near& near, const Job& job, i64 channel) {
  char* to = reinterpret_cast<char*>(job.counts + channel * job.ranks * kCounts);
  copy(team, to, near.job.counts, job.ranks * kCounts);
}

}  // namespace ringdp
