// The kernels for the host, as a library: what launches them by name, in place of a GPU's driver.
#include "threads.hpp"

extern "C" __attribute__((visibility("default"))) int launch(
    const char* kernel, int channels, int ranks, const ringdp::Job* jobs, char* buffer, char* room,
    ringdp::i64 number, int shared) {
  constexpr int kThreads = 1;  // of a block: cores are few
  return ringdp::launch(kernel, channels, ranks, jobs, {buffer, room, number}, shared, kThreads);
}
