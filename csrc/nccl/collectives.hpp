// NCCL's calls as messages. Every collective is direct, and folds what arrives in rank order.
#pragma once

#include "group.hpp"

namespace hostnccl {

enum Collective { kMessage, kAllReduce, kReduce, kBroadcast, kReduceScatter, kAllGather };

inline std::byte* bytes_at(const void* buffer, std::size_t offset = 0) {
  return static_cast<std::byte*>(const_cast<void*>(buffer)) + offset;
}

// A call's arguments, which are the same on all ranks except for the buffers.
struct Given {
  const void* in;
  void* out;
  std::size_t count;  // elements, as the call counts them
  ncclDataType_t type;
  ncclRedOp_t op = ncclSum;
  int root = 0;  // of a message: its peer

  std::size_t bytes() const { return count * size_of(type); }
  Label label(Collective what) const { return {bytes(), what, type, op, root}; }
};

inline ncclResult_t message(const Comm& comm, Group& into, const Given& given, bool sends) {
  const int peer = given.root;
  if (peer < 0 || peer >= comm->ranks || size_of(given.type) == 0 || (!given.in && given.count))
    return ncclInvalidArgument;
  const Label label{given.bytes(), kMessage, 0, 0, 0};
  into.messages.push_back({comm, messages, sends, peer, bytes_at(given.in), label});
  return ncclSuccess;
}

//   collective       sent                 to           then
//   all_reduce       every input          all others   every rank adds all inputs
//   reduce           every input          the root     the root adds them
//   broadcast        the root's input     all others   the root copies its own
//   reduce_scatter   part r of an input   rank r       every rank adds the parts for it
//   all_gather       every input          all others   every rank copies its own to its place
inline ncclResult_t collective(const Comm& comm, Group& into, const Given& given, Collective what) {
  const int ranks = comm->ranks, me = comm->rank;
  const bool adds = what != kBroadcast && what != kAllGather;
  const bool reads = what != kBroadcast || me == given.root;  // whether this rank has an input
  const bool writes = what != kReduce || me == given.root;    // and an output
  const bool there = !given.count || ((given.in || !reads) && (given.out || !writes));
  if (!there || size_of(given.type) == 0 || given.root < 0 || given.root >= ranks ||
      (adds && !reduces(given.type, given.op)))
    return ncclInvalidArgument;
  const auto bytes = given.bytes();
  const auto in = [&](int r) { return bytes_at(given.in, what == kReduceScatter ? r * bytes : 0); };
  const auto out = [&](int r) { return bytes_at(given.out, what == kAllGather ? r * bytes : 0); };
  const auto parts = std::make_shared<std::vector<std::byte>>(adds && writes ? ranks * bytes : 0);
  for (int r = 0; r < ranks; ++r) {
    if (r == me) continue;
    if (what == kReduce ? r == given.root : reads)
      into.messages.push_back({comm, collectives, true, r, in(r), given.label(what)});
    if (what == kBroadcast ? r == given.root : writes)
      into.messages.push_back(
          {comm, collectives, false, r, adds ? parts->data() + r * bytes : out(r), given.label(what)});
  }
  if (!reads || !writes || !given.count) return ncclSuccess;
  into.after.push_back([=, own = in(me), to = out(me)] {
    if (!adds) {
      std::memmove(to, own, bytes);
      return;
    }
    std::vector<const std::byte*> from;
    for (int r = 0; r < ranks; ++r) from.push_back(r == me ? own : parts->data() + r * bytes);
    ringdp::fold(arithmetic(given.type, given.op), to, from.data(), ranks, given.count);
  });
  return ncclSuccess;
}

}  // namespace hostnccl
