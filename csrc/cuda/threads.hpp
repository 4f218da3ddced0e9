// The kernels of csrc/cuda as threads of the host: a block is a team of threads, a launch is a team
// for each channel of each rank of its jobs, and returns when all have ended.
#pragma once

#include <deque>
#include <exception>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "dtypes.hpp"
#include "rows.hpp"

namespace ringdp {

struct alignas(16) Line {
  char bytes[16];
};

struct Block {
  std::vector<Line> shared;
  pthread_barrier_t barrier;
  Block(i64 bytes, int threads) : shared((bytes - 1) / i64(sizeof(Line)) + 1) {
    pthread_barrier_init(&barrier, nullptr, threads);
  }
  ~Block() { pthread_barrier_destroy(&barrier); }
};

// As the driver would; 0, or 1 for a kernel that there is not, 2 where `shared` is too little, 3 where
// the system has not all the threads: then none begins, as blocks wait for one another.
inline int launch(const char* kernel, int channels, int ranks, const Job* jobs, Given given, int shared,
                  int threads) {
  for (int r = 0; r < ranks; ++r)
    if (shared_bytes(jobs[r]) > shared) return 2;
  void (*run)(const Team&, const Job&, const Given&, i64, char*) = nullptr;
#define RINGDP_CHOOSE(name, T) \
  if (kernel == std::string_view("rows_" #name)) run = run_rows<T>;
  RINGDP_EACH_DTYPE(RINGDP_CHOOSE)
  if (!run) return 1;
  std::mutex gate;  // open once all are there
  bool all = false;
  std::deque<Block> blocks;
  std::vector<std::thread> running;
  try {
    const std::lock_guard<std::mutex> closed(gate);
    running.reserve(std::size_t(ranks) * channels * threads);
    for (int i = 0; i < ranks * channels; ++i) {
      const Job& job = jobs[i / channels];
      Block& block = blocks.emplace_back(shared_bytes(job), threads);
      for (int t = 0; t < threads; ++t)
        running.emplace_back([&, i, t] {
          {
            const std::lock_guard<std::mutex> open(gate);
            if (!all) return;
          }
          run({t, threads, &block.barrier}, job, given, i % channels, block.shared[0].bytes);
        });
    }
    all = true;
  } catch (const std::exception&) {  // std::system_error, or no memory for what they need
  }
  for (auto& thread : running) thread.join();
  return all ? 0 : 3;
}

}  // namespace ringdp
