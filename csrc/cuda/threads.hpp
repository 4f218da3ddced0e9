// Runs the kernels of csrc/cuda as host threads. A block is a team of threads. A launch runs one team
// for each channel of each rank in its jobs, and returns when all have ended.
#pragma once

#include <deque>
#include <exception>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

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

// Launches a kernel, as the driver would. Returns 0, or 1 if there is no such kernel, 2 if `shared` is
// too small, 3 if the system lacks threads: then none begins, as blocks wait for one another.
inline int launch(const char* kernel, int channels, int ranks, const Job* jobs, Given given, int shared,
                  int threads) {
  for (int r = 0; r < ranks; ++r)
    if (shared_bytes(jobs[r]) > shared) return 2;
  void (*run)(const Team&, const Job&, const Given&, i64, char*) = nullptr;
#define RINGDP_CHOOSE(name, T) \
  if (kernel == std::string_view("rows_" #name)) run = run_rows<T>;
  RINGDP_EACH_DTYPE(RINGDP_CHOOSE)
  if (!run) return 1;
  std::mutex gate;  // held until all threads have been created
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
  } catch (const std::exception&) {  // no thread (std::system_error), or no memory
  }
  for (auto& thread : running) thread.join();
  return all ? 0 : 3;
}

}  // namespace ringdp
