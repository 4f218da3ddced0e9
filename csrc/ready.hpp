// Runs repeated calls from a cache, without the Python work of the first call. A call is repeated if its
// collective, dtype, length, op, root, tag, algorithm and sizes of parts are the same. Messages need no
// cache.
#pragma once

#include <algorithm>
#include <nanobind/nanobind.h>

#include <cstring>
#include <map>
#include <string_view>
#include <unordered_map>

#include "around.hpp"
#include "mailbox.hpp"
#include "sites.hpp"
#include "tensors.hpp"

namespace ringdp {

// A call's arguments, null if not given. `whole` has the elements of all ranks, or is the only tensor.
struct Arguments {
  PyObject *whole, *part, *op, *root, *tag, *algorithm;
  bool async;  // async_op
  const std::int64_t* bounds = nullptr;  // of parts whose sizes are given: [ranks + 1], then the output's
  std::int64_t parts = 0;                // the number of these bounds in `Ready`, or 0
};

class Ready {
 public:
  Ready(int rank, int ranks, nb::handle table, nb::handle tensor, nb::handle parameter, nb::object mail)
      : rank_(rank), ranks_(ranks), tensors_(table, tensor, parameter), mail_(std::move(mail)) {}

  // Caches a call whose `whole` has so many elements; `op` and `algorithm` are the user's arguments.
  // `bounds`: of parts whose sizes are given, in the whole and then, for an all_to_all, in the output.
  void remember(int method, int dtype, std::int64_t elements, std::string_view op, std::int64_t root,
                std::int64_t tag, nb::object algorithm, std::vector<std::int64_t> bounds,
                nb::object prepared) {
    auto* const by = identity(algorithm.ptr());
    if (!by) return;
    if (known_.size() >= kMost) drop();
    auto* const what = nb::cast<Prepared*>(prepared);
    std::int64_t parts = 0;
    if (!bounds.empty()) {
      const auto [at, is_new] = parts_.try_emplace(std::move(bounds), last_parts_ + 1);
      last_parts_ += is_new;
      parts = at->second;
    }
    const Key key{Method(method), dtype, elements, packed(op), root, tag, by, parts};
    known_[key] = {what, std::move(prepared), nb::borrow(by)};
  }

  // For Python's garbage collector: an algorithm may hold its communicator, which holds this.
  int visit(visitproc visit, void* arg) const {
    for (const auto& [key, known] : known_) Py_VISIT(known.algorithm.ptr());
    return 0;
  }

  void forget() {
    mail_.reset();
    drop();
  }

  // `ended`: the result of a finished call. `token`: the tensor of a barrier. `kinds`: of messages without a
  // tag, by dtype.
  void learn(nb::object ended, nb::object token, std::vector<std::uint64_t> kinds) {
    ended_ = std::move(ended);
    token_ = std::move(token);
    kinds_ = std::move(kinds);
  }

  bool grouped = false;  // true: every call is asynchronous
  std::uint64_t messages = 0;  // that `message` has sent or received

  // Sends or receives a message of `comm` if that takes but a moment. Else returns null and does nothing.
  nb::object message(nb::handle comm, Method method, const Arguments& given) {
    const bool receives = method == Method::recv;
    const bool any = receives && (!given.root || given.root == Py_None);
    const auto peer = any ? -1 : given.root ? number_of(given.root) : rank_, tag = number_of(given.tag);
    if (tag < 0 || tag >= kTags || peer == rank_ || (peer < 0 && !any)) return PyErr_Clear(), nb::object();
    if (!mail_.is_valid() || grouped || peer >= ranks_) return {};
    if (nb::inst_ptr<Mailbox>(mail_)->has_ended()) comm.attr("_transport").attr("release")();
    const auto plain = tensors_.plain(given.whole);
    if (!plain || !mail_.is_valid()) return {};  // Python, which both may run, may have closed it
    auto& mail = *nb::inst_ptr<Mailbox>(mail_);
    const auto kind = std::uint64_t(tag) << 24 | kinds_[plain->dtype];
    if (receives) {
      const int from = mail.receive_now(plain->data, plain->bytes, kind, int(peer));
      if (from < 0) return {};
      ++messages;
      return nb::int_(from);
    }
    if (!mail.send_now(plain->data, plain->bytes, kind, int(peer))) return {};
    ++messages;
    return method == Method::isend ? ended_ : nb::none();
  }

