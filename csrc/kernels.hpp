// The kernels of ringdp.kernels for tensors on the CPU.
//
// Each reads and checks its tensors here, since in Python that takes longer than the work on small ones. It
// returns false, or nothing, and has done nothing, unless all are plain and fit together: then Python looks
// for what is wrong, or calls torch. Sequences are copied to tuples: one may make its tensors when asked, and
// another thread may remove them from a list while this one works without the GIL.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <optional>
#include <vector>

#include <nanobind/nanobind.h>

#include "adamw.hpp"
#include "norm.hpp"
#include "scale.hpp"
#include "stochastic.hpp"
#include "sum.hpp"
#include "tensors.hpp"

namespace ringdp {

class Kernels {
 public:
  Kernels(nb::handle table, nb::handle tensor, nb::handle parameter) : tensors_(table, tensor, parameter) {}

  // Copies tensors times `scale` to their places in `out`, and zeros the rest.
  bool flatten(nb::handle tensors, nb::handle out, nb::handle offsets, nb::handle scale, std::size_t threads) {
    return copy(tensors, out, offsets, scale, true, threads);
  }

  // Copies the tensors' parts of `flat`, times `scale`, to them.
  bool unflatten(nb::handle flat, nb::handle tensors, nb::handle offsets, nb::handle scale,
                 std::size_t threads) {
    return copy(tensors, flat, offsets, scale, false, threads);
  }

  // out = x times `scale`; `found` becomes 1 if `out` is not all finite.
  bool unscale(nb::handle x, nb::handle out, nb::handle found, nb::handle scale, std::size_t threads) {
    const auto from = tensors_.plain(x), to = tensors_.plain(out), flag = tensors_.plain(found);
    const auto by = factor(scale);
    if (!from || !to || !flag || from->dimensions != 1 || to->dimensions != 1 || flag->dimensions != 1 ||
        from->elements != to->elements || flag->elements != 1 || flag->dtype != 0 || !by || spoils(*to, *from))
      return false;
    const Scale act = scale_of(from->dtype, to->dtype);
    if (!act) return false;
    if (!from->elements) return true;
    const auto elems = std::size_t(from->elements);
    const std::vector<Piece> pieces{{act, to->data, from->data, to->bytes / elems, from->bytes / elems, elems}};
    nb::gil_scoped_release free;
    if (!scale_all(pieces, *by, threads)) *reinterpret_cast<float*>(flag->data) = 1;
    return true;
  }

  // out = the sum of the rows of `parts` and of `own`, which comes after the first `at` rows.
  bool fold(nb::handle parts, nb::handle out, nb::handle own, nb::handle at, std::size_t threads) {
    const auto rows = tensors_.plain_rows(parts);
    const auto to = tensors_.plain(out);
    if (!rows || !to || !rows->rows || to->dimensions != 1 || to->elements != rows->elements) return false;
    const Sum act = sum_of(rows->dtype, to->dtype);
    if (!act) return false;
    if (!to->elements) return true;
    std::vector<const void*> in;
    const auto size = dtype(rows->dtype, 0).size;
    for (std::int64_t r = 0; r < rows->rows; ++r) {
      const Plain row{rows->data + r * rows->stride * size, rows->dtype, 1, rows->elements, rows->elements * size};
      if (spoils(*to, row)) return false;
      in.push_back(row.data);
    }
    if (!own.is_none()) {
      const auto mine = tensors_.plain(own);
      std::int64_t place;
      if (!mine || mine->dimensions != 1 || mine->dtype != rows->dtype || mine->elements != to->elements ||
          !nb::try_cast(at, place) || place < 0 || place > rows->rows || spoils(*to, *mine))
        return false;
      in.insert(in.begin() + place, mine->data);
    }
    nb::gil_scoped_release free;
    sum_all(act, to->data, in, std::size_t(to->elements), threads);
    return true;
  }

  // `hash` as csrc/stochastic.hpp takes it.
  bool stochastic_round(nb::handle x, nb::handle out, const Hash& hash, std::size_t threads) {
    const auto from = tensors_.plain(x), to = tensors_.plain(out);
    if (!from || !to || from->dimensions != 1 || to->dimensions != 1 || from->elements != to->elements ||
        from->dtype != 0 || to->dtype != 3 || spoils(*to, *from))
      return false;
    nb::gil_scoped_release free;
    ringdp::stochastic_round(reinterpret_cast<bfloat16*>(to->data), reinterpret_cast<const float*>(from->data),
                             std::size_t(from->elements), hash, threads);
    return true;
  }

