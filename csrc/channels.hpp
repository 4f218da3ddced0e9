// Slots for messages: a channel for each pair of ranks and direction, in a file that all of them map.
//
// The file is sparse and mapped at the first message; a channel takes memory when it is first used.
#pragma once

#include <vector>

#include "put.hpp"
#include "segment.hpp"

namespace ringdp {

struct alignas(kLine) Envelope {
  std::uint32_t type, size;   // size: of the payload behind it
  std::uint64_t id;           // of a message in parts, its sender's ticket
  std::uint64_t kind, bytes;  // of the whole message
};

class Channels {
 public:
  static std::size_t size(int ranks, int depth, std::size_t slab) {
    return std::size_t(ranks) * ranks * channel_size(depth, slab);
  }

  // Keeps a duplicate of `fd`.
  Channels(const Segment& segment, int fd, int rank)
      : rank_(rank), ranks_(segment.ranks()), depth_(segment.depth()), slab_(segment.slab()),
        reserved_(ranks_) {
    struct stat status;
    if (fstat(fd, &status) != 0 || std::size_t(status.st_size) != size(ranks_, depth_, slab_))
      throw std::runtime_error("the file for messages has another size than this job's");
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd_ < 0) throw std::runtime_error(std::string("no descriptor: ") + std::strerror(errno));
  }
  ~Channels() { let_go(); }
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  // Of the file; nothing may be reserved any more.
  void let_go() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  // Memory for both channels of a pair: if there is none, that is an error here, not a SIGBUS later.
  void reserve(int peer) {
    if (!base_) base_ = mapped_.emplace(fd_, size(ranks_, depth_, slab_), "the file for messages").base();
    if (reserved_[peer]) return;
    for (std::byte* at : {channel(rank_, peer), channel(peer, rank_)}) {
      int error;
      do error = posix_fallocate(fd_, at - base_, channel_size(depth_, slab_));
      while (error == EINTR);
      if (error)
        throw std::runtime_error(std::string("no shared memory for messages: ") + std::strerror(error));
    }
    reserved_[peer] = true;
  }

  bool reserved(int peer) const { return reserved_[peer]; }

  // Opens what has come, in order: `open(envelope, payload)`. Whether there was any.
  template <class Open>
  bool take(int from, Open open) {
    Cursors& c = cursors(from, rank_);
    auto tail = c.tail.load(std::memory_order_relaxed);  // only we write it
    const auto first = tail;
    // acquire: the slots' contents, written before the release of `head`, are visible now
    for (const auto head = c.head.load(std::memory_order_acquire); tail != head; ++tail) {
      const Envelope e = slot(from, rank_, tail);  // a copy: what is checked is what is used
      open(e, reinterpret_cast<const std::byte*>(&slot(from, rank_, tail) + 1));
      // release: our reads of the slot come before the sender's next write to it
      c.tail.store(tail + 1, std::memory_order_release);
    }
    return tail != first;
  }

  // Whether all that has come was taken.
  bool empty(int from) {
    Cursors& c = cursors(from, rank_);
    // acquire: what its sender has done before it ended
    return c.head.load(std::memory_order_acquire) == c.tail.load(std::memory_order_relaxed);
  }

  // False: there is no free slot.
  bool push(int to, const Envelope& envelope, const std::byte* payload) {
    Cursors& c = cursors(rank_, to);
    const auto head = c.head.load(std::memory_order_relaxed);  // only we write it
    // acquire: pairs with `take`, so that the receiver has done with the slot that we refill
    if (head - c.tail.load(std::memory_order_acquire) >= std::uint64_t(depth_)) return false;
    Envelope& e = slot(rank_, to, head);
    e = envelope;
    put_(&e + 1, payload, e.size);
    c.head.store(head + 1, std::memory_order_release);  // release: the slot before its count
    return true;
  }

 private:
  static std::size_t channel_size(int depth, std::size_t slab) {
    return sizeof(Cursors) + depth * (sizeof(Envelope) + slab);
  }
  std::byte* channel(int src, int dst) {
    return base_ + (std::size_t(src) * ranks_ + dst) * channel_size(depth_, slab_);
  }
  Cursors& cursors(int src, int dst) { return *reinterpret_cast<Cursors*>(channel(src, dst)); }
  Envelope& slot(int src, int dst, std::uint64_t message) {
    return *reinterpret_cast<Envelope*>(channel(src, dst) + sizeof(Cursors) +
                                        message % depth_ * (sizeof(Envelope) + slab_));
  }

  int rank_, ranks_, depth_;
  std::size_t slab_;
  int fd_ = -1;
  std::optional<Mapped> mapped_;
  std::byte* base_ = nullptr;
  std::vector<char> reserved_;  // by peer
  Put put_;
};

}  // namespace ringdp
