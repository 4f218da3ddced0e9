// NCCL's C API over host memory, for ranks of one host: only what CuPy's binding imports.
//
// With it, code that drives NCCL runs on machines without a GPU, on host buffers. Streams are ignored, as a
// call has done its work when it returns. It is for testing and study: strict where NCCL leaves behaviour
// open, and able to fail on request (hostNcclFault). Atomics are sequentially consistent unless an order is
// named, as speed does not matter here.
#include "collectives.hpp"

using namespace hostnccl;

using Stream = void*;

namespace {

bool usable(const ncclConfig_t* config) {
  return !config || (config->magic == kConfigMagic && config->blocking != 0);
}

// Stores what `of` returns of the communicator.
template <class Value, class Of>
ncclResult_t tell(ncclComm_t handle, Value* out, Of of) {
  const Comm comm = find(handle);
  if (!comm || !out) return ncclInvalidArgument;
  *out = of(*comm);
  return ncclSuccess;
}

}  // namespace

// Makes a launch of this process fail after `launches` that succeed: see fault.hpp.
RINGDP_API ncclResult_t hostNcclFault(int what, int launches, ncclResult_t result) {
  if (what < 0 || what > int(Fault::lose) || launches < 0) return ncclInvalidArgument;
  request.launches.store(launches);
  request.result.store(result);
  request.what.store(Fault(what));
  return ncclSuccess;
}

// Returns whether that launch is still to come.
RINGDP_API int hostNcclFaultIsDue() { return request.what.load() != Fault::none; }

RINGDP_API ncclResult_t ncclGetVersion(int* version) {
  if (!version) return ncclInvalidArgument;
  *version = kVersion;
  return ncclSuccess;
}

RINGDP_API const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "a system call failed";
    case ncclInternalError: return "the communicator was aborted";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage: the calls of two ranks do not fit";
    case ncclRemoteError: return "a remote rank has failed or left";
  }
  return "unknown error";
}

RINGDP_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return id ? offer(id) : ncclInvalidArgument;
}

RINGDP_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id,
                                               int rank, ncclConfig_t* config) {
  Comm made;
  const bool good = comm && usable(config);
  const ncclResult_t result = good ? attach(&made, ranks, id, rank) : ncclInvalidArgument;
  if (result == ncclSuccess) *comm = meet(made);
  return result;
}

RINGDP_API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, ranks, id, rank, nullptr);
}

RINGDP_API ncclResult_t ncclCommInitAll(ncclComm_t* comms, int ranks, const int*) {
  ncclUniqueId id;
  if (!comms || ranks < 1) return ncclInvalidArgument;
  if (const ncclResult_t result = offer(&id); result != ncclSuccess) return result;
  std::vector<Comm> made(ranks);
  for (int r = 0; r < ranks; ++r)
    if (const ncclResult_t result = attach(&made[r], ranks, id, r); result != ncclSuccess) {
      withdraw(place_of(id).token);
      return result;
    }
  for (int r = 0; r < ranks; ++r) comms[r] = meet(made[r]);
  return ncclSuccess;
}

// Ranks of one color meet through the id that the first of them made. Refused in a group, whose calls run
// later.
RINGDP_API ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* made,
                                      ncclConfig_t* config) {
  const Comm comm = find(handle);
  if (!comm || !made || !usable(config)) return ncclInvalidArgument;
  if (group().depth)
    return enqueue(handle, [](const Comm&, Group&) { return ncclInvalidUsage; });
  struct Member {
    int color, key, rank;
    ncclUniqueId id;
  };
  Member self{color, key, comm->rank, {}};
  if (const ncclResult_t result = offer(&self.id); result != ncclSuccess) return result;
  std::vector<Member> all(comm->ranks);
  const Given given{&self, all.data(), sizeof self, ncclInt8};
  ncclResult_t result = enqueue(handle, collective, given, kAllGather);
  *made = nullptr;
  std::vector<Member> same;
  for (const Member& member : all)
    if (result == ncclSuccess && member.color == color && color >= 0) same.push_back(member);
  if (!same.empty()) {
    std::sort(same.begin(), same.end(), [](const Member& a, const Member& b) {
      return std::tie(a.key, a.rank) < std::tie(b.key, b.rank);
    });
    int rank = 0;
    while (same[rank].rank != comm->rank) ++rank;
    result = ncclCommInitRank(made, int(same.size()), same[0].id, rank);
  }
  withdraw(place_of(self.id).token);  // all have attached, or none will
  return result;
}

RINGDP_API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return !comm || forget(comm) ? ncclSuccess : ncclInvalidArgument;
}

// Makes running calls on it return soon.
RINGDP_API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const Comm ended = forget(comm);
  if (!ended) return comm ? ncclInvalidArgument : ncclSuccess;
  ended->aborted.store(true);
  return ncclSuccess;
}

RINGDP_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  return tell(comm, error, [](const ncclComm& c) { return c.error.load(); });
}

RINGDP_API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return tell(comm, count, [](const ncclComm& c) { return c.ranks; });
}

RINGDP_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return tell(comm, rank, [](const ncclComm& c) { return c.rank; });
}

// There is one "device": the host.
RINGDP_API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return tell(comm, device, [](const ncclComm&) { return 0; });
}

RINGDP_API ncclResult_t ncclGroupStart() {
  ++group().depth;
  return ncclSuccess;
}

RINGDP_API ncclResult_t ncclGroupEnd() { return end_group(); }

RINGDP_API ncclResult_t ncclSend(const void* in, std::size_t count, ncclDataType_t type, int peer,
                                 ncclComm_t comm, Stream) {
  return enqueue(comm, message, Given{in, nullptr, count, type, ncclSum, peer}, true);
}

RINGDP_API ncclResult_t ncclRecv(void* out, std::size_t count, ncclDataType_t type, int peer,
                                 ncclComm_t comm, Stream) {
  return enqueue(comm, message, Given{out, nullptr, count, type, ncclSum, peer}, false);
}

RINGDP_API ncclResult_t ncclAllReduce(const void* in, void* out, std::size_t count,
                                      ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, Stream) {
  return enqueue(comm, collective, Given{in, out, count, type, op}, kAllReduce);
}

RINGDP_API ncclResult_t ncclReduce(const void* in, void* out, std::size_t count, ncclDataType_t type,
                                   ncclRedOp_t op, int root, ncclComm_t comm, Stream) {
  return enqueue(comm, collective, Given{in, out, count, type, op, root}, kReduce);
}

RINGDP_API ncclResult_t ncclBroadcast(const void* in, void* out, std::size_t count,
                                      ncclDataType_t type, int root, ncclComm_t comm, Stream) {
  return enqueue(comm, collective, Given{in, out, count, type, ncclSum, root}, kBroadcast);
}

RINGDP_API ncclResult_t ncclBcast(void* buffer, std::size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, Stream stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

RINGDP_API ncclResult_t ncclReduceScatter(const void* in, void* out, std::size_t count,
                                          ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                          Stream) {
  return enqueue(comm, collective, Given{in, out, count, type, op}, kReduceScatter);
}

RINGDP_API ncclResult_t ncclAllGather(const void* in, void* out, std::size_t count,
                                      ncclDataType_t type, ncclComm_t comm, Stream) {
  return enqueue(comm, collective, Given{in, out, count, type}, kAllGather);
}
