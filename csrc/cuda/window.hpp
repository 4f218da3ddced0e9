// A rank's window: memory that its peers can write, and the counters that guard it.
//
//   window   stop, then its size and rank, which a peer that maps it checks; then for each (channel,
//            peer): arrived, taken; then for each, `depth` slots
//   slot     a stamp, followed by `slab` bytes
//
// A sender writes a slot in the receiver's window and then `arrived` there. The receiver reads the
// slot in its own memory and then writes `taken` in the sender's window. So ranks write remote memory
// and poll local memory. The counters only grow: message k of a channel lies in slot k mod depth, and
// may be written once taken > k - depth.
//
// Every wait ends: by the counter, by a timeout, by `stop`, which a failed rank writes in all windows, or
// by the rank's own failure word, which another channel or the host has written.
#pragma once

#include "target.hpp"

namespace ringdp {

constexpr i64 kLine = 128;  // bytes between words that different ranks write
constexpr i64 kCounts = 3;  // messages sent to a rank, messages taken from it, bytes sent to it

enum class Fault : int { none, timeout, mismatch, stopped };  // transport.peer.jobs.Fault

struct Row {  // schedule.program.Row
  int round, recv_peer, send_peer, src_chunk, dst_chunk, flags;
};
enum Flag : int { kReduce = 1, kStore = 2 };

// One rank's part of a launch: 8 bytes a field, in the order of transport.peer.jobs.Job.
struct Job {
  i64 rank, ranks, channels, depth, slab;  // channels: those of the window; slab in bytes
  i64 active;                              // channels: those of this launch
  i64 number, timeout, op;                 // timeout in ns
  const Row* rows;
  i64 count;
  const i64* bounds;  // [chunks + 1], in elements
  i64 chunks, scratch;
  char* buffer;
  char* room;            // [active][scratch][slab bytes], followed for 16-bit floats by the sums:
                         // float [active][chunks + scratch][slab elements]
  u64* counts;           // [channels][ranks][kCounts]
  u64* failure;          // 0, or what `failed` packs
  char* const* windows;  // [ranks]
};

// Fields of a job that a launch can override.
struct Given {
  char *buffer, *room;
  i64 number;
};

struct Stamp {
  u64 number;
  unsigned bytes, more;  // more: whether the chunk continues after this slab
};

// One channel of one rank. Only the team's leader calls its methods. `job->counts` holds this channel's
// counts only: see near.hpp.
struct Channel {
  const Job* job;
  i64 channel;
  int round;

  RINGDP_DEVICE i64 place(i64 peer) const { return channel * job->ranks + peer; }
  RINGDP_DEVICE u64* flags(i64 owner, i64 peer) const {
    return reinterpret_cast<u64*>(job->windows[owner] + kLine * (1 + 2 * place(peer)));
  }
  RINGDP_DEVICE u64* arrived(i64 owner, i64 from) const { return flags(owner, from); }
  RINGDP_DEVICE u64* taken(i64 owner, i64 by) const { return flags(owner, by) + kLine / 8; }
  RINGDP_DEVICE u64* stop(i64 owner) const { return reinterpret_cast<u64*>(job->windows[owner]); }
  RINGDP_DEVICE Stamp* slot(i64 owner, i64 from, u64 message) const {
    const i64 begin = kLine * (1 + 2 * job->channels * job->ranks);
    const i64 index = place(from) * job->depth + i64(message % u64(job->depth));
    return reinterpret_cast<Stamp*>(job->windows[owner] + begin + index * (kLine + job->slab));
  }
  static RINGDP_DEVICE char* data(Stamp* stamp) { return reinterpret_cast<char*>(stamp) + kLine; }
  RINGDP_DEVICE u64& sent(i64 peer) const { return job->counts[peer * kCounts]; }
  RINGDP_DEVICE u64& took(i64 peer) const { return job->counts[peer * kCounts + 1]; }
  RINGDP_DEVICE u64& sent_bytes(i64 peer) const { return job->counts[peer * kCounts + 2]; }

  // The slot for the next message to `peer`; null after a failure.
  RINGDP_DEVICE char* outgoing(int peer) {
    const u64 number = sent(peer), depth = u64(job->depth);
    // acquire in `await`: the receiver has read what we are about to overwrite
    if (number >= depth && !await(taken(job->rank, peer), number - depth + 1, peer)) return nullptr;
    return data(slot(peer, job->rank, number));
  }
  RINGDP_DEVICE void publish(int peer, unsigned bytes, unsigned more) {
    u64& number = sent(peer);
    *slot(peer, job->rank, number) = {u64(job->number), bytes, more};
    sent_bytes(peer) += bytes;
    // release: the team's writes to the slot, and the stamp, are visible before the count
    store_release(arrived(peer, job->rank), ++number);
  }
  // The next message from `peer`; null after a failure.
  RINGDP_DEVICE Stamp* incoming(int peer) {
    const u64 number = took(peer);
    // acquire in `await`: the slot, written before `arrived`, is visible
    return await(arrived(job->rank, peer), number + 1, peer) ? slot(job->rank, peer, number) : nullptr;
  }
  RINGDP_DEVICE void release(int peer) {
    // release: orders the team's reads of the slot before the sender's next write to it
    store_release(taken(peer, job->rank), ++took(peer));
  }

  RINGDP_DEVICE bool await(const u64* counter, u64 least, int peer) {
    u64 start = 0;
    for (unsigned spins = 1; load_relaxed(counter) < least; ++spins) {
      if (spins % 64 == 0) {  // every 1024th or 8192nd is no faster [measured: H200]
        const u64 stopper = load_relaxed(stop(job->rank)), now = nanoseconds();
        if (stopper != 0) return fail(Fault::stopped, int(stopper) - 1);
        if (load_relaxed(job->failure) != 0) return false;
        if (start == 0) start = now;
        if (now - start > u64(job->timeout)) return fail(Fault::timeout, peer);
      }
      pause(spins);
    }
    load_acquire(counter);
    return true;
  }

  // Records the failure and stops the peers. Returns false. The word packs kind, peer, channel and round,
  // 16 bits each.
  RINGDP_DEVICE bool fail(Fault fault, int peer) {
    store_first(job->failure, u64(fault) | u64(peer & 0xffff) << 16 | u64(channel & 0xffff) << 32 |
                                  u64(round & 0xffff) << 48);
    if (fault != Fault::stopped)
      for (i64 r = 0; r < job->ranks; ++r) store_release(stop(r), u64(job->rank) + 1);
    return false;
  }
};

}  // namespace ringdp
