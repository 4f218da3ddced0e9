// Calls that have been made before: a second one of the same collective, dtype, length, op and tag is
// found, and run or begun, without the work in Python that the first one took.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <string_view>
#include <unordered_map>

#include "kept.hpp"
#include "progress.hpp"
#include "sites.hpp"
#include "tensors.hpp"

namespace ringdp {

inline const char* checked(const nb::bytes& site) {
  if (site.size() != kSite) throw nb::value_error("a site has SITE_BYTES bytes");
  return site.c_str();
}

// An exchange that is the same time and again, but for its number, its buffers and its caller. `kept`:
// where its buffers are put for as long as they are used.
class Prepared {
 public:
  // A tensor that is given, or None.
  struct Buffer {
    nb::handle owner;
    std::byte* data;
  };

  Prepared(Progress& core, int collective, std::vector<std::int64_t> bounds, int dtype_code, int op,
           std::uint64_t kind, int root, nb::dict kept)
      : core_(core), bounds_(std::move(bounds)), collective_(Collective(collective)),
        dtype_(dtype(dtype_code, op)), kind_(kind), root_(root), kept_(std::move(kept)) {
    if (bounds_.size() != std::size_t(core.segment().ranks()) + 1)
      throw nb::value_error("bounds are ranks + 1 numbers");
    brief_ = core.brief(bounds_.back() * dtype_.size);
  }

  std::uint64_t kind() const { return kind_; }
  bool failed() const { return core_.peers().reported().has_value(); }

  bool keeps() const { return PyDict_Size(kept_.ptr()); }

  // A ticket for `wait`.
  std::uint64_t start(Buffer whole, Buffer part, std::uint64_t number, nb::bytes site) {
    const Job what = job(whole, part, number, site);
    const auto used = uses(whole, part, site);
    std::uint64_t ticket;
    {
      nb::gil_scoped_release free;
      ticket = core_.start(what, true);
    }
    return keep(kept_, ticket, used);
  }
  // 0 if it has ended; after a while, or a failure, the ticket.
  std::uint64_t run(Buffer whole, Buffer part, std::uint64_t number, nb::bytes site) {
    const Job what = job(whole, part, number, site);
    auto ticket = brief_ ? core_.dash(what) : 0;
    if (brief_ && !ticket) return 0;
    const auto used = uses(whole, part, site);
    {
      nb::gil_scoped_release free;
      if (!brief_)
        ticket = core_.run(what, kSlice);
      else if (core_.wait(ticket, kSlice))
        ticket = 0;
    }
    return ticket ? keep(kept_, ticket, used) : 0;
  }

 private:
  static constexpr double kSlice = 0.1;  // s until Python looks for signals

  Job job(Buffer whole, Buffer part, std::uint64_t number, const nb::bytes& site) const {
    const Exchange what{collective_, bounds_.data(), whole.data, part.data, root_};
    return {what, dtype_, number, kind_, bounds_.back(), checked(site)};
  }

  // What a job uses until it ends. To be asked before the GIL is given away: then `x.data` may change.
  nb::tuple uses(Buffer whole, Buffer part, const nb::bytes& site) const {
    return nb::make_tuple(nb::find(*this), memory(whole), memory(part), site);
  }
  // What keeps it, whatever the user does with the tensor: `x.data = y` lets go of x's.
  static nb::object memory(Buffer buffer) {
    return buffer.owner.is_none() ? nb::none() : buffer.owner.attr("untyped_storage")();
  }

  Progress& core_;
  std::vector<std::int64_t> bounds_;
  Collective collective_;
  Dtype dtype_;
  std::uint64_t kind_;
  int root_;
  nb::dict kept_;
  bool brief_;  // over before the GIL would have been given away and taken back
};

class Ready {
 public:
  Ready(int rank, int ranks, nb::handle table, nb::handle tensor, nb::handle parameter)
      : rank_(rank), ranks_(ranks), tensors_(table.ptr(), tensor.ptr(), parameter.ptr()) {}

  // The call has been made, with `whole` of so many elements: `op` as the user says it.
  void remember(int collective, int dtype, std::int64_t elements, std::string_view op,
                std::int64_t tag, nb::object prepared) {
    if (known_.size() >= kMost) forget();
    auto* const what = nb::cast<Prepared*>(prepared);
    known_[{collective, dtype, elements, packed(op), tag}] = {what, std::move(prepared)};
  }

  void forget() {
    recent_.fill({});
    known_.clear();
  }

