// Ranks as threads of one process, so that a sanitizer sees both ends of every channel.
#pragma once

#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

// Sanitizers identify memory by its address, so every rank must map a file at the same one.
static std::map<ino_t, void*> mapped;
static std::mutex mapping;
static void* map_once(void* at, std::size_t bytes, int access, int flags, int fd, off_t offset) {
  std::lock_guard lock(mapping);
  struct stat status;
  fstat(fd, &status);
  void*& known = mapped[status.st_ino];
  return known ? known : known = mmap(at, bytes, access, flags, fd, offset);
}
static int keep(void*, std::size_t) { return 0; }
#define mmap map_once
#define munmap keep
#include "mailbox.hpp"
#undef mmap
#undef munmap

using namespace ringdp;

constexpr int kDepth = 4, kTimes = 20;
constexpr std::size_t kSlab = 256;
constexpr char kNowhere[kSite] = "a test";

void check(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::_Exit(1);
}

constexpr std::size_t kArena = 1 << 18;  // floats per rank
std::vector<float> arena;

std::vector<std::unique_ptr<Progress>> connected(int n) {
  mapped.clear();  // a new file may have the inode number of a deleted one
  const int fd = int(syscall(SYS_memfd_create, "ringdp-test", 0));
  check(ftruncate(fd, Segment::size(n, kDepth, kSlab)) == 0, "a segment");
  std::vector<std::unique_ptr<Progress>> ranks;
  for (int r = 0; r < n; ++r)
    ranks.push_back(std::make_unique<Progress>(
        fd, r, Shape{n, kDepth, kSlab}, 7,
        Arena{reinterpret_cast<std::byte*>(arena.data()), arena.size() * 4}, Link{}));
  close(fd);
  for (auto& rank : ranks) rank->connect();
  for (int r = 1; r < n; r += 2) ranks[r]->trace(64);  // tapes that are soon full
  return ranks;
}
