// What a repeated call does before and after a program. A program has one buffer, which it changes in
// place, and computes the sum for an average.
//
//   collective       buffer                                    before          after
//   all_reduce       the tensor                                                divide
//   reduce           the tensor, or a copy if not the root's                   divide the root's
//                    and the program changes it
//   reduce_scatter   a copy of the input                                       copy to the output, divide
//   all_gather       the output                                copy input in
//   gather           root: the output                          copy input in
//                    others: the input, or new memory
//   scatter          root: the input, or a copy                                copy to the output
//                    others: the output, or new memory
//   all_to_all       the output                                copy input in
//
// A first call does the same in Python (comm/moves.py and comm/reductions.py), with the same bits.
#pragma once

#include <utility>

#include "prepared.hpp"

namespace ringdp {

// The repeated methods of a communicator, in the order of transport.repeated.METHODS. The forms with uneven
// parts (exchanges only) are told by their sizes.
enum class Method {
  all_reduce,
  reduce_scatter,
  all_gather,
  all_to_all,
  broadcast,
  reduce,
  gather,
  scatter,
  barrier,  // an all_reduce of `Ready`'s token
  send,
  isend,
  recv
};

// A call's tensors.
struct Given {
  Prepared::Buffer whole, part;
  int dtype;
  std::int64_t elements;  // of the whole, even if this rank has none
  std::size_t whole_bytes, part_bytes;
  bool apart;  // two disjoint tensors, or a part without a whole; else a part lies in its place in the whole
};

// A buffer and a reference to what keeps its memory alive.
struct Memory {
  nb::object keeper;
  std::byte* data = nullptr;
  operator Prepared::Buffer() const { return {keeper, data}; }
};

// Keeps the buffer's storage: once the GIL is released, `x.data = y` may give the tensor other memory.
inline Memory memory_of(Prepared::Buffer buffer) { return {Prepared::memory(buffer), buffer.data}; }

inline Memory room(std::size_t bytes) {
  auto made = nb::steal(PyByteArray_FromStringAndSize(nullptr, Py_ssize_t(bytes)));
  if (!made.is_valid()) throw nb::python_error();
  auto* const data = reinterpret_cast<std::byte*>(PyByteArray_AsString(made.ptr()));
  return {std::move(made), data};
}

// Calls `move`, which moves so many bytes. Releases the GIL if they are many.
template <class Move>
void moving(std::size_t bytes, Move move) {
  if (bytes <= (16 << 10)) return move();
  nb::gil_scoped_release free;
  move();
}
inline void copy_freely(std::byte* to, const std::byte* from, std::size_t bytes) {
  moving(bytes, [&] { copy_bytes(to, from, bytes); });
}

// Copies a result to the caller's tensor and divides it, but only once: a caller that waits again after an
// interrupt calls it again.
struct Finish {
  Memory to, from;
  std::size_t bytes = 0;
  int by = 0;  // for an average: the number of ranks; else 0
  Dtype dtype{};
  mutable bool pending = false;

  void operator()() const {
    if (!std::exchange(pending, false)) return;
    moving(bytes, [&] {
      copy_bytes(to.data, from.data, bytes);
      if (by) average(dtype, to.data, bytes / dtype.size, by);
    });
  }
};

struct Around {
  Memory buffer;
  Finish finish;
};

// Prepares the program's buffer, and what to do after the program. `by`: see Finish.
inline Around around(const Prepared& prepared, Method method, const Given& given, int rank, bool at_root,
                     int by) {
  const bool changed = prepared.changes(), stays = method == Method::reduce && !at_root;
  const bool copied = method == Method::reduce_scatter   ? given.apart
                      : method == Method::reduce         ? stays && changed
                      : method == Method::scatter && changed;
  if (stays) by = 0;
  if (!given.apart && !copied && !by) return {{nb::borrow(given.whole.owner), given.whole.data}, {}};

  const bool gathers = method == Method::gather || method == Method::all_gather;
  const bool whole_is_here = !given.whole.owner.is_none();
  const bool alone = given.part_bytes == prepared.bytes() && !(gathers && changed);
  const auto whole = memory_of(given.whole), part = memory_of(given.part);
  Around made;
  if (method == Method::all_to_all || (!whole_is_here && alone))
    made.buffer = part;
  else if (whole_is_here && !copied)
    made.buffer = whole;
  else
    made.buffer = room(prepared.bytes());
  auto* const data = made.buffer.data;
  if (copied || method == Method::all_to_all) copy_freely(data, whole.data, given.whole_bytes);

  const bool scatters = method == Method::scatter || method == Method::reduce_scatter;
  const auto at = gathers || scatters ? prepared.part_at(rank) : 0;
  if (gathers) copy_freely(data + at, part.data, given.part_bytes);
  if (scatters)
    made.finish = {part, {made.buffer.keeper, data + at}, given.part_bytes};
  else if (by)
    made.finish = {whole, whole, given.whole_bytes};
  made.finish.pending = made.finish.to.data != made.finish.from.data || by;
  if (by) made.finish.by = by, made.finish.dtype = dtype(given.dtype, int(Op::avg));
  return made;
}

}  // namespace ringdp
