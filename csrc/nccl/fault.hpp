// Faults on request, once, in the process that asks: the next launches go well, then one does not.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "types.hpp"

namespace hostnccl {

enum class Fault {
  none,
  fail,   // the launch returns `result`, and so does the communicator's asynchronous error
  stall,  // it never ends, until the communicator is aborted
  lose,   // the process is killed
};

struct Request {
  std::atomic<Fault> what{Fault::none};
  std::atomic<int> launches{0};  // that go well before
  std::atomic<ncclResult_t> result{ncclSuccess};
};

inline Request& request() {
  static Request the;
  return the;
}

// What is to happen to the launch that begins now.
inline Fault due() {
  Request& asked = request();
  const Fault what = asked.what.load();
  if (what == Fault::none || asked.launches.fetch_sub(1) > 0) return Fault::none;
  asked.what.store(Fault::none);
  if (what == Fault::lose) kill(getpid(), SIGKILL);
  return what;
}

}  // namespace hostnccl
