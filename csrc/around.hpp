// What a repeated call does around a program, which has one buffer, in place, and of an average gives
// the sum:
//
//   collective       buffer                                          before         after
//   all_reduce       the tensor                                                     divided
//   reduce           the tensor; but a copy where it would change                   the root's divided
//   reduce_scatter   a copy of the input                                            to the output, divided
//   all_gather       the output                                      the input in
//   gather           the output; elsewhere the input, or room        the input in
//   scatter          the input, or a copy; elsewhere output or room                 to the output
//   all_to_all       the output                                      the input in
//
// A first call does the same in Python, ringdp.comm's moves and reductions, and gets the same bits.
#pragma once

#include <utility>

#include "prepared.hpp"

namespace ringdp {

// The methods of a communicator that repeat, in the order of transport.repeated.METHODS.
enum class Method {
  all_reduce,
  reduce_scatter,
  all_gather,
  all_to_all,
  broadcast,
  reduce,
  gather,
  scatter,
  barrier  // an all_reduce of a tensor that it is not given
};

// A call's tensors.
struct Given {
  Prepared::Buffer whole, part;
  int dtype;
  std::int64_t elements;  // of the whole, which may be elsewhere
  std::size_t whole_bytes, part_bytes;
  bool apart;  // two tensors, or a part without a whole; else a part lies in its place in the whole
};

struct Memory {
  nb::object keeper;
  std::byte* data = nullptr;
  operator Prepared::Buffer() const { return {keeper, data}; }
};

// With the GIL gone, `x.data = y` may give a tensor other memory.
inline Memory memory_of(Prepared::Buffer buffer) { return {Prepared::memory(buffer), buffer.data}; }

inline Memory room(std::size_t bytes) {
  auto made = nb::steal(PyByteArray_FromStringAndSize(nullptr, Py_ssize_t(bytes)));
  if (!made.is_valid()) throw nb::python_error();
  auto* const data = reinterpret_cast<std::byte*>(PyByteArray_AsString(made.ptr()));
  return {std::move(made), data};
}

// Moves so many bytes: long, it does not keep the GIL.
template <class Move>
void moving(std::size_t bytes, Move move) {
  if (bytes <= (16 << 10)) return move();
  nb::gil_scoped_release free;
  move();
}
inline void copy_freely(std::byte* to, const std::byte* from, std::size_t bytes) {
  moving(bytes, [&] { copy_bytes(to, from, bytes); });
}

// Brings a result home, once: who waits again after an interrupt comes again.
struct Home {
  Memory to, from;
  std::size_t bytes = 0;
  int by = 0;  // of an average: how many ranks; else 0
  Dtype dtype{};
  mutable bool left = false;

  void operator()() const {
    if (!std::exchange(left, false)) return;
    moving(bytes, [&] {
      copy_bytes(to.data, from.data, bytes);
      if (by) average(dtype, to.data, bytes / dtype.size, by);
    });
  }
};

struct Around {
  Memory buffer;
  Home home;
};

// Does what comes before. `by`: see Home.
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
    made.home = {part, {made.buffer.keeper, data + at}, given.part_bytes};
  else if (by)
    made.home = {whole, whole, given.whole_bytes};
  made.home.left = made.home.to.data != made.home.from.data || by;
  if (by) made.home.by = by, made.home.dtype = dtype(given.dtype, int(Op::avg));
  return made;
}

}  // namespace ringdp