  // `again` for parts of these sizes; `received`: those of an all_to_all's output, else null.
  nb::object again(nb::handle comm, Method method, Arguments arguments, PyObject* sizes, PyObject* received) {
    std::vector<std::int64_t> bounds;
    if (!bounded(sizes, bounds) || (received && !bounded(received, bounds)))
      return PyErr_Clear(), nb::object();
    const auto at = parts_.find(bounds);
    if (at == parts_.end()) return {};
    arguments.bounds = bounds.data(), arguments.parts = at->second;
    return again(comm, method, arguments);
  }

  // Runs or starts the call of `comm` and returns its result, if it is cached and its tensors can be used as
  // buffers. Else returns null and does nothing.
  nb::object again(nb::handle comm, Method method, Arguments arguments) {
    arguments.async |= grouped;
    if (method == Method::barrier) arguments.whole = token_.ptr();
    const auto op = packed(nb::handle(arguments.op));
    const auto root = number_of(arguments.root), tag = number_of(arguments.tag);
    const auto* const by = identity(arguments.algorithm);
    if (!op || root < 0 || tag < 0 || !by) return PyErr_Clear(), nb::object();
    const auto given = buffers(method, arguments, root == rank_);
    if (!given) return {};
    const Known* const found =
        find({method, given->dtype, given->elements, op, root, tag, by, arguments.parts});
    if (!found) return {};
    Prepared& prepared = *found->prepared;
    const nb::object alive = found->object;
    if (prepared.failed()) return {};  // Python raises, and keeps nothing for a call that never ends
    static const std::uint64_t average = packed(std::string_view("avg"));
    Prepared::Buffer whole = given->whole, part = given->part;
    Around wrapped;
    if (prepared.in_place()) {
      const int divisor = op == average && !prepared.averages() ? ranks_ : 0;
      wrapped = around(prepared, method, *given, rank_, root == rank_, divisor);
      whole = wrapped.buffer, part = nothing();
    }
    const auto site = Sites::of_python().here();
    const auto number = prepared.next();
    const auto ticket = arguments.async ? prepared.start(whole, part, site) : prepared.run(whole, part, site);
    if (ticket) {
      const auto call = nb::make_tuple(number, prepared.kind(), given->elements, site);
      const auto finish = wrapped.finish.pending ? nb::object(nb::cpp_function(wrapped.finish)) : nb::none();
      return comm.attr("_begun")(call, ticket, arguments.async, finish);
    }
    wrapped.finish();
    if (prepared.keeps()) comm.attr("_transport").attr("release")();
    return ended_;
  }

 private:
  static constexpr std::int64_t kTags = 1ll << 31, kMostElements = 1ll << 56;
  static constexpr Py_ssize_t kLetters = 4;    // of the longest op
  static constexpr std::size_t kMost = 4096;  // cached calls; when full, all are dropped
  static constexpr std::size_t kRecent = 64;  // entries of a direct-mapped cache in front of the map

  struct Key {
    Method method;
    std::int64_t dtype, elements;
    std::uint64_t op;
    std::int64_t root, tag;
    const PyObject* algorithm;
    std::int64_t parts;  // the number of their bounds in `parts_`, or 0 if no sizes are given
    bool operator==(const Key& o) const {
      return method == o.method && dtype == o.dtype && elements == o.elements && op == o.op &&
             root == o.root && tag == o.tag && algorithm == o.algorithm && parts == o.parts;
    }
  };
  struct Known {
    Prepared* prepared;
    nb::object object, algorithm;  // keep `prepared` and the key's algorithm alive
  };
  struct Hash {
    std::size_t operator()(const Key& k) const {
      std::uint64_t h = k.op ^ reinterpret_cast<std::uintptr_t>(k.algorithm);
      for (std::uint64_t part : {k.root << 16 | int(k.method) << 8 | k.dtype, k.elements, k.tag, k.parts})
        h = (h ^ part) * 0x9e3779b97f4a7c15, h ^= h >> 32;
      return h;
    }
  };

  void drop() {
    recent_.fill({});
    parts_.clear();
    const auto gone = std::exchange(known_, {});  // destroyed last: an algorithm's finalizer may call us
  }

