// A network that this host does not have. A message takes its rank's port for the latency and for its
// bytes, as in the cost model (see Note [one message]); a communicator has ports of its own.
//
// Note [one message]
//   What a rank sends another in one round is one message, however many chunks and slabs it comes in:
//   its first slab pays the latency. A slab that comes later was not sent later by the network that
//   is emulated, which has room for whole messages, but by these few slots: paying for each of the
//   batches that they make of it took a ring of 8 ranks 1.7 times what it should for 16 MiB.
//
// Note [held back]
//   The bytes that a network's hardware moves cost the ranks no core, and copies through slots do: 11
//   ms for 55 MB on 2 ranks. So a direct all_reduce, reduce_scatter or all_gather is run in memory as
//   soon as all have come to it, and its end is held back until the last message would have come. What
//   remains is the addition, or one copy, which a rank does before the bytes are due and not after.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringdp {

struct Link {
  double latency = 0, bandwidth = 0;  // s, bytes/s; a bandwidth of 0 is no link at all
  int stride = 1;                     // slabs taken at a time

  bool is_none() const { return bandwidth <= 0; }

  // How long a rank's port is taken by so many messages of so many bytes each, in ns.
  std::uint64_t takes(std::size_t messages, std::size_t bytes) const {
    return std::uint64_t(1e9 * double(messages) * (latency + double(bytes) / bandwidth));
  }
};

}  // namespace ringdp
