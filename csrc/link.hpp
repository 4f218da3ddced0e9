// An emulated network between the ranks of one host. A message occupies its rank's port for the latency
// plus the time of its bytes, as in the cost model (see Note [one message]). Each communicator has its own
// ports.
//
// Note [one message]
//   All that a rank sends to one peer in one round is one message, whatever its number of chunks and
//   slabs: only its first slab pays the latency. Slabs are sent in batches because of our few slots; the
//   emulated network takes whole messages. When every batch paid, a ring of 8 ranks took 1.7 times the
//   right time for 16 MiB.
//
// Note [held back]
//   A network's hardware moves bytes without a core; copies through slots need one: 11 ms for 55 MB on 2
//   ranks. So a direct all_reduce, reduce_scatter or all_gather runs in memory as soon as all ranks have
//   arrived, and its end is held back until the last message would have arrived. What is left is the
//   addition, or one copy, which a rank does before the bytes are due instead of after.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringdp {

struct Link {
  double latency = 0, bandwidth = 0;  // s, bytes/s; a bandwidth of 0 is no link at all
  int stride = 1;                     // slabs per pass of the interpreter

  bool is_none() const { return bandwidth <= 0; }

  // Returns for how long, in ns, so many messages of so many bytes each occupy a rank's port.
  std::uint64_t takes(std::size_t messages, std::size_t bytes) const {
    return std::uint64_t(1e9 * double(messages) * (latency + double(bytes) / bandwidth));
  }
};

}  // namespace ringdp
