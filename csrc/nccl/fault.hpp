// Fault injection, once, in the requesting process: so many launches succeed, then one fails.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "types.hpp"

namespace hostnccl {

enum class Fault {
  none,
  fail,   // the launch returns `result`, and so does the communicator's asynchronous error
  stall,  // the launch does not end until the communicator is aborted
  lose,   // the process is killed
};

struct Request {
  std::atomic<Fault> what{Fault::none};
  std::atomic<int> launches{0};  // that succeed before
  std::atomic<ncclResult_t> result{ncclSuccess};
};

inline Request request;

// Returns the fault for the launch that begins now.
inline Fault due() {
  const Fault what = request.what.load();
  if (what == Fault::none || request.launches.fetch_sub(1) > 0) return Fault::none;
  request.what.store(Fault::none);
  if (what == Fault::lose) kill(getpid(), SIGKILL);
  return what;
}

}  // namespace hostnccl
