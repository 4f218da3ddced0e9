// Nanoseconds of an all_reduce without Python: two processes, each on its core, and nothing around the
// exchange but what `Progress` does. Arguments: bytes, the two cores.
//
// As `ringdp bench` does, every call finds a buffer that has just been written and ranks that have just
// met; a call is as long as the slower rank's. Prints the median.
#include <sched.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>

#include "../csrc/progress.hpp"

using namespace ringdp;

constexpr int kTimes = 50'000, kDepth = 16, kInt32 = 6, kFloat32 = 0;
constexpr std::size_t kSlab = 64 << 10;
constexpr char kNowhere[kSite] = "a bench";

struct Shared {
  std::atomic<int> met;
  std::uint64_t nanoseconds[2][kTimes];
};

class Rank {
 public:
  Rank(int fd, int rank) : core_(fd, rank, {2, kDepth, kSlab}, 7, {}, {}) {}
  void connect() { core_.connect(); }

  template <class T>
  void all_reduce(std::vector<T>& data, int code) {
    const auto n = std::int64_t(data.size());
    const std::int64_t bounds[] = {0, n / 2, n};
    auto* const whole = reinterpret_cast<std::byte*>(data.data());
    const Exchange what{Collective::all_reduce, bounds, whole, nullptr};
    const auto ticket = core_.run_brief({what, dtype(code, 0), number_++, 0, n, kNowhere});
    while (!core_.wait(ticket, 1)) {
    }
  }

 private:
  Progress core_;
  std::uint64_t number_ = 0;
};

void measure(int rank, int core, int fd, std::size_t bytes, Shared& shared) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  sched_setaffinity(0, sizeof cores, &cores);
  const auto meet = [&](int count) {
    ++shared.met;
    while (shared.met < count) sched_yield();
  };
  if (rank == 1) meet(2);  // rank 0 writes the header of the segment
  Rank me(fd, rank);
  if (rank == 0) meet(2);
  meet(4);
  me.connect();
  std::vector<float> data(bytes / 4);
  std::vector<std::int32_t> none(1);
  for (int i = 0; i < kTimes; ++i) {
    std::fill(data.begin(), data.end(), float(i));
    me.all_reduce(none, kInt32);
    const auto start = now();
    me.all_reduce(data, kFloat32);
    shared.nanoseconds[rank][i] = now() - start;
  }
  meet(6);
}

int main(int, char** arguments) {
  const int fd = memfd_create("ringdp-bench", 0);
  if (ftruncate(fd, Segment::size(2, kDepth, kSlab)) != 0) return 1;
  void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto& shared = *new (at) Shared{};
  const bool child = fork() == 0;
  measure(child, std::atoi(arguments[child ? 3 : 2]), fd, std::atol(arguments[1]), shared);
  if (child) _exit(0);
  std::vector<std::uint64_t> slower;
  for (int i = 0; i < kTimes; ++i)
    slower.push_back(std::max(shared.nanoseconds[0][i], shared.nanoseconds[1][i]));
  std::sort(slower.begin(), slower.end());
  std::printf("%lu\n", slower[kTimes / 2]);
  wait(nullptr);
}