  // For `Sites::learn`; what a call that has ended gives.
  void learn(nb::object line, nb::bytes nowhere, nb::object ended) {
    sites_.learn(std::move(line), std::move(nowhere));
    ended_ = std::move(ended);
  }

  std::uint64_t issued = 0;  // calls so far, those that were issued elsewhere too
  bool held = false;         // whether all calls are to be issued elsewhere
  Sites& sites() { return sites_; }

  // The call of `comm`, if it was made before and its tensors are the buffers themselves: both plain,
  // and apart or the part in its place in the whole. Else null, and nothing is done. An `op` or `tag`
  // that is not given is null. `later`: it is begun, and what is given waits for it.
  nb::object again(nb::handle comm, int collective, nb::handle whole, nb::handle part, nb::handle op,
                   nb::handle tag, bool later) {
    if (held) return {};
    const auto all = tensors_.plain(whole.ptr());
    const auto letters = packed(op);
    const auto label = !tag.is_valid() ? 0 : PyLong_Check(tag.ptr()) ? PyLong_AsLongLong(tag.ptr()) : -1;
    if (!all || !letters || label < 0) return PyErr_Clear(), nb::object();
    Prepared::Buffer buffer{whole, all->data}, piece{nb::none(), nullptr};
    if (part.is_valid()) {
      const auto one = tensors_.plain(part.ptr());
      if (!one || one->dtype != all->dtype || one->elements * ranks_ != all->elements) return {};
      const bool apart = one->data + one->bytes <= all->data || all->data + all->bytes <= one->data;
      if (!apart && one->data != all->data + rank_ * one->bytes) return {};
      piece = {part, one->data};
    }
    const Known* const found = find({collective, all->dtype, all->elements, letters, label});
    if (!found) return {};
    const Known what = *found;
    if (what.prepared->failed()) return {};  // there it raises, and keeps nothing for what never ends
    const auto site = sites_.here();
    const auto number = issued++;
    const auto ticket = later ? what.prepared->start(buffer, piece, number, site)
                              : what.prepared->run(buffer, piece, number, site);
    if (ticket)
      return comm.attr("_begun")(nb::make_tuple(number, what.prepared->kind(), all->elements, site), ticket,
                                 later);
    if (what.prepared->keeps()) comm.attr("_release")();
    return ended_;
  }

 private:
  static constexpr Py_ssize_t kLetters = 4;    // of the longest op
  static constexpr std::size_t kMost = 4096;  // calls that it remembers; then it forgets them all
  static constexpr std::size_t kRecent = 64;  // where it looks first

  struct Key {
    std::int64_t collective, dtype, elements;
    std::uint64_t op;
    std::int64_t tag;
    bool operator==(const Key& o) const {
      return collective == o.collective && dtype == o.dtype && elements == o.elements && op == o.op &&
             tag == o.tag;
    }
  };
  struct Known {
    Prepared* prepared;
    nb::object object;  // it
  };
  struct Hash {
    std::size_t operator()(const Key& k) const {
      std::uint64_t h = k.op;
      for (std::uint64_t part : {k.collective << 8 | k.dtype, k.elements, k.tag})
        h = (h ^ part) * 0x9e3779b97f4a7c15, h ^= h >> 32;
      return h;
    }
  };

  // The map alone would take a twentieth of a small call.
  const Known* find(const Key& key) {
    auto& [said, known] = recent_[std::uint64_t(key.elements * 5 + key.dtype + key.tag) % kRecent];
    if (known && said == key) return known;
    const auto found = known_.find(key);
    if (found == known_.end()) return nullptr;
    said = key;
    return known = &found->second;
  }
  static std::uint64_t packed(std::string_view op) {
    std::uint64_t word = 0;
    std::memcpy(&word, op.data(), std::min(op.size(), sizeof word));
    return word;
  }
  // 0 for what is no op.
  static std::uint64_t packed(nb::handle op) {
    static const std::uint64_t sum = packed(std::string_view("sum"));
    if (!op.is_valid()) return sum;
    Py_ssize_t letters = 0;
    const char* text = PyUnicode_Check(op.ptr()) ? PyUnicode_AsUTF8AndSize(op.ptr(), &letters) : nullptr;
    if (!text || letters > kLetters || std::strlen(text) != std::size_t(letters)) return 0;
    return packed(std::string_view(text, letters));
  }

  int rank_, ranks_;
  Tensors tensors_;
  std::unordered_map<Key, Known, Hash> known_;
  std::array<std::pair<Key, const Known*>, kRecent> recent_{};
  Sites sites_;
  nb::object ended_;
};

}  // namespace ringdp
