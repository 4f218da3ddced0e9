// A mapping of a shared file that forked children do not inherit: a child is not a rank, and may outlive
// one. In a child the destructor unmaps nothing, as other memory of the child may lie at these addresses.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ringdp {

class Mapped {
 public:
  // Maps all of a file, which must have so many bytes. `what`: its name in errors.
  Mapped(int fd, std::size_t bytes, const char* what, int access = PROT_READ | PROT_WRITE) : bytes_(bytes) {
    struct stat status;
    if (fstat(fd, &status) == 0 && std::size_t(status.st_size) != bytes)
      throw std::runtime_error(std::string(what) + " has " + std::to_string(status.st_size) +
                               " bytes instead of " + std::to_string(bytes));
    void* at = mmap(nullptr, bytes, access, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
      throw std::runtime_error(std::string("mmap of ") + what + ": " + std::strerror(errno));
    base_ = static_cast<std::byte*>(at);
    madvise(at, bytes, MADV_DONTFORK);
  }
  ~Mapped() {
    if (getpid() == process_) munmap(base_, bytes_);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  std::byte* base() const { return base_; }

 private:
  const pid_t process_ = getpid();
  std::size_t bytes_;
  std::byte* base_;
};

}  // namespace ringdp
