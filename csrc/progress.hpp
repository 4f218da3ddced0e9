// Runs collectives one after the other in the order of `start`: on the thread that waits for one, or
// else on a thread of its own, beside Python.
//
// Note [at the call]
//   Whoever moves bytes takes a core. Where a rank has only one, a thread beside it hides nothing, and
//   costs: it takes the core in the middle of a computation, for each of its looks whether the others
//   have come. So there a call in the background is run by its caller as long as the others keep up,
//   and only then left to the thread: it blocks for no longer than a little time in all. Over an
//   emulated link, whose bytes move by themselves, it starts nothing.
//   torch's DDP of 55 MB in 3 buckets on a core of its own, over what a step without communication
//   takes (medians of 51 steps, two cores of an AMD EPYC), while the thread looked again and again
//   whether the others had come (now they wake it, see bell.hpp): on it 6.4 ms, at the call 4.4.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <variant>

#include "denormals.hpp"
#include "direct.hpp"
#include "interpreter.hpp"

namespace ringdp {

struct Job {
  std::variant<Rows, Exchange> what;
  Dtype dtype;
  std::uint64_t number, kind;
  std::int64_t elements;
  const char* site;  // [kSite]
  std::uint64_t issued = 0;  // ns; 0 where nobody traces
  bool background = false;
};

struct Shape {
  int ranks, depth;
  std::size_t slab;
};

class Progress final : public Records {
 public:
  Progress(int fd, int rank, Shape shape, std::uint64_t token, Arena arena, Link link)
      : segment_(fd, rank, shape.ranks, shape.depth, shape.slab, token),
        rank_(rank),
        peers_(segment_, rank, stop_),
        interpreter_(segment_, rank, peers_, put_, link),
        direct_(segment_, rank, peers_, put_, arena, link),
        far_(!link.is_none()) {}
  ~Progress() { close(); }

  void connect() { segment_.connect(); }

  // In the background somebody sees to it at once; else whoever waits for it does.
  std::uint64_t start(const Job& job, bool background) {
    std::unique_lock lock(mutex_);
    const auto ticket = queue(job, background);
    if (!background) return ticket;
    // See Note [at the call].
    const auto at = Clock::now();
    if (jobs_.size() == 1 && !running_ && !failed_ && !far_ && !peers_.spare_core())
      settle(ticket, [&] { run_front(lock, at + kAtTheCall, at + kPatience, false); });
    if (finished_ < ticket) wake();
    return ticket;
  }

  // Whether that job has ended; after a failure no job ends any more.
  bool wait(std::uint64_t ticket, double seconds) {
    std::unique_lock lock(mutex_);
    return settle(ticket, [&] { work_on(lock, ticket, seconds); });
  }

  // Whether a job of so many bytes may be run by `dash`, if it seldom waits. Over a link none is short.
  bool brief(std::size_t bytes) const { return bytes <= kBrief && !far_; }

  // Begun and waited for under the lock, until it would have to sleep: some tens of us. 0 if it has ended,
  // else its ticket.
  std::uint64_t dash(const Job& job) {
    std::lock_guard lock(mutex_);
    if (!jobs_.empty() || running_ || failed_ || waits_.on()) return queue(job, false);
    peers_.dash();
    const Outcome outcome = attempt(job);
    if (outcome.ended) {  // without a place in line, which took a tenth of 1 KiB
      begun_ = false;
      ++started_, ++finished_;
      return 0;
    }
    const auto ticket = queue(job, false);
    if (const auto f = ended(outcome)) announce(*f);
    return ticket;
  }

  // How many jobs have ended: nothing of theirs is used any more.
  std::uint64_t finished() {
    std::lock_guard lock(mutex_);
    return finished_;
  }

  // Why jobs do not end; another rank's failure too, though nothing waits for that rank yet.
  std::optional<Failed> failed() {
    std::lock_guard lock(mutex_);
    auto failed = failed_ ? failed_ : peers_.reported();
    if (failed && failed->reporter == rank_) failed->why = why_;
    return failed;
  }

  // Give up on a rank, or as this one itself, and tell the others.
  void fail(const Failed& failed) {
    std::lock_guard lock(mutex_);
    if (why_.empty()) why_ = failed.why;
    announce(failed);
  }

