// Runs collectives and messages among ranks that are threads of one process. Arguments:
// all_reduce or broadcast, and one file per rank with its program: "chunks scratch rows", then the
// rows. In a broadcast only the tail orders the reuse of a slot, since nothing is sent back.
// `direct` and a number of ranks: the collectives that need no program.
// `messages` and a number of ranks.
// `bells`: sleeping ranks are woken, a lack of file descriptors is an error, and shared cores are noticed.
// `tapes`: a tape is read while it is written.
#include <sys/resource.h>

#include <fstream>
#include <future>
#include <string_view>

#include "messages_in_threads.hpp"

struct Plan {
  int chunks, scratch;
  std::vector<Row> rows;
  std::vector<std::int64_t> bounds;

  Plan(const char* path, std::int64_t elements) {
    std::ifstream file(path);
    std::size_t count;
    file >> chunks >> scratch >> count;
    rows.resize(count);
    for (Row& r : rows)
      file >> r.round >> r.recv_peer >> r.send_peer >> r.src_chunk >> r.dst_chunk >> r.flags;
    check(bool(file), "the plan can be read");
    for (int c = 0; c <= chunks; ++c) bounds.push_back(elements * c / chunks);
  }
  Job job(float* buffer, std::uint64_t number, std::uint64_t kind = 0) const {
    const Rows what{rows.data(), rows.size(), bounds.data(), chunks, scratch,
                    reinterpret_cast<std::byte*>(buffer)};
    return {what, dtype(0, 0), number, kind, bounds.back(), kNowhere};
  }
};

// Collectives of several lengths are queued and complete in order.
void results(int n, char** paths, float expected) {
  auto ranks = connected(n);
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r)
    threads.emplace_back([&, r] {
      std::vector<std::vector<float>> buffers;
      std::vector<Plan> plans;
      for (int i = 0; i < kTimes; ++i) {
        const std::int64_t elements = i * i * 3;  // 0 first; later several slabs per chunk
        plans.emplace_back(paths[r], elements);
        buffers.emplace_back(elements, float(r + 1));
      }
      std::uint64_t last = 0, taped = 0;
      for (int i = 0; i < kTimes; ++i) last = ranks[r]->start(plans[i].job(buffers[i].data(), i), i % 3 != 0);
      while (!ranks[r]->wait(last, 0.01)) {
        check(!ranks[r]->failed(), "no failure");
        for (int q = 0; q < n; ++q) {  // another rank's table may read the record at any time
          const auto call = ranks[r]->segment().record(q).call(kTimes / 2);
          check(!call || call->elements == kTimes / 2 * kTimes / 2 * 3, "a call is read whole");
        }
        taped += ranks[r]->tape().take().size() + ranks[r]->waits().take().size();
      }
      taped += ranks[r]->tape().take().size();
      check(taped % sizeof(Entry) == 0 && (taped > 0) == (r % 2), "whole entries, where asked for");
      for (auto& b : buffers)
        for (float x : b) check(x == expected, "the result");
      ranks[r]->close();  // others may still read what this rank sent
    });
  for (auto& t : threads) t.join();
}

// Returns the bounds of n parts of which part r has length(r) elements.
template <class Length>
std::vector<std::int64_t> bounds_of(int n, Length length) {
  std::vector<std::int64_t> bounds{0};
  for (int r = 0; r < n; ++r) bounds.push_back(bounds.back() + length(r));
  return bounds;
}