  // One step of AdamW; `copy` may be None.
  bool adamw(nb::handle param, nb::handle grad, nb::handle exp_avg, nb::handle exp_avg_sq, nb::handle copy,
             const Factors& factors, std::size_t threads) {
    std::array<float*, 4> at;
    std::int64_t elements = -1;
    std::size_t i = 0;
    for (nb::handle tensor : {param, grad, exp_avg, exp_avg_sq}) {
      const auto x = tensors_.plain(tensor);
      if (!x || x->dtype != 0 || (i && x->elements != elements)) return false;
      elements = x->elements;
      at[i++] = reinterpret_cast<float*>(x->data);
    }
    std::optional<Plain> to;
    if (!copy.is_none()) {
      to = tensors_.plain(copy);
      if (!to || (to->dtype != 2 && to->dtype != 3) || to->elements != elements) return false;
    }
    nb::gil_scoped_release free;
    const auto step = [&](auto* copied) {
      ringdp::adamw(at[0], at[1], at[2], at[3], copied, std::size_t(elements), factors, threads);
    };
    if (to && to->dtype == 2) step(reinterpret_cast<float16*>(to->data));
    else step(to ? reinterpret_cast<bfloat16*>(to->data) : nullptr);
    return true;
  }

  // The sum of the squares of all elements.
  std::optional<double> squared_norm(nb::handle tensors, std::size_t threads) {
    const nb::tuple every(tensors);
    std::vector<Array> arrays;
    for (nb::handle tensor : every) {
      const auto x = tensors_.plain(tensor);
      if (!x || x->dtype > 3) return std::nullopt;
      arrays.push_back({x->dtype, x->data, std::size_t(x->elements)});
    }
    nb::gil_scoped_release free;
    return ringdp::squared_norm(arrays, threads);
  }

 private:
  bool copy(nb::handle given, nb::handle flat, nb::handle asked, nb::handle scale, bool into_flat,
            std::size_t threads) {
    const auto whole = tensors_.plain(flat);
    const auto by = factor(scale);
    const nb::tuple tensors(given), offsets(asked);
    // `len` is an error for an iterator, which the launcher could not read again
    if (!whole || whole->dimensions != 1 || !by || nb::len(given) != tensors.size() ||
        offsets.size() != tensors.size())
      return false;
    const std::size_t size = whole->elements ? whole->bytes / whole->elements : 1;
    struct Place {
      std::int64_t first, last;
    };
    std::vector<Piece> pieces;
    std::vector<Place> places;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto x = tensors_.plain(tensors[i]);
      std::int64_t first;
      if (!x || !nb::try_cast(offsets[i], first)) return false;
      const auto act = into_flat ? act_of(x->dtype, whole->dtype, *by) : act_of(whole->dtype, x->dtype, *by);
      if (!act || first < 0 || first > whole->elements - x->elements) return false;
      if (!x->elements) continue;
      places.push_back({first, first + x->elements});
      std::byte* const at = whole->data + first * size;
      const std::size_t own = x->bytes / x->elements;
      pieces.push_back(into_flat ? Piece{act, at, x->data, size, own, std::size_t(x->elements)}
                                 : Piece{act, x->data, at, own, size, std::size_t(x->elements)});
    }
    const auto before = [](const Place& a, const Place& b) { return a.first < b.first; };
    if (!std::is_sorted(places.begin(), places.end(), before)) std::sort(places.begin(), places.end(), before);
    std::int64_t end = 0;
    const auto skip = [&](std::int64_t until) {
      if (into_flat && end < until)
        pieces.push_back({zero_of(size), whole->data + end * size, nullptr, size, 0, std::size_t(until - end)});
    };
    for (const Place& place : places) {
      if (place.first < end) return false;  // they overlap
      skip(place.first);
      end = place.last;
    }
    skip(whole->elements);
    nb::gil_scoped_release free;
    scale_all(pieces, *by, threads);
    return true;
  }

  // Returns nothing unless it is finite in float32, and so for all dtypes.
  static std::optional<double> factor(nb::handle scale) {
    double by;
    if (!nb::try_cast(scale, by) || !(std::abs(by) <= FLT_MAX)) return std::nullopt;
    return by;
  }

  // Returns whether `out` overlaps `in` other than by being it, so that a write may come before a read.
  static bool spoils(const Plain& out, const Plain& in) {
    return !(out.data == in.data && out.dtype == in.dtype) && out.data < in.data + in.bytes &&
           in.data < out.data + out.bytes;
  }

  static Scale act_of(int source, int target, double scale) {
    const Scale act = scale_of(source, target);
    if (!act || source != target || scale != 1) return act;
    return source == 1 ? same<8> : source == 0 ? same<4> : same<2>;
  }

  static Scale zero_of(std::size_t size) {
    return size == 1 ? zero<1> : size == 2 ? zero<2> : size == 4 ? zero<4> : zero<8>;
  }

  Tensors tensors_;
};

}  // namespace ringdp
