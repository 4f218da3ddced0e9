// The progress thread: runs programs one after the other in the order of `start`, beside Python.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "interpreter.hpp"

namespace ringdp {

class Progress {
 public:
  Progress(int fd, int rank, int ranks, int depth, std::size_t slab, std::uint64_t token)
      : segment_(fd, rank, ranks, depth, slab, token), rank_(rank), interpreter_(segment_, rank, stop_) {}
  ~Progress() { close(); }

  void connect() {
    segment_.connect();
    thread_ = std::thread([this] { loop(); });
  }

  std::uint64_t start(const Job& job) {
    std::lock_guard lock(mutex_);
    jobs_.push_back(job);
    work_.notify_one();
    return ++started_;
  }

  // Whether that job has ended; after a failure no job ends any more.
  bool wait(std::uint64_t ticket, double seconds) {
    std::unique_lock lock(mutex_);
    done_.wait_for(lock, std::chrono::duration<double>(seconds),
                   [&] { return finished_ >= ticket || failed_; });
    return finished_ >= ticket;
  }

  // How many jobs have ended: nothing of theirs is used any more.
  std::uint64_t finished() {
    std::lock_guard lock(mutex_);
    return finished_;
  }

  // Why jobs do not end; another rank's failure too, though nothing waits for that rank yet.
  std::optional<Failed> failed() {
    std::lock_guard lock(mutex_);
    return failed_ ? failed_ : interpreter_.reported();
  }

  // Give up on `rank`, or as `rank` itself, and tell the others.
  void fail(Failure failure, int rank) { announce({failure, rank}); }

  void close() {
    if (closed_) return;
    closed_ = true;
    {
      std::lock_guard lock(mutex_);
      stop_.store(true);
      work_.notify_one();
    }
    if (thread_.joinable()) thread_.join();
    // release: whoever sees us gone sees our last messages and our report
    segment_.record(rank_).pid.store(-1, std::memory_order_release);
  }

  Segment& segment() { return segment_; }
  Interpreter& interpreter() { return interpreter_; }

 private:
  void loop() {
    for (;;) {
      Job job;
      {
        std::unique_lock lock(mutex_);
        work_.wait(lock, [&] { return stop_.load() || !jobs_.empty(); });
        if (stop_.load()) {
          failed_ = Failed{Failure::stopped, rank_};
          done_.notify_all();
          return;
        }
        job = jobs_.front();
        jobs_.pop_front();
      }
      try {
        interpreter_.run(job);
      } catch (const Failed& f) {
        {
          std::lock_guard lock(mutex_);  // first: `failed` prefers what this rank itself has seen
          failed_ = f;
          done_.notify_all();
        }
        if (f.reporter < 0 && f.failure != Failure::stopped) announce(f);
        return;
      }
      std::lock_guard lock(mutex_);
      ++finished_;
      done_.notify_all();
    }
  }

  void announce(const Failed& failed) {
    if (announced_.exchange(true)) return;  // what others may be reading stays as it is
    segment_.record(rank_).finding = {failed.expected, failed.found};
    std::uint64_t none = 0;
    // release: the finding, and the messages sent before it; the first to fail stays
    segment_.header().failed.compare_exchange_strong(
        none,
        std::uint64_t(failed.failure) << 32 | std::uint64_t(rank_ + 1) << 16 | (failed.rank + 1),
        std::memory_order_acq_rel);
  }

  std::atomic<bool> announced_{false};
  std::atomic<bool> stop_{false};
  Segment segment_;
  int rank_;
  Interpreter interpreter_;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<Job> jobs_;
  std::uint64_t started_ = 0, finished_ = 0;
  std::optional<Failed> failed_;
  std::thread thread_;
  bool closed_ = false;
};

}  // namespace ringdp