// All direct collectives, in every order, with none, all, or every other rank's buffers in the
// arena. In an uneven all_to_all, which follows every even one, some parts are empty.
void direct(int n) {
  arena.assign(n * kArena, 0);
  auto ranks = connected(n);
  std::vector<std::thread> threads;
  for (int me = 0; me < n; ++me)
    threads.emplace_back([&, me] {
      std::uint64_t number = 0;
      for (const std::int64_t shard : {0, 1, 300, 9000, 40000, 7, 40000, 5, 9000})
        for (int where = 0; where < 3; ++where)  // 0: no buffer in the arena, 1: all, 2: every other rank's
          for (int kind = 0; kind < 5; ++kind) {
            const Collective kinds[] = {Collective::all_gather, Collective::reduce_scatter,
                                        Collective::all_reduce, Collective::all_to_all};
            const bool uneven = kind == 4;
            const auto collective = uneven ? Collective::all_to_all : kinds[kind];
            const bool registered = where == 1 || (where == 2 && me % 2);
            std::vector<float> mine(n * shard), part(n * shard);
            float* whole = mine.data();
            float* own = part.data();
            if (registered && collective == Collective::all_gather) own = &arena[me * kArena];
            if (registered && collective != Collective::all_gather) whole = &arena[me * kArena];
            for (int i = 0; i < n * shard; ++i) whole[i] = float(me + 1);
            for (int i = 0; i < shard; ++i) own[i] = float(me + 1);
            const auto length = [&](int from, int to) {
              return uneven && (from + 2 * to) % 3 == 0 ? 0 : shard;
            };
            const auto bounds = bounds_of(n, [&](int to) { return length(me, to); });
            const auto received = bounds_of(n, [&](int from) { return length(from, me); });
            const Exchange what{collective, bounds.data(), reinterpret_cast<std::byte*>(whole),
                                reinterpret_cast<std::byte*>(own), -1, uneven ? received.data() : nullptr};
            const Job job{what, dtype(0, 0), number, 0, n * shard, kNowhere};
            const bool sliced = n > 1 && shard == 40000 && number % 5 == 2;
            const auto ticket = !sliced && number % 3 == 1
                                    ? ranks[me]->run_brief(job)
                                    : ranks[me]->start(job, !sliced && number % 4 == 0);
            if (sliced) check(!ranks[me]->wait(ticket, 0), "a slice ends where the others keep up, too");
            ++number;
            while (!ranks[me]->wait(ticket, 0.01)) check(!ranks[me]->failed(), "no failure");
            const float sum = float(n * (n + 1) / 2);
            for (int i = 0; i < shard; ++i) {
              if (collective == Collective::all_to_all)
                for (int r = 0; r < n; ++r)
                  check(length(r, me) == 0 || own[received[r] + i] == float(r + 1), "all_to_all");
              if (collective == Collective::reduce_scatter) check(own[i] == sum, "reduce_scatter");
              if (collective == Collective::all_reduce) check(whole[me * shard + i] == sum, "all_reduce");
              if (collective == Collective::all_gather)
                for (int r = 0; r < n; ++r) check(whole[r * shard + i] == float(r + 1), "all_gather");
            }
            for (int i = 0; i < n * shard; ++i) whole[i] = -1;  // no other rank may read it any more
          }
      ranks[me]->close();
    });
  for (auto& t : threads) t.join();
}

// A rank gives up while another combines its first tile of buffers in the arena. That tile must be
// the last one written.
void given_up() {
  arena.assign(2 * kArena, 1);
  auto ranks = connected(2);
  static Progress* first;
  static std::atomic<int> tiles{0};
  first = ranks[0].get();
  Dtype slow = dtype(0, 0);
  slow.combine = [](void*, const void*, const void*, std::size_t) {
    if (tiles++ == 0) first->fail({Failure::timeout, 0});
  };
  const std::int64_t bounds[] = {0, 40000, 80000};
  std::vector<std::thread> threads;
  for (int me = 0; me < 2; ++me)
    threads.emplace_back([&, me] {
      auto* const whole = reinterpret_cast<std::byte*>(&arena[me * kArena]);
      const Exchange what{Collective::all_reduce, bounds, whole, nullptr};
      const auto ticket = ranks[me]->start({what, me ? slow : dtype(0, 0), 0, 0, 80000, kNowhere}, true);
      check(!ranks[me]->wait(ticket, 30), "a call that one has given up does not end");
      check(ranks[me]->failed()->failure == Failure::timeout, "the failure has its name");
    });
  for (auto& t : threads) t.join();
  check(tiles == 1, "nothing more is written");
  ranks[1]->close();
  check(ranks[0]->left_alone() && !ranks[1]->left_alone(), "who has closed");
}

// Rank 0 fails in one of several ways; every other rank's wait must end. The others call while it
// fails or, if `after`, once it has failed.
template <class Act>
void failing(int n, char** paths, Failure expected, Act act, bool after = false) {
  auto ranks = connected(n);
  std::promise<void> acted;
  const auto over = acted.get_future().share();
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r)
    threads.emplace_back([&, r] {
      std::vector<float> first(900, 1), second(900, 1);  // must outlive the progress thread
      Plan plan(paths[r], 900);
      if (r == 0) return act(*ranks[0], plan, first.data()), acted.set_value();
      if (after) over.wait();
      ranks[r]->start(plan.job(first.data(), 0), true);
      const auto ticket = ranks[r]->start(plan.job(second.data(), 1), r % 2);
      check(!ranks[r]->wait(ticket, 30), "a failed job does not end");
      check(ranks[r]->failed()->failure == expected, "the failure has its name");
      ranks[r]->close();
    });
  for (auto& t : threads) t.join();
}

