// A communicator: one rank's end of the shared file.
#pragma once

#include <sched.h>
#include <time.h>

#include <memory>

#include "shared.hpp"

namespace hostnccl {

// A wait that backs off, as ranks may share a core.
class Pause {
 public:
  void rest() {
    if (times_ < kMost) ++times_;
    if (times_ < 64) {
      sched_yield();
      return;
    }
    const timespec nap{0, times_ < kMost ? 20'000 : 200'000};  // ns
    nanosleep(&nap, nullptr);
  }
  void reset() { times_ = 0; }

 private:
  static constexpr int kMost = 1024;
  int times_ = 0;  // up to kMost
};

}  // namespace hostnccl

struct ncclComm {
  ncclComm(int fd, int ranks, int rank) : shared(fd, ranks), ranks(ranks), rank(rank) {}

  hostnccl::Shared shared;
  const int ranks, rank;
  std::atomic<bool> aborted{false};  // loaded relaxed: it publishes no other data
  std::atomic<bool> busy{false};     // whether a thread launches on it
  std::atomic<ncclResult_t> error{ncclSuccess};
};
using ncclComm_t = ncclComm*;

namespace hostnccl {

using Comm = std::shared_ptr<ncclComm>;

// The callers' valid handles. One that was destroyed or aborted is refused, not dereferenced.
struct Handles {
  std::mutex mutex;
  std::map<ncclComm*, Comm> all;
};
inline Handles handles;

inline Comm find(ncclComm* handle) {
  std::lock_guard lock(handles.mutex);
  const auto found = handles.all.find(handle);
  return found == handles.all.end() ? nullptr : found->second;
}

inline Comm forget(ncclComm* handle) {
  std::lock_guard lock(handles.mutex);
  const auto node = handles.all.extract(handle);
  return node ? node.mapped() : nullptr;
}

// Attaches as `rank`. All ranks must attach before any may communicate: see `meet`.
inline ncclResult_t attach(Comm* comm, int ranks, const ncclUniqueId& id, int rank) {
  const Place place = place_of(id);
  if (place.magic != kMagic || ranks < 1 || ranks > kMost || rank < 0 || rank >= ranks)
    return ncclInvalidArgument;
  const int fd = take(place, ranks);
  if (fd < 0) return ncclInvalidArgument;
  auto made = std::make_shared<ncclComm>(fd, ranks, rank);
  ::close(fd);
  if (!made->shared.mapped()) return ncclSystemError;
  int nobody = 0;
  if (!made->shared.header().pids[rank].compare_exchange_strong(nobody, getpid()))
    return ncclInvalidUsage;
  ++made->shared.header().attached;
  *comm = made;
  return ncclSuccess;
}

// Waits for all ranks, without a timeout, as NCCL does. Returns the handle.
inline ncclComm* meet(const Comm& comm) {
  for (Pause pause; comm->shared.header().attached.load() < comm->ranks;) pause.rest();
  withdraw(comm->shared.header().token);
  std::lock_guard lock(handles.mutex);
  handles.all[comm.get()] = comm;
  return comm.get();
}

}  // namespace hostnccl
