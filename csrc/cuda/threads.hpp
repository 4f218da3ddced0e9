// The kernels of csrc/cuda as threads of the host: a block is a team of threads, a launch is a team
// for each channel of each rank of its jobs, and returns when all have ended.
#pragma once

#include <string_view>
#include <thread>
#include <vector>

#include "dtypes.hpp"
#include "rows.hpp"

namespace ringdp {

struct alignas(16) Line {
  char bytes[16];
};

template <class T>
void block(const Job& job, const Given& given, i64 channel, int threads) {
  std::vector<Line> shared((shared_bytes(job) - 1) / i64(sizeof(Line)) + 1);
  pthread_barrier_t barrier;
  pthread_barrier_init(&barrier, nullptr, threads);
  const auto act = [&](int t) {
    run_rows<T>({t, threads, &barrier}, job, given, channel, shared[0].bytes);
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(act, t);
  act(0);
  for (auto& t : others) t.join();
  pthread_barrier_destroy(&barrier);
}

// As the driver would; 0, or 1 for a kernel that there is not, 2 where `shared` is too little.
inline int launch(const char* kernel, int channels, int ranks, const Job* jobs, Given given, int shared,
                  int threads) {
  for (int r = 0; r < ranks; ++r)
    if (shared_bytes(jobs[r]) > shared) return 2;
  void (*run)(const Job&, const Given&, i64, int) = nullptr;
#define RINGDP_CHOOSE(name, T) \
  if (kernel == std::string_view("rows_" #name)) run = block<T>;
  RINGDP_EACH_DTYPE(RINGDP_CHOOSE)
  if (!run) return 1;
  std::vector<std::thread> blocks;
  for (int r = 0; r < ranks; ++r)
    for (int c = 0; c < channels; ++c) blocks.emplace_back(run, jobs[r], given, c, threads);
  for (auto& b : blocks) b.join();
  return 0;
}

}  // namespace ringdp
