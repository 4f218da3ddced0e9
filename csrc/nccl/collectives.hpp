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
  int root = 0;

  std::size_t bytes() const { return count * size_of(type); }
  Label label(Collective what) const { return {bytes(), what, type, op, root}; }
};

inline ncclResult_t message(const Comm& comm, Group& into, bool sends, const Given& given, int peer) {
  if (peer < 0 || peer >= comm->ranks || size_of(given.type) == 0 || (!given.in && given.count))
    return ncclInvalidArgument;
  const Label label{given.bytes(), kMessage, 0, 0, 0};
  into.messages.push_back({comm, messages, sends, peer, bytes_at(given.in), label});
  return ncclSuccess;
}

class Exchange {
 public:
  Exchange(const Comm& comm, Group& into, const Given& given, Collective what)
      : comm_(comm), into_(into), given_(given), label_(given.label(what)) {}

  bool good(bool reads = true, bool writes = true) const {
    const bool there = !given_.count || ((given_.in || !reads) && (given_.out || !writes));
    return there && size_of(given_.type) != 0 && given_.root >= 0 && given_.root < comm_->ranks;
  }
  void send(int to, std::size_t offset = 0) {
    if (to != comm_->rank)
      into_.messages.push_back(
          {comm_, collectives, true, to, bytes_at(given_.in, offset), label_});
  }
  void receive(int from, std::byte* at) {
    if (from != comm_->rank)
      into_.messages.push_back({comm_, collectives, false, from, at, label_});
  }

  // Receives every other rank's part, and folds them with this rank's own, which lies at `offset`.
  void fold(std::size_t offset = 0) {
    const auto parts = std::make_shared<std::vector<std::byte>>(comm_->ranks * given_.bytes());
    for (int r = 0; r < comm_->ranks; ++r) receive(r, parts->data() + r * given_.bytes());
    into_.after.push_back([given = given_, parts, offset, ranks = comm_->ranks, me = comm_->rank] {
      if (!given.count) return;
      std::vector<const std::byte*> in;
      for (int r = 0; r < ranks; ++r)
        in.push_back(r == me ? bytes_at(given.in, offset) : parts->data() + r * given.bytes());
      ringdp::fold(arithmetic(given.type, given.op), bytes_at(given.out), in.data(), ranks,
                   given.count);
    });
  }

  // Copies this rank's own part, which needs no message.
  void keep(std::byte* at) {
    into_.after.push_back([given = given_, at] {
      if (given.count) std::memmove(at, given.in, given.bytes());
    });
  }

 private:
  const Comm& comm_;
  Group& into_;
  const Given given_;
  const Label label_;
};

inline ncclResult_t all_reduce(const Comm& comm, Group& into, const Given& given) {
  Exchange with(comm, into, given, kAllReduce);
  if (!with.good() || !reduces(given.type, given.op)) return ncclInvalidArgument;
  for (int r = 0; r < comm->ranks; ++r) with.send(r);
  with.fold();
  return ncclSuccess;
}

inline ncclResult_t reduce(const Comm& comm, Group& into, const Given& given) {
  Exchange with(comm, into, given, kReduce);
  if (!with.good(true, comm->rank == given.root) || !reduces(given.type, given.op))
    return ncclInvalidArgument;
  if (comm->rank == given.root) with.fold();
  else with.send(given.root);
  return ncclSuccess;
}

inline ncclResult_t broadcast(const Comm& comm, Group& into, const Given& given) {
  Exchange with(comm, into, given, kBroadcast);
  if (!with.good(comm->rank == given.root)) return ncclInvalidArgument;
  if (comm->rank == given.root) {
    for (int r = 0; r < comm->ranks; ++r) with.send(r);
    with.keep(bytes_at(given.out));
  } else {
    with.receive(given.root, bytes_at(given.out));
  }
  return ncclSuccess;
}

inline ncclResult_t reduce_scatter(const Comm& comm, Group& into, const Given& given) {
  Exchange with(comm, into, given, kReduceScatter);
  if (!with.good() || !reduces(given.type, given.op)) return ncclInvalidArgument;
  for (int r = 0; r < comm->ranks; ++r) with.send(r, r * given.bytes());
  with.fold(comm->rank * given.bytes());
  return ncclSuccess;
}

inline ncclResult_t all_gather(const Comm& comm, Group& into, const Given& given) {
  Exchange with(comm, into, given, kAllGather);
  if (!with.good()) return ncclInvalidArgument;
  for (int r = 0; r < comm->ranks; ++r) {
    with.send(r);
    with.receive(r, bytes_at(given.out, r * given.bytes()));
  }
  with.keep(bytes_at(given.out, comm->rank * given.bytes()));
  return ncclSuccess;
}

}  // namespace hostnccl
