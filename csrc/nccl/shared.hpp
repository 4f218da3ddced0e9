// The memory that the ranks of a communicator share: one anonymous file without a name in any file system.
//
//   Header | channel (lane, src, dst) for every lane and ordered pair, a rank with itself included
//   channel = Fifo<Label> of kSlots slots of kSlab bytes
//
// The process that makes the unique id creates the file. The others open it through /proc, which admits
// only the same user.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <random>

#include "../fifo.hpp"
#include "types.hpp"

namespace hostnccl {

constexpr int kMost = 64;                // ranks of a communicator
constexpr int kSlots = 2;                // of a channel
constexpr std::size_t kSlab = 64 << 10;  // bytes of a slot

enum Lane { messages, collectives, lanes };  // messages of different lanes never match

struct alignas(ringdp::kLine) Header {
  std::uint64_t token;
  std::atomic<int> ranks;     // 0 until the first rank sets it
  std::atomic<int> attached;
  std::atomic<int> pids[kMost];
  std::atomic<bool> refused;  // two ranks' calls differ, so all fail. relaxed: it publishes no other data
};

// What both ends of a message must agree on; of a send and recv, only the length.
struct Label {
  std::uint64_t bytes;
  std::int32_t collective, type, op, root;
  bool operator==(const Label& o) const {
    return bytes == o.bytes && collective == o.collective && type == o.type && op == o.op &&
           root == o.root;
  }
};

using Channel = ringdp::Fifo<Label>;

// The location of the file, as a unique id holds it.
struct Place {
  std::uint64_t magic, token;
  std::int64_t pid, fd;
};
constexpr std::uint64_t kMagic = 0x686f73746e63636c;  // "hostnccl"

inline Place place_of(const ncclUniqueId& id) {
  Place place;
  std::memcpy(&place, &id, sizeof place);
  return place;
}

class Shared {
 public:
  static std::size_t size(int ranks) { return sizeof(Header) + lanes * ranks * ranks * kChannel; }

  Shared(int fd, int ranks) : ranks_(ranks), bytes_(size(ranks)) {
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    base_ = at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
  }
  ~Shared() {
    if (base_) munmap(base_, bytes_);
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  bool mapped() const { return base_ != nullptr; }
  Header& header() { return *reinterpret_cast<Header*>(base_); }
  Channel channel(Lane lane, int src, int dst) {
    return {base_ + sizeof(Header) + ((lane * ranks_ + src) * ranks_ + dst) * kChannel, kSlots, kSlab};
  }

 private:
  static constexpr std::size_t kChannel = Channel::size(kSlots, kSlab);
  int ranks_;
  std::size_t bytes_;
  std::byte* base_ = nullptr;
};

// The files of the ids that this process made, kept open until every rank has attached.
struct Offers {
  std::mutex mutex;
  std::map<std::uint64_t, int> files;  // by token
};
inline Offers offers;

inline ncclResult_t offer(ncclUniqueId* id) {
  const int fd = memfd_create("ringdp-hostnccl", MFD_CLOEXEC);
  if (fd < 0) return ncclSystemError;
  std::random_device random;
  const std::uint64_t token = std::uint64_t(random()) << 32 | random();
  bool good = fchmod(fd, 0600) == 0 && ftruncate(fd, Shared::size(1)) == 0;
  if (good) {
    Shared shared(fd, 1);
    good = shared.mapped();
    if (good) shared.header().token = token;
  }
  if (!good) {
    ::close(fd);
    return ncclSystemError;
  }
  const Place place{kMagic, token, getpid(), fd};
  std::memset(id, 0, sizeof *id);
  std::memcpy(id, &place, sizeof place);
  std::lock_guard lock(offers.mutex);
  offers.files[token] = fd;
  return ncclSuccess;
}

inline void withdraw(std::uint64_t token) {
  std::lock_guard lock(offers.mutex);
  if (const auto node = offers.files.extract(token)) ::close(node.mapped());
}

// Opens an id's file and grows it to the size for so many ranks. Returns its descriptor, or -1.
inline int take(const Place& place, int ranks) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%lld/fd/%lld", static_cast<long long>(place.pid),
                static_cast<long long>(place.fd));
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return -1;
  struct stat status;
  bool good = fstat(fd, &status) == 0 && status.st_uid == geteuid() &&
              std::size_t(status.st_size) >= Shared::size(1);
  if (good) {
    Shared first(fd, 1);
    int none = 0;
    good = first.mapped() && first.header().token == place.token;
    // all ranks must agree on `ranks`; then the file only grows, whichever rank comes first
    good = good && (first.header().ranks.compare_exchange_strong(none, ranks) || none == ranks);
  }
  good = good && (std::size_t(status.st_size) >= Shared::size(ranks) ||
                  ftruncate(fd, std::max<off_t>(status.st_size, Shared::size(ranks))) == 0);
  if (!good) {
    ::close(fd);
    return -1;
  }
  return fd;
}

}  // namespace hostnccl
