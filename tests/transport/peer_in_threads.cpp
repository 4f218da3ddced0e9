// Runs the kernels of csrc/cuda as threads of one process, so that ThreadSanitizer sees both ends
// of every channel. Arguments: `sum`, `dead` or `mistaken`, and one file per rank with its program:
// "chunks scratch rows", then the rows.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string_view>
#include <thread>
#include <vector>

#include "cuda/threads.hpp"

using namespace ringdp;

void check(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::_Exit(1);
}

constexpr int kTeam = 2;
constexpr i64 kChannels = 2, kDepth = 2, kSlab = 256, kShared = 48 << 10;

struct Rank {
  i64 chunks, scratch;
  std::vector<Row> rows;
  std::vector<i64> bounds;
  std::vector<float> buffer;
  std::vector<Line> scratch_memory, window;
  std::vector<u64> counts;
  u64 failure = 0;

  Rank(const char* path, i64 ranks) : counts(kChannels * ranks * kCounts) {
    std::ifstream file(path);
    std::size_t count;
    file >> chunks >> scratch >> count;
    rows.resize(count);
    for (Row& r : rows)
      file >> r.round >> r.recv_peer >> r.send_peer >> r.src_chunk >> r.dst_chunk >> r.flags;
    check(bool(file), "the program can be read");
    scratch_memory.resize(kChannels * scratch * kSlab / 16 + 1);
    window.resize((kLine * (1 + 2 * kChannels * ranks) + kChannels * ranks * kDepth * (kLine + kSlab)) / 16);
  }
  Job job(i64 rank, char* const* windows, i64 ranks, i64 number, i64 timeout, i64 elements) {
    bounds.clear();
    for (i64 c = 0; c <= chunks; ++c) bounds.push_back(elements * c / chunks);
    buffer.assign(elements, float(rank + 1));
    return {rank, ranks, kChannels, kDepth, kSlab, kChannels, number, timeout, 0,
            rows.data(), i64(rows.size()), bounds.data(), chunks, scratch,
            reinterpret_cast<char*>(buffer.data()), scratch_memory[0].bytes, counts.data(), &failure,
            windows};
  }
};

// What a leader reads for every row is in its own memory, whose size is what the host reserves.
void check_near(const Job& job) {
  std::vector<Line> memory(shared_bytes(job) / i64(sizeof(Line)) + 1);
  const char *begin = memory[0].bytes + kLeader, *end = memory[0].bytes + shared_bytes(job);
  const Near near = copy_near({0, 1, nullptr}, job, 1, memory[0].bytes + kLeader);
  const void* const places[] = {near.job.rows, near.job.bounds, near.job.windows, near.job.counts,
                                near.held, near.going, near.live};
  for (const void* place : places) check(place >= begin && place <= end, "a copy is near");
  check(near.live + job.chunks + job.scratch == end, "the size of what is near");
}

int main(int count, char** arguments) {
  const std::string_view mode = arguments[1];
  const int n = count - 2;
  std::vector<Rank> ranks;
  for (int r = 0; r < n; ++r) ranks.emplace_back(arguments[2 + r], n);
  std::vector<char*> windows;
  for (auto& r : ranks) windows.push_back(r.window[0].bytes);
  if (mode == "sum") {
    i64 number = 0;
    for (const i64 elements : {0, 1, 7, 100, 1000, 3001, 3, 2000}) {
      std::vector<Job> jobs;
      for (int r = 0; r < n; ++r)
        jobs.push_back(ranks[r].job(r, windows.data(), n, number, 60'000'000'000, elements));
      check_near(jobs[0]);
      check(launch("rows_float32", kChannels, n, jobs.data(), {}, kShared, kTeam) == 0, "there is such a kernel");
      for (auto& r : ranks) {
        check(r.failure == 0, "no failure");
        for (float x : r.buffer) check(x == float(n * (n + 1) / 2), "the sum");
      }
      ++number;
    }
    return 0;
  }
  // Rank 0 is missing, or one collective ahead. All other ranks' waits must end, with the right
  // fault.
  const bool dead = mode == "dead";
  std::vector<Job> jobs;
  for (int r = 0; r < n; ++r)
    jobs.push_back(ranks[r].job(r, windows.data(), n, r == 0 && !dead, dead ? 100'000'000 : 60'000'000'000, 3000));
  check(launch("rows_float32", kChannels, n - dead, jobs.data() + dead, {}, kShared, kTeam) == 0, "there is such a kernel");
  bool found = false;
  for (int r = dead; r < n; ++r) {
    const auto fault = Fault(ranks[r].failure & 0xffff);
    const int peer = ranks[r].failure >> 16 & 0xffff;
    check(fault != Fault::none, "a failure");
    check(fault == (dead ? Fault::timeout : Fault::mismatch) || fault == Fault::stopped, "its kind");
    check(fault != Fault::stopped || peer != r, "stopped by another");
    found |= fault != Fault::stopped;
  }
  check(found, "somebody found it");
}
