// A FIFO from one rank to another, in memory that both have mapped.
//
//   Cursors | Slot[depth],  Slot = Label in a cache line | slab bytes
//
//   writer   until not full()    fill back()    push()
//   reader   until not empty()   read front()   pop()
//
// `head` counts messages written, `tail` messages read. Message k lies in slot k % depth: it is there once
// head > k, and its slot is free again once tail > k. Each side advances its own counter with release
// after it has used the slot, and loads the other's with acquire before it uses one. So a reader finds
// whole messages, and a writer never overwrites one that is being read. A side loads its own counter
// relaxed, as nobody else writes it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ringdp {

constexpr std::size_t kLine = 64;  // bytes of a cache line

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);  // or it would not work across processes

// Different cores write the two, so each has its own cache line.
struct Cursors {
  alignas(kLine) std::atomic<std::uint64_t> head;
  alignas(kLine) std::atomic<std::uint64_t> tail;
};

// A view of a FIFO, for either end. It owns nothing.
template <class Label>
class Fifo {
  static_assert(sizeof(Label) <= kLine);

 public:
  static constexpr std::size_t size(int depth, std::size_t slab) {
    return sizeof(Cursors) + depth * (kLine + slab);
  }
  Fifo(std::byte* at, int depth, std::size_t slab)
      : cursors_(*reinterpret_cast<Cursors*>(at)), slots_(at + sizeof(Cursors)), depth_(depth),
        slab_(slab) {}

  // Returns the slab behind a label.
  static std::byte* data(Label& slot) { return reinterpret_cast<std::byte*>(&slot) + kLine; }

  // For the writer.
  std::uint64_t unread() const {
    // acquire: pairs with `pop`
    return head(std::memory_order_relaxed) - tail(std::memory_order_acquire);
  }
  bool full() const { return unread() >= depth_; }
  Label& back() const { return slot(head(std::memory_order_relaxed)); }
  void push() const {
    // release: the slot's contents before the count
    cursors_.head.store(head(std::memory_order_relaxed) + 1, std::memory_order_release);
  }

  // For the reader. `front(next)` is the message behind so many others of those that wait.
  std::uint64_t waiting() const {
    // acquire: pairs with `push`
    return head(std::memory_order_acquire) - tail(std::memory_order_relaxed);
  }
  bool empty() const { return waiting() == 0; }
  Label& front(std::uint64_t next = 0) const { return slot(tail(std::memory_order_relaxed) + next); }
  void pop() const {
    // release: our reads of the slot before the writer's next write to it
    cursors_.tail.store(tail(std::memory_order_relaxed) + 1, std::memory_order_release);
  }

 private:
  std::uint64_t head(std::memory_order order) const { return cursors_.head.load(order); }
  std::uint64_t tail(std::memory_order order) const { return cursors_.tail.load(order); }
  Label& slot(std::uint64_t message) const {
    return *reinterpret_cast<Label*>(slots_ + message % depth_ * (kLine + slab_));
  }

  Cursors& cursors_;
  std::byte* slots_;
  std::uint64_t depth_;
  std::size_t slab_;
};

}  // namespace ringdp