// Without a file descriptor for each rank's process its death could be missed, so that is an error
// at once.
void descriptors() {
  auto ranks = connected(2);
  rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  const int next = dup(0);
  close(next);
  const rlimit lower{rlim_t(next) + 1, limit.rlim_max};  // one is left
  setrlimit(RLIMIT_NOFILE, &lower);
  std::string why;
  try {
    ranks[0]->connect();
  } catch (const std::runtime_error& e) {
    setrlimit(RLIMIT_NOFILE, &limit);  // the sanitizer needs descriptors to print a report
    why = e.what();
  }
  check(why.find("rank 1") != why.npos, "no descriptor for rank 1");
}

// Two ranks share a core if they may use only one, however many the machine has.
void cores() {
  cpu_set_t all, one{};
  sched_getaffinity(0, sizeof all, &all);
  for (int core = 0; CPU_COUNT(&one) == 0; ++core)
    if (CPU_ISSET(core, &all)) CPU_SET(core, &one);
  sched_setaffinity(0, sizeof one, &one);
  const bool crowded = connected(2)[0]->peers().crowded();
  sched_setaffinity(0, sizeof all, &all);
  check(crowded, "two ranks share a core");
  check(connected(2)[0]->peers().crowded() == (CPU_COUNT(&all) == 1), "only then");
}

// Two threads alternate. Each would sleep for an hour if a wake-up were lost.
void bells() {
  Bell bells[2]{};
  std::atomic<int> turns{0};
  const auto take = [&](int who) {
    for (int turn = who; turn < 2000; turn += 2) {
      const auto mine = [&] { return turns.load(std::memory_order_acquire) >= turn; };
      while (!mine()) bells[who].sleep(std::chrono::hours(1), mine);
      turns.store(turn + 1, std::memory_order_release);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      bells[1 - who].ring();
    }
  };
  auto other = std::async(std::launch::async, take, 1);
  take(0);
  other.get();
  check(turns == 2000, "everybody had all turns");
}

// A tape is switched on while its thread writes, and read at the same time, so each cell is reused
// many times.
void tapes() {
  Tape tape;
  std::atomic<bool> over{false};  // relaxed, so that only the tape orders its entries
  auto writer = std::async(std::launch::async, [&] {
    for (std::uint64_t k = 0; !over.load(std::memory_order_relaxed);)
      if (tape.begin(), tape.active) tape.add(What::row, k++, 0, 0, -1, -1, -1, -1, 0);
  });
  tape.switch_on(8);
  std::int64_t last = -1;
  for (int read = 0; read < 200;) {
    const std::string taken = tape.take();
    for (std::size_t at = 0; at < taken.size(); at += sizeof(Entry), ++read) {
      Entry entry;
      std::memcpy(&entry, taken.data() + at, sizeof entry);
      check(std::int64_t(entry.number) > std::exchange(last, entry.number), "entries in their order");
    }
  }
  over.store(true, std::memory_order_relaxed);
  writer.get();
}

int main(int count, char** arguments) {
  if (arguments[1] == std::string_view("bells")) return bells(), descriptors(), cores(), 0;
  if (arguments[1] == std::string_view("tapes")) return tapes(), 0;
  if (arguments[1] == std::string_view("direct")) return direct(std::atoi(arguments[2])), given_up(), 0;
  if (arguments[1] == std::string_view("messages"))
    return messages(std::atoi(arguments[2])), queued(), damaged(), 0;
  const int n = count - 2;
  char** paths = arguments + 2;
  if (arguments[1] == std::string_view("broadcast")) return results(n, paths, 1), 0;
  results(n, paths, float(n * (n + 1) / 2));
  failing(n, paths, Failure::lost, [](Progress& rank, const Plan&, float*) { rank.close(); });
  failing(n, paths, Failure::timeout,
          [](Progress& rank, const Plan&, float*) { rank.fail({Failure::timeout, 0}); });
  failing(n, paths, Failure::mismatch, [](Progress& rank, const Plan& plan, float* buffer) {
    const auto ticket = rank.start(plan.job(buffer, 0, 99), false);
    check(!rank.wait(ticket, 30), "a mistaken job does not end");
    rank.close();
  });
  failing(n, paths, Failure::aborted, [](Progress& rank, const Plan& plan, float* buffer) {
    Job job = plan.job(buffer, 0);
    std::get<Rows>(job.what).scratch = -1;  // no allocation of this size can succeed
    const auto ticket = rank.start(job, true);
    check(!rank.wait(ticket, 30), "a job without memory does not end");
    check(!rank.failed()->why.empty(), "it says why");
    rank.close();
  });
  const auto closes = [](Progress& rank, const Plan& plan, float* buffer) {
    rank.start(plan.job(buffer, 0), true);
    const auto queued = rank.start(plan.job(buffer, 1), true);
    rank.close();  // one job is running and one is queued
    check(!rank.wait(queued, 30), "a queued job ends with the communicator");
  };
  failing(n, paths, Failure::lost, closes, true);
}
