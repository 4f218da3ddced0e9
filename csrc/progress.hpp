// Runs collectives one after the other in the order of `start`, on a thread that waits for one or on a
// background thread, without the GIL.
//
// Note [at the call]
//   Moving bytes takes a core. If a rank has only one, a background thread hides nothing and interrupts the
//   computation whenever it checks for its peers. So in that case the caller of a background collective runs
//   it while the peers keep up, and leaves it to the thread once it would have waited for kPatience in all.
//   Over an emulated link, whose bytes move by themselves, the caller runs nothing.
//   Measured with torch's DDP, 55 MB in 3 buckets, one core per rank, beyond a step without communication
//   (medians of 51 steps, two cores of an AMD EPYC), when the thread still polled for its peers (now they
//   wake it, see bell.hpp): on the thread 6.4 ms, at the call 4.4.
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
  std::uint64_t issued = 0;  // ns; 0: not traced
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

  // Queues a job and returns its ticket. A background job makes progress at once, any other one only while
  // a thread waits for it.
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

  // Works on the jobs up to `ticket` for at most so many seconds. Returns whether that one has ended. After
  // a failure no job ends any more.
  bool wait(std::uint64_t ticket, double seconds) {
    std::unique_lock lock(mutex_);
    return settle(ticket, [&] { work_on(lock, ticket, seconds); });
  }

  // Returns whether a job of so many bytes suits `run_brief`, if it has few waits. Over a link none does.
  bool brief(std::size_t bytes) const { return bytes <= kBrief && !far_; }

  // Runs a job under the lock until it would have to sleep: tens of us. Returns 0 if it has ended, else its
  // ticket.
  std::uint64_t run_brief(const Job& job) {
    std::lock_guard lock(mutex_);
    if (!jobs_.empty() || running_ || failed_ || waits_.on()) return queue(job, false);
    peers_.slice_brief();
    const Outcome outcome = attempt(job);
    if (outcome.ended) {  // never queued, which would take a tenth of the time of 1 KiB
      begun_ = false;
      ++started_, ++finished_;
      return 0;
    }
    const auto ticket = queue(job, false);
    if (const auto f = ended(outcome)) announce(*f);
    return ticket;
  }

  // Returns how many jobs have ended. Their buffers are not used any more.
  std::uint64_t finished() {
    std::lock_guard lock(mutex_);
    return finished_;
  }

  // Returns why jobs do not end: this rank's failure or one reported by any other rank.
  std::optional<Failed> failed() {
    std::lock_guard lock(mutex_);
    auto failed = failed_ ? failed_ : peers_.reported();
    if (failed && failed->reporter == rank_) failed->why = why_;
    return failed;
  }

  // Reports to all ranks that `failed.rank` is at fault, or that this rank gives up.
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
    // release: a rank that sees us closed sees our last messages and our report
    segment_.record(rank_).pid.store(-1, std::memory_order_release);
  }

  // Returns whether every other rank has ended or closed, so that none touches shared memory any more.
  bool left_alone() {
    for (int r = 0; r < segment_.ranks(); ++r)
      if (r != rank_ && !segment_.gone(r)) return false;
    return true;
  }

  // Records collectives and waits from now on, with room for so many entries of each.
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

  std::uint64_t issued = 0;                      // collectives called so far; guarded by the GIL
  // Bytes that `Mailbox` has sent, from any thread. relaxed: the count orders nothing.
  std::atomic<std::uint64_t> messages_sent{0};
  std::uint64_t sent() const { return peers_.sent() + messages_sent.load(std::memory_order_relaxed); }

  int rank() const { return rank_; }
  int ranks() const override { return segment_.ranks(); }
  const RankRecord& record(int rank) const override { return segment_.record(rank); }
  Segment& segment() { return segment_; }
  Peers& peers() { return peers_; }

 private:
  static constexpr std::chrono::milliseconds kAtTheCall{100};  // before a call is left to the thread
  // How long of that it may wait for peers, in total: a part of what handing 25 MiB over cost.
  static constexpr std::chrono::microseconds kPatience{500};
  static constexpr std::size_t kBrief = 16 << 10;  // bytes: about 3 us

  std::uint64_t queue(const Job& job, bool background) {
    jobs_.push_back(job);
    if (waits_.on()) jobs_.back().issued = now();
    jobs_.back().background = background;
    caller_ = std::this_thread::get_id();
    return ++started_;
  }

  // Calls `work`, which counts as a wait of this thread, unless the job has ended. Returns whether it has.
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
    // If the thread that called waits, the rank does not compute; another one's wait does not show that.
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
    if (!jobs_.empty() && !running_) wake();  // in case the caller does not wait again
  }

  // Returns whether a poll should leave the first job to the thread: it is a background job. But after a
  // failure a poll works on it, as the job may have all that it needs while the thread has no core yet.
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

  // Runs the first job, without the lock, until it has ended, or until `end`, or until `patience` while it
  // waits for peers.
  void run_front(std::unique_lock<std::mutex>& lock, Clock::time_point end, Clock::time_point patience,
                 bool background) {
    running_ = true;
    const Job& job = jobs_.front();  // stays valid: a deque does not move its elements
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

  // Begins or resumes a job.
  Outcome attempt(const Job& job) {
    const Denormals kept;
    try {
      if (!begun_) {
        if (auto f = peers_.reported()) throw *f;  // after a failure no collective begins
        peers_.tape.begin();
        begin(job);
      }
      begun_ = true;
      std::holds_alternative<Rows>(job.what) ? interpreter_.run() : direct_.run();
      segment_.record(rank_).end();
      if (peers_.tape.active) note(job, true);
      return {true, std::nullopt};
    } catch (const SliceOver&) {
      return {};
    } catch (const Failed& f) {
      if (peers_.tape.active) note(job, false);
      return {false, f};
    } catch (const std::exception& e) {  // no memory
      return {false, Failed{Failure::aborted, rank_, {}, {}, -1, e.what()}};
    }
  }

  // Under the lock. Updates the queue, and returns a failure that the other ranks do not know of.
  std::optional<Failed> ended(const Outcome& outcome) {
    if (outcome.ended) {
      jobs_.pop_front();
      begun_ = false;
      ++finished_;
    }
    const auto& failed = outcome.failed;
    if (failed && !failed_) failed_ = failed;  // kept first: `failed()` prefers it to others' reports
    const bool ours = failed && failed->reporter < 0 && failed->failure != Failure::stopped;
    return ours ? failed : std::nullopt;
  }

  void begin(const Job& job) {
    segment_.record(rank_).begin(job.number, job.kind, job.elements, job.site);
    // Mismatched calls may each succeed, for instance if two ranks scatter to one another. The digests then
    // differ from now on, and the next message reveals it.
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

  // Under the lock. Reports a failure to all ranks, unless there is one already.
  void announce(const Failed& failed) {
    // relaxed: only this rank writes its finding, under the lock; it must not change once it is published
    if (segment_.header().failed.load(std::memory_order_relaxed) != 0) return;
    segment_.record(rank_).finding = {failed.expected, failed.found};
    std::uint64_t none = 0;
    // release: the finding, and the messages sent before it. The first failure stays.
    segment_.header().failed.compare_exchange_strong(none, packed(failed, rank_),
                                                     std::memory_order_acq_rel);
  }

  std::uint64_t digest_ = 1;
  std::atomic<bool> stop_{false};  // waits load it relaxed: it publishes no other data
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
  bool begun_ = false, running_ = false;  // whether the first job has begun; whether a thread runs it
  // The thread that runs the first job reads `finished_` without the lock: nobody else changes it then.
  std::uint64_t started_ = 0, finished_ = 0;
  Tape waits_;                     // under the lock
  std::thread::id caller_;         // of the last job
  std::optional<Failed> failed_;
  std::string why_;  // the reason given to `fail`
  std::thread thread_;
};

}  // namespace ringdp
