// Slots for messages: one channel for each ordered pair of ranks, in a file that all of them map.
//
// The file is sparse and mapped at the first message; a channel commits memory when it is first used.
#pragma once

#include <fcntl.h>

#include <optional>
#include <vector>

#include "put.hpp"
#include "segment.hpp"

namespace ringdp {

struct Envelope {
  std::uint32_t type, size;   // size: bytes of the payload behind it
  std::uint64_t id;           // of a message in parts: its sender's ticket
  std::uint64_t kind, bytes;  // of the whole message
};

class Channels {
 public:
  static std::size_t size(int ranks, int depth, std::size_t slab) {
    return std::size_t(ranks) * ranks * Fifo<Envelope>::size(depth, slab);
  }

  // Keeps a duplicate of `fd`.
  Channels(const Segment& segment, int fd, int rank)
      : rank_(rank), ranks_(segment.ranks()), depth_(segment.depth()), slab_(segment.slab()),
        reserved_(ranks_) {
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd_ < 0) throw std::runtime_error(std::string("no descriptor: ") + std::strerror(errno));
  }
  ~Channels() { close_file(); }
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  // Closes the file; `reserve` must not be called any more.
  void close_file() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  // Commits the memory of both channels of a pair, so that a shortage is an error here, not a SIGBUS later.
  void reserve(int peer) {
    if (!mapped_) mapped_.emplace(fd_, size(ranks_, depth_, slab_), "the file for messages");
    if (reserved_[peer]) return;
    for (const auto at : {place(rank_, peer), place(peer, rank_)}) {
      int error;
      do error = posix_fallocate(fd_, at, Fifo<Envelope>::size(depth_, slab_));
      while (error == EINTR);
      if (error)
        throw std::runtime_error(std::string("no shared memory for messages: ") + std::strerror(error));
    }
    reserved_[peer] = true;
  }

  bool reserved(int peer) const { return reserved_[peer]; }

  // Returns how many messages wait; more than there are slots if the memory is damaged.
  std::uint64_t waiting(int from) const { return channel(from, rank_).waiting(); }

  // Calls `open(envelope, payload)` on so many of them, in order.
  template <class Open>
  void take(int from, std::uint64_t count, Open open) {
    const auto incoming = channel(from, rank_);
    for (; count > 0; --count) {
      Envelope& slot = incoming.front();
      const Envelope e = slot;  // copied, so that a peer cannot change it after the check
      open(e, incoming.data(slot));
      incoming.pop();
    }
  }

  // Returns the next message from there, to be taken with `pop`, or null.
  Envelope* front(int from) const {
    const auto incoming = channel(from, rank_);
    return incoming.empty() ? nullptr : &incoming.front();
  }
  void pop(int from) const { channel(from, rank_).pop(); }

  // Returns false if there is no free slot.
  bool push(int to, const Envelope& envelope, const std::byte* payload) {
    const auto outgoing = channel(rank_, to);
    if (outgoing.full()) return false;
    Envelope& slot = outgoing.back();
    slot = envelope;
    put_(outgoing.data(slot), payload, envelope.size);
    outgoing.push();
    return true;
  }

 private:
  std::size_t place(int src, int dst) const {
    return (std::size_t(src) * ranks_ + dst) * Fifo<Envelope>::size(depth_, slab_);
  }
  Fifo<Envelope> channel(int src, int dst) const {
    return {mapped_->base() + place(src, dst), depth_, slab_};
  }

  int rank_, ranks_, depth_;
  std::size_t slab_;
  int fd_ = -1;
  std::optional<Mapped> mapped_;
  std::vector<char> reserved_;  // by peer
  Put put_;
};

}  // namespace ringdp
