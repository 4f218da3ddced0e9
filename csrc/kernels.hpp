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
#include <utility>
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
  Kernels(nb::handle table, nb::handle tensor, nb::handle parameter) : tensors_(table, tensor, parameter, 4096) {}

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
    const auto from = vector(x), to = vector(out), flag = vector(found);
    const auto by = factor(scale);
    if (!from || !to || !flag || !by || from->elements != to->elements || flag->elements != 1 ||
        flag->dtype != 0 || spoils(*to, *from))
      return false;
    const Scale act = scale_of(from->dtype, to->dtype);
    if (!act) return false;
    const std::vector<Piece> pieces{{act, to->data, from->data, std::size_t(to->elements)}};
    nb::gil_scoped_release free;
    if (!scale_all(pieces, *by, threads)) *reinterpret_cast<float*>(flag->data) = 1;
    return true;
  }

  // out = the sum of the rows of `parts` and of `own`, which comes after the first `at` rows.
  bool fold(nb::handle parts, nb::handle out, nb::handle own, nb::handle at, std::size_t threads) {
    const auto rows = tensors_.plain_rows(parts);
    const auto to = vector(out);
    if (!rows || !to || !rows->rows || to->elements != rows->elements) return false;
    const auto act = sum_of(rows->dtype, to->dtype);
    if (!act) return false;
    std::vector<const std::byte*> in;
    const auto size = act->in_size;
    for (std::int64_t r = 0; r < rows->rows; ++r) {
      const Plain row{rows->data + r * rows->stride * size, rows->dtype, 1, rows->elements, rows->elements * size};
      if (spoils(*to, row)) return false;
      in.push_back(row.data);
    }
    if (!own.is_none()) {
      const auto mine = vector(own);
      std::int64_t place;
      if (!mine || mine->dtype != rows->dtype || mine->elements != to->elements || !nb::try_cast(at, place) ||
          place < 0 || place > rows->rows || spoils(*to, *mine))
        return false;
      in.insert(in.begin() + place, mine->data);
    }
    nb::gil_scoped_release free;
    sum_all(*act, to->data, in, std::size_t(to->elements), threads);
    return true;
  }

  // `hash` as csrc/stochastic.hpp takes it.
  bool stochastic_round(nb::handle x, nb::handle out, const Hash& hash, std::size_t threads) {
    const auto from = vector(x), to = vector(out);
    if (!from || !to || from->elements != to->elements || from->dtype != 0 || to->dtype != 3 ||
        spoils(*to, *from))
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
    const auto whole = vector(flat);
    const auto by = factor(scale);
    const nb::tuple tensors(given), offsets(asked);
    // `len` is an error for an iterator, which the launcher could not read again
    if (!whole || !by || nb::len(given) != tensors.size() || offsets.size() != tensors.size()) return false;
    const std::size_t size = whole->elements ? whole->bytes / whole->elements : 1;
    std::vector<Piece> pieces;
    std::vector<std::pair<std::int64_t, std::int64_t>> covered;  // from, to
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto x = tensors_.plain(tensors[i]);
      std::int64_t first;
      if (!x || !nb::try_cast(offsets[i], first) || first < 0 || first > whole->elements - x->elements)
        return false;
      void *out = whole->data + first * size, *in = x->data;
      int target = whole->dtype, source = x->dtype;
      if (!into_flat) std::swap(out, in), std::swap(target, source);
      const Scale act = copy_of(source, target, *by);
      if (!act) return false;
      if (!x->elements) continue;
      pieces.push_back({act, out, in, std::size_t(x->elements)});
      covered.emplace_back(first, first + x->elements);
    }
    if (!std::is_sorted(covered.begin(), covered.end())) std::sort(covered.begin(), covered.end());
    covered.emplace_back(whole->elements, whole->elements);
    std::int64_t end = 0;
    for (const auto& [first, last] : covered) {
      if (first < end) return false;  // they overlap
      if (into_flat && first > end)
        pieces.push_back({zero_of(size), whole->data + end * size, nullptr, std::size_t(first - end)});
      end = last;
    }
    nb::gil_scoped_release free;
    scale_all(pieces, *by, threads);
    return true;
  }

  std::optional<Plain> vector(nb::handle tensor) {
    const auto found = tensors_.plain(tensor);
    return found && found->dimensions == 1 ? found : std::nullopt;
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

  Tensors tensors_;
};

}  // namespace ringdp
