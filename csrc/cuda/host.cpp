// The kernels compiled as a host library. `launch` starts one by name, in place of a GPU's driver.
#include "threads.hpp"

extern "C" __attribute__((visibility("default"))) int launch(
    const char* kernel, int channels, int ranks, const ringdp::Job* jobs, char* buffer, char* room,
    ringdp::i64 number, int shared) {
  constexpr int kThreads = 1;  // per block: there are few cores
  return ringdp::launch(kernel, channels, ranks, jobs, {buffer, room, number}, shared, kThreads);
}
