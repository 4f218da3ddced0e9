// The shared segment: one anonymous file, mapped by every rank. It has no name in any file system,
// so nothing is left behind however the ranks end.
//
//   Header | RankRecord[ranks] | outbox 0 ... ranks-1 | channel (0,0) (0,1) ... (ranks-1, ranks-1)
//   channel = Fifo<Stamp>
//   outbox  = Board | Line[2][kLines] | messages[kRoom] | parts[kTiles][ranks] | result[kTiles]
//
// The row interpreter uses a channel for each ordered pair of ranks. The diagonal ones are unused, which
// wastes 1/ranks of the space and keeps indexing plain. A rank writes to its outbox what all others may
// read: see direct.hpp.
#pragma once

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bell.hpp"
#include "mapped.hpp"
#include "record.hpp"

namespace ringdp {

constexpr std::uint64_t kMagic = 0x72696e6764703035;  // "ringdp05"; the number changes with the layout

struct alignas(kLine) Header {
  std::uint64_t magic, token, bytes;  // bytes: of the whole segment
  std::uint32_t ranks, record_bytes, depth;
  std::uint64_t slab;
  // The first failure, packed, or 0. All ranks give up once it is set; the reporter's `finding` has details.
  std::atomic<std::uint64_t> failed;
};

constexpr std::size_t kTiny = 256;         // bytes of the longest message sent in lines
constexpr std::size_t kWhole = 256 << 10;  // bytes of the longest message laid out as a whole
constexpr std::size_t kRoom = 4 * kWhole;  // bytes for whole messages: see Note [room]
constexpr int kTiles = 3;                  // tiles that may be laid out at once

// A cache line of data and its flag, which one miss fetches together. `flag` is written last.
struct alignas(kLine) Line {
  std::byte data[kLine - sizeof(std::uint32_t)];
  std::atomic<std::uint32_t> flag;
};
constexpr std::size_t kLines = 1 + kTiny / sizeof(Line::data);  // the first starts with a Heading
static_assert(sizeof(Line) == kLine);

// Identifies a rank's collective to its peers, before or with its data.
struct Heading {
  std::uint64_t number, digest, elements;  // digest: see Stamp
  std::uint64_t cuts;                      // a hash of all shards' lengths
};

// Announces a rank's message in a collective that does not use lines.
struct Post {
  alignas(kLine) std::atomic<std::uint64_t> count;  // posts so far, this one included; written last
  Heading heading;
  std::uint64_t began;  // ns, over a link only
  std::int64_t offset;  // of its buffer in the arena; -1: not there
  std::int64_t place;   // of its whole message in its `messages`; -1: it is not laid out whole
};

// How many tiles a rank has laid out, taken from every other rank, and collected the results of; the bell
// that wakes it; and its posts.
struct Board {
  alignas(kLine) std::atomic<std::uint64_t> laid;
  alignas(kLine) std::atomic<std::uint64_t> taken;
  alignas(kLine) std::atomic<std::uint64_t> collected;
  alignas(kLine) Bell bell;
  Post posts[2];
};

class Segment {
 public:
  static std::size_t size(int ranks, int depth, std::size_t slab) {
    return sizeof(Header) + ranks * (sizeof(RankRecord) + outbox_size(ranks, slab)) +
           std::size_t(ranks) * ranks * Fifo<Stamp>::size(depth, slab);
  }

