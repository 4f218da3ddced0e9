// A read-only view of a segment from outside the job. It is used only if its header, size and seal show
// that every record lies inside the file and stays there.
#pragma once

#include <fcntl.h>

#include "segment.hpp"

namespace ringdp {

class Watch final : public Records {
 public:
  explicit Watch(int fd) {
    struct stat status;
    if (fstat(fd, &status) != 0) refuse("it cannot be examined: " + std::string(std::strerror(errno)));
    // Reading a mapping of a file that has shrunk is fatal.
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK)) refuse("it is not sealed against truncation");
    bytes_ = std::size_t(status.st_size);
    if (bytes_ < sizeof(Header)) refuse("its " + std::to_string(bytes_) + " bytes hold no header");
    mapped_.emplace(fd, bytes_, "a segment", PROT_READ);
    check();
  }

  int ranks() const override { return ranks_; }
  const Header& header() const { return *reinterpret_cast<const Header*>(mapped_->base()); }
  const RankRecord& record(int rank) const override {
    return reinterpret_cast<const RankRecord*>(mapped_->base() + sizeof(Header))[rank];
  }

 private:
  void check() {
    const volatile Header& h = header();
    if (h.magic != kMagic) refuse("it is of another version of ringdp, or not ringdp's");
    if (h.record_bytes != sizeof(RankRecord))
      refuse("its records have " + std::to_string(h.record_bytes) + " bytes; this version's have " +
             std::to_string(sizeof(RankRecord)));
    if (h.bytes != bytes_)
      refuse("it has " + std::to_string(bytes_) + " bytes; its header says " +
             std::to_string(h.bytes));
    const std::size_t most = (bytes_ - sizeof(Header)) / sizeof(RankRecord);
    const std::uint32_t ranks = h.ranks;  // read once: the job could change it after the check
    if (ranks == 0 || ranks > most)
      refuse("its header says " + std::to_string(ranks) + " ranks; it has room for " +
             std::to_string(most));
    ranks_ = int(ranks);
  }
  [[noreturn]] static void refuse(const std::string& why) {
    throw std::runtime_error("not a readable segment: " + why);
  }

  std::optional<Mapped> mapped_;
  std::size_t bytes_ = 0;
  int ranks_ = 0;
};

}  // namespace ringdp