  static Prepared::Buffer nothing() { return {nb::none(), nullptr}; }
  // Returns the call's buffers, if its tensors are plain and either disjoint, or the part lies in its place
  // in the whole.
  std::optional<Given> buffers(Method method, const Arguments& arguments, bool at_root) {
    const bool everywhere = method != Method::gather && method != Method::scatter;  // has a whole
    std::optional<Plain> all, one;
    if ((everywhere || at_root) && !(all = tensors_.plain(arguments.whole))) return std::nullopt;
    if (!arguments.part) {
      const Prepared::Buffer whole{arguments.whole, all->data};
      const bool has_part = at_root && (method == Method::broadcast || method == Method::reduce);
      return Given{whole, has_part ? whole : nothing(), all->dtype, all->elements, all->bytes, 0, false};
    }
    if (!(one = tensors_.plain(arguments.part))) return std::nullopt;
    const Prepared::Buffer part{arguments.part, one->data};
    const bool exchanged = method == Method::all_to_all;
    auto elements = exchanged ? one->elements : one->elements * ranks_, before = rank_ * one->elements;
    if (const auto* const bounds = arguments.bounds) {
      elements = bounds[ranks_], before = bounds[rank_];
      if (one->elements != (exchanged ? bounds[2 * ranks_ + 1] : bounds[rank_ + 1] - before))
        return std::nullopt;
    }
    if (!all) return Given{nothing(), part, one->dtype, elements, 0, one->bytes, true};
    if (one->dtype != all->dtype || elements != all->elements) return std::nullopt;
    const bool apart = one->data + one->bytes <= all->data || all->data + all->bytes <= one->data;
    const bool must_be = exchanged || method == Method::scatter;
    if (!apart && (must_be || one->data != all->data + before * all->bytes / elements)) return std::nullopt;
    return Given{{arguments.whole, all->data}, part, all->dtype, elements, all->bytes, one->bytes, apart};
  }

  // Returns a root or a tag, by default 0, or -1 if it is not an int.
  static std::int64_t number_of(PyObject* given) {
    return !given ? 0 : PyLong_Check(given) ? PyLong_AsLongLong(given) : -1;
  }

  // Appends the bounds of parts of these sizes. Returns false unless they are a list or tuple of an int for
  // each rank; Python decides on any other.
  bool bounded(PyObject* sizes, std::vector<std::int64_t>& bounds) const {
    if (!(PyList_CheckExact(sizes) || PyTuple_CheckExact(sizes)) || PySequence_Size(sizes) != ranks_)
      return false;
    bounds.push_back(0);
    for (int r = 0; r < ranks_; ++r) {
      const auto size = number_of(nb::steal(PySequence_GetItem(sizes, r)).ptr());
      if (size < 0 || size > kMostElements || bounds.back() > kMostElements) return false;
      bounds.push_back(bounds.back() + size);
    }
    return true;
  }

  // Looks up a call, first in `recent_`: the map alone would take a twentieth of a small call.
  const Known* find(const Key& key) {
    const auto by = reinterpret_cast<std::uintptr_t>(key.algorithm) / 16;
    const auto sum = key.elements * 5 + key.dtype + key.root + key.tag + by;
    auto& [recent, known] = recent_[std::uint64_t(sum) % kRecent];
    if (known && recent == key) return known;
    const auto found = known_.find(key);
    if (found == known_.end()) return nullptr;
    recent = key;
    return known = &found->second;
  }
  // Returns an object that identifies the algorithm: its interned name, or the user's function. It is
  // borrowed, so only compare it unless the algorithm is kept alive. Null for any other type, whose equality
  // only Python can decide.
  static PyObject* identity(PyObject* algorithm) {
    static PyObject* const direct = PyUnicode_InternFromString("direct");
    static PyObject* const function = nb::module_::import_("types").attr("FunctionType").inc_ref().ptr();
    if (!algorithm) return direct;  // the default
    if (!PyUnicode_CheckExact(algorithm))
      return reinterpret_cast<PyObject*>(Py_TYPE(algorithm)) == function ? algorithm : nullptr;
    Py_INCREF(algorithm);
    PyUnicode_InternInPlace(&algorithm);
    Py_DECREF(algorithm);
    return algorithm;
  }
  static std::uint64_t packed(std::string_view op) {
    std::uint64_t word = 0;
    std::memcpy(&word, op.data(), std::min(op.size(), sizeof word));
    return word;
  }
  // Returns 0 if it is not an op.
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
  std::map<std::vector<std::int64_t>, std::int64_t> parts_;  // numbers, never used twice, by bounds
  std::int64_t last_parts_ = 0;
  std::array<std::pair<Key, const Known*>, kRecent> recent_{};
  nb::object ended_, token_, mail_;  // no `mail_`: closed
  std::vector<std::uint64_t> kinds_;
};

}  // namespace ringdp