  void close() {
    {
      std::unique_lock lock(mutex_);
      if (stop_.exchange(true)) return;
      work_.notify_one();
      done_.wait(lock, [&] { return !running_; });
      if (!failed_) failed_ = Failed{Failure::stopped, rank_};
      done_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
    // release: whoever sees us gone sees our last messages and our report
    segment_.record(rank_).pid.store(-1, std::memory_order_release);
  }

  // Whether every other rank has ended or closed, so that none moves anything any more.
  bool left_alone() {
    for (int r = 0; r < segment_.ranks(); ++r)
      if (r != rank_ && !segment_.gone(r)) return false;
    return true;
  }

  // From now on collectives and waits are on tape, with room for so many entries of each.
  void trace(std::size_t entries) {
    std::lock_guard lock(mutex_);
    peers_.tape.switch_on(entries);
    waits_.switch_on(entries);
  }
  void untrace() {
    peers_.tape.switch_off();
    waits_.switch_off();
  }
  Tape& tape() { return peers_.tape; }
  Tape& waits() { return waits_; }

  std::uint64_t issued = 0;                      // collectives that have been called, under the GIL
  std::atomic<std::uint64_t> messages_sent{0};  // bytes of `Mailbox`, from any thread
  std::uint64_t sent() const { return peers_.sent() + messages_sent.load(std::memory_order_relaxed); }

  int rank() const { return rank_; }
  int ranks() const override { return segment_.ranks(); }
  const RankRecord& record(int rank) const override { return segment_.record(rank); }
  Segment& segment() { return segment_; }
  Peers& peers() { return peers_; }

 private:
  static constexpr std::chrono::milliseconds kAtTheCall{100};  // until a call is left to the thread
  // Of that, for how long it waits for the others, in all: a part of what handing 25 MiB over cost.
  static constexpr std::chrono::microseconds kPatience{500};
  static constexpr std::size_t kBrief = 16 << 10;  // bytes: some 3 us

  std::uint64_t queue(const Job& job, bool background) {
    jobs_.push_back(job);
    if (waits_.on()) jobs_.back().issued = now();
    jobs_.back().background = background;
    caller_ = std::this_thread::get_id();
    return ++started_;
  }

  // Whether the job has ended, after `work` on it, which counts as a wait of this thread.
  template <class Work>
  bool settle(std::uint64_t ticket, Work work) {
    if (finished_ >= ticket) return true;
    const auto since = waits_.on() ? now() : 0;
    work();
    if (since) waits_.wait(since, ticket, std::int32_t(gettid()));
    return finished_ >= ticket;
  }

  void work_on(std::unique_lock<std::mutex>& lock, std::uint64_t ticket, double seconds) {
    const auto end = after(seconds);
    // Another thread that waits says nothing of whether the one that calls computes.
    const bool idle = std::this_thread::get_id() == caller_;
    do {
      if (failed_ || (seconds <= 0 && left_to_thread())) break;
      if (running_) {
        peers_.waiting += idle;
        done_.wait_until(lock, end);
        peers_.waiting -= idle;
      } else {
        run_front(lock, end, end, !idle);
      }
    } while (finished_ < ticket && Clock::now() < end);
    if (!jobs_.empty() && !running_) wake();  // for the case that the caller does not come back
  }

  // Whether a question alone moves nothing: the first job is in the background. After a failure it does:
  // this one may have all that it needs, and its thread no core yet.
  bool left_to_thread() {
    return !running_ && jobs_.front().background && thread_.joinable() && !peers_.reported();
  }

  void wake() {
    if (stop_.load() || failed_) return;
    ensure(thread_, [this] { loop(); });
    work_.notify_one();
  }

  void loop() {
    be_prompt();
    std::unique_lock lock(mutex_);
    while (!stop_.load() && !failed_) {
      if (jobs_.empty() || running_) {
        work_.wait(lock);
      } else {
        run_front(lock, Clock::time_point::max(), Clock::time_point::max(), true);
      }
    }
  }

  // Runs the first job in line to its end, or until `end`, or `patience` where it waits for others. The
  // lock is free meanwhile.
  void run_front(std::unique_lock<std::mutex>& lock, Clock::time_point end, Clock::time_point patience,
                 bool background) {
    running_ = true;
    const Job& job = jobs_.front();  // a deque keeps it in its place
    lock.unlock();
    peers_.slice(end, patience, background);
    const Outcome outcome = attempt(job);
    lock.lock();
    running_ = false;
    const auto failed = ended(outcome);
    done_.notify_all();
    if (failed) announce(*failed);
    if (std::this_thread::get_id() != thread_.get_id() && !jobs_.empty() && thread_.joinable())
      work_.notify_one();
  }

  struct Outcome {
    bool ended = false;
    std::optional<Failed> failed;
  };

  // Runs it on from where it was.
  Outcome attempt(const Job& job) {
    const Denormals stay;
    try {
      if (!begun_) {
        if (auto f = peers_.reported()) throw *f;  // after a failure nothing begins any more
        peers_.tape.begin();
        begin(job);
      }
      begun_ = true;
      std::holds_alternative<Rows>(job.what) ? interpreter_.run() : direct_.run();
      segment_.record(rank_).end();
      if (peers_.tape.active) note(job, true);
      return {true, std::nullopt};
    } catch (const Later&) {
      return {};
    } catch (const Failed& f) {
      if (peers_.tape.active) note(job, false);
      return {false, f};
    } catch (const std::exception& e) {  // no memory
      return {false, Failed{Failure::aborted, rank_, {}, {}, -1, e.what()}};
    }
  }

  // Under the lock. What the others have to hear of.
  std::optional<Failed> ended(const Outcome& outcome) {
    if (outcome.ended) {
      jobs_.pop_front();
      begun_ = false;
      ++finished_;
    }
    const auto& failed = outcome.failed;
    if (failed && !failed_) failed_ = failed;  // first: `failed` prefers what this rank has seen
    const bool ours = failed && failed->reporter < 0 && failed->failure != Failure::stopped;
    return ours ? failed : std::nullopt;
  }

  void begin(const Job& job) {
    segment_.record(rank_).begin(job.number, job.kind, job.elements, job.site);
    // A mistake may leave every rank content, such as two ranks that scatter to one another. Then the
    // digests differ from now on, and the next message shows it.
    digest_ = (digest_ ^ job.kind) * 0x9e3779b97f4a7c15;  // 2^64 / golden ratio (Knuth, vol. 3, 6.4)
    if (auto* rows = std::get_if<Rows>(&job.what))
      interpreter_.begin(*rows, job.dtype, job.number, digest_);
    else
      direct_.begin(std::get<Exchange>(job.what), job.dtype, job.number, digest_);
  }

  void note(const Job& job, bool ended) {
    const auto* rows = std::get_if<Rows>(&job.what);
    CallCells more{job.issued, finished_ + 1, job.kind,
                   rows ? reinterpret_cast<std::uint64_t>(rows->rows) : 0, job.background, {}};
    static_assert(sizeof more.site >= kSite);
    std::memcpy(more.site, job.site, kSite);
    peers_.tape.call(ended, job.number, std::uint64_t(job.elements), more);
  }

  // Under the lock.
  void announce(const Failed& failed) {
    // relaxed: if it is this rank's, the finding that others may be reading stays as it is
    if (segment_.header().failed.load(std::memory_order_relaxed) != 0) return;
    segment_.record(rank_).finding = {failed.expected, failed.found};
    std::uint64_t none = 0;
    // release: the finding, and the messages sent before it; the first to fail stays
    segment_.header().failed.compare_exchange_strong(none, packed(failed, rank_),
                                                     std::memory_order_acq_rel);
  }

  std::uint64_t digest_ = 1;
  std::atomic<bool> stop_{false};  // read relaxed by who waits: nothing else is told by it
  Segment segment_;
  int rank_;
  Peers peers_;
  Put put_;
  Interpreter interpreter_;
  Direct direct_;
  bool far_;  // over a link
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<Job> jobs_;
  bool begun_ = false, running_ = false;  // the first job: has been begun; somebody is at it
  // Who is at the first job reads `finished_` without the lock: nobody else changes it then.
  std::uint64_t started_ = 0, finished_ = 0;
  Tape waits_;                     // under the lock
  std::thread::id caller_;         // of the last job
  std::optional<Failed> failed_;
  std::string why_;  // of what `fail` was told
  std::thread thread_;
};

}  // namespace ringdp