  // Maps `fd`. Rank 0 writes the header; the others check it against their arguments.
  Segment(int fd, int rank, int ranks, int depth, std::size_t slab, std::uint64_t token)
      : ranks_(ranks), depth_(depth), slab_(slab), part_(part_size(ranks, slab)),
        bytes_(size(ranks, depth, slab)), mapped_(fd, bytes_, "the shared segment"), base_(mapped_.base()) {
    if (rank == 0)
      new (base_) Header{kMagic, token, bytes_, std::uint32_t(ranks), sizeof(RankRecord),
                         std::uint32_t(depth), slab, {}};
    const Header& h = header();
    if (h.magic != kMagic || h.token != token || h.bytes != bytes_ || int(h.ranks) != ranks ||
        h.record_bytes != sizeof(RankRecord) || int(h.depth) != depth || h.slab != slab)
      throw std::runtime_error("the shared segment belongs to another job or version");
    record(rank).pid.store(getpid(), std::memory_order_release);
  }
  ~Segment() { close_handles(); }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Once every rank has attached, counts their cores and opens a pidfd for each process. That shows the end
  // of a process even while it is a zombie, and is not fooled by a reused pid. Some systems have none.
  void connect() {
    cpu_set_t all{}, own;
    for (int r = 0; r < ranks_; ++r) {
      auto pid = record(r).pid.load(std::memory_order_acquire);
      if (sched_getaffinity(pid, sizeof own, &own) == 0) CPU_OR(&all, &all, &own);
      const int fd = int(syscall(SYS_pidfd_open, pid, 0));
      if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM))
        throw std::runtime_error(std::string("no handle on rank ") + std::to_string(r) + "'s process: " +
                                 std::strerror(errno));
      pidfds_.push_back(fd);
    }
    if (const int cores = CPU_COUNT(&all)) cores_ = cores;
  }

  // Closes the pidfds; `gone` must not be called any more.
  void close_handles() {
    for (int& fd : pidfds_)
      if (fd >= 0) ::close(std::exchange(fd, -1));
  }

  // Returns whether `rank` has ended or closed, so that it will never write again.
  bool gone(int rank) {
    // acquire: a later look sees what the rank wrote before it closed
    const auto pid = record(rank).pid.load(std::memory_order_acquire);
    if (pid < 0) return true;
    if (pidfds_[rank] < 0) return kill(pid, 0) != 0 && errno == ESRCH;
    pollfd p{pidfds_[rank], POLLIN, 0};
    return poll(&p, 1, 0) > 0;
  }

  Header& header() { return *reinterpret_cast<Header*>(base_); }
  RankRecord& record(int rank) const {
    return reinterpret_cast<RankRecord*>(base_ + sizeof(Header))[rank];
  }
  Fifo<Stamp> channel(int src, int dst) {
    const auto place = std::size_t(src) * ranks_ + dst;
    return {outbox(ranks_) + place * Fifo<Stamp>::size(depth_, slab_), depth_, slab_};
  }
  Board& board(int rank) { return *reinterpret_cast<Board*>(outbox(rank)); }
  Line* lines(int rank, std::uint64_t message) {
    return reinterpret_cast<Line*>(outbox(rank) + sizeof(Board)) + message % 2 * kLines;
  }
  std::byte* messages(int rank) { return outbox(rank) + kFixed; }
  // The slots for the part of a tile that `rank` lays out for `owner`, and for its result for all ranks.
  std::byte* part(int rank, int owner, std::uint64_t tile) {
    return tiles(rank) + (tile % kTiles * ranks_ + owner) * part_;
  }
  std::byte* result(int rank, std::uint64_t tile) {
    return tiles(rank) + (std::size_t(kTiles) * ranks_ + tile % kTiles) * part_;
  }
  int ranks() const { return ranks_; }
  // Cores that the ranks may use, all together. Until `connect`, those of the machine.
  int cores() const { return cores_; }
  int depth() const { return depth_; }
  std::size_t slab() const { return slab_; }
  std::size_t part() const { return part_; }

 private:
  static constexpr std::size_t kFixed = sizeof(Board) + 2 * kLines * sizeof(Line);
  // Large enough that all parts of a rank together exceed a core's cache: see Note [room].
  static std::size_t part_size(int ranks, std::size_t slab) { return slab * std::max(1, 8 / ranks); }
  static std::size_t outbox_size(int ranks, std::size_t slab) {
    return kFixed + kRoom + kTiles * (ranks + 1) * part_size(ranks, slab);
  }
  std::byte* outbox(int rank) {
    return base_ + sizeof(Header) + ranks_ * sizeof(RankRecord) + rank * outbox_size(ranks_, slab_);
  }
  std::byte* tiles(int rank) { return messages(rank) + kRoom; }

  int ranks_, depth_;
  std::size_t slab_, part_, bytes_;  // part_: bytes of a tile for one owner
  Mapped mapped_;
  std::byte* base_;
  std::vector<int> pidfds_;
  int cores_ = int(sysconf(_SC_NPROCESSORS_ONLN));
};

}  // namespace ringdp
