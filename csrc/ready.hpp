// Calls that have been made before: a second one of the same collective, dtype, length, op, root, tag and
// algorithm is found, and run or begun, without the work in Python that the first one took.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <string_view>
#include <unordered_map>

#include "around.hpp"
#include "sites.hpp"
#include "tensors.hpp"

namespace ringdp {

// A call's arguments: null is not given. `whole` has the elements of all ranks, or is the only tensor.
struct Asked {
  PyObject *whole, *part, *op, *root, *tag, *algorithm;
  bool later;  // it is begun, and what is given waits for it
};

class Ready {
 public:
  Ready(int rank, int ranks, nb::handle table, nb::handle tensor, nb::handle parameter)
      : rank_(rank), ranks_(ranks), tensors_(table, tensor, parameter) {}

  // The call has been made, with `whole` of so many elements: `op` and `algorithm` as the user says them.
  void remember(int method, int dtype, std::int64_t elements, std::string_view op, std::int64_t root,
                std::int64_t tag, nb::object algorithm, nb::object prepared) {
    auto* const by = way(algorithm.ptr());
    if (!by) return;
    if (known_.size() >= kMost) forget();
    auto* const what = nb::cast<Prepared*>(prepared);
    const Key key{Method(method), dtype, elements, packed(op), root, tag, by};
    known_[key] = {what, std::move(prepared), nb::borrow(by)};
  }

  // For Python's garbage collector: an algorithm may hold its communicator, which holds this.
  int visit(visitproc visit, void* arg) const {
    for (const auto& [key, known] : known_) Py_VISIT(known.algorithm.ptr());
    return 0;
  }

  void forget() {
    recent_.fill({});
    const auto gone = std::exchange(known_, {});  // what goes may call, as an algorithm's finalizer
  }

  // For `Sites::learn`; what a call that has ended gives; the tensor of a barrier.
  void learn(nb::object line, nb::bytes nowhere, nb::object ended, nb::object token) {
    sites_.learn(std::move(line), std::move(nowhere));
    ended_ = std::move(ended);
    token_ = std::move(token);
  }

  bool held = false;  // whether all calls are to be issued elsewhere
  Sites& sites() { return sites_; }

  // The call of `comm`, if it was made before and its tensors are the buffers themselves. Else null, and
  // nothing is done.
  nb::object again(nb::handle comm, Method method, Asked asked) {
    if (held) return {};
    if (method == Method::barrier) asked.whole = token_.ptr();
    const auto letters = packed(nb::handle(asked.op));
    const auto root = number_of(asked.root), tag = number_of(asked.tag);
    const auto* const by = way(asked.algorithm);
    if (!letters || root < 0 || tag < 0 || !by) return PyErr_Clear(), nb::object();
    const auto given = buffers(method, asked, root == rank_);
    if (!given) return {};
    const Known* const found = find({method, given->dtype, given->elements, letters, root, tag, by});
    if (!found) return {};
    Prepared& prepared = *found->prepared;
    const nb::object alive = found->object;
    if (prepared.failed()) return {};  // there it raises, and keeps nothing for what never ends
    static const std::uint64_t average = packed(std::string_view("avg"));
    Prepared::Buffer whole = given->whole, part = given->part;
    Around also;
    if (prepared.in_place()) {
      const int left = letters == average && !prepared.averages() ? ranks_ : 0;
      also = around(prepared, method, *given, rank_, root == rank_, left);
      whole = also.buffer, part = nothing();
    }
    const auto site = sites_.here();
    const auto number = prepared.next();
    const auto ticket = asked.later ? prepared.start(whole, part, site) : prepared.run(whole, part, site);
    if (ticket) {
      const auto call = nb::make_tuple(number, prepared.kind(), given->elements, site);
      const auto finish = also.home.left ? nb::object(nb::cpp_function(also.home)) : nb::none();
      return comm.attr("_begun")(call, ticket, asked.later, finish);
    }
    also.home();
    if (prepared.keeps()) comm.attr("_transport").attr("release")();
    return ended_;
  }

 private:
  static constexpr Py_ssize_t kLetters = 4;    // of the longest op
  static constexpr std::size_t kMost = 4096;  // calls that it remembers; then it forgets them all
  static constexpr std::size_t kRecent = 64;  // where it looks first

  struct Key {
    Method method;
    std::int64_t dtype, elements;
    std::uint64_t op;
    std::int64_t root, tag;
    const PyObject* algorithm;
    bool operator==(const Key& o) const {
      return method == o.method && dtype == o.dtype && elements == o.elements && op == o.op &&
             root == o.root && tag == o.tag && algorithm == o.algorithm;
    }
  };
  struct Known {
    Prepared* prepared;
    nb::object object, algorithm;  // they live as long as they are known
  };
  struct Hash {
    std::size_t operator()(const Key& k) const {
      std::uint64_t h = k.op ^ reinterpret_cast<std::uintptr_t>(k.algorithm);
      for (std::uint64_t part : {k.root << 16 | int(k.method) << 8 | k.dtype, k.elements, k.tag})
        h = (h ^ part) * 0x9e3779b97f4a7c15, h ^= h >> 32;
      return h;
    }
  };

  static Prepared::Buffer nothing() { return {nb::none(), nullptr}; }
  // If its tensors are plain, and apart or the part in its place in the whole.
  std::optional<Given> buffers(Method method, const Asked& asked, bool at_root) {
    const bool everywhere = method != Method::gather && method != Method::scatter;  // there is a whole
    std::optional<Plain> all, one;
    if ((everywhere || at_root) && !(all = tensors_.plain(asked.whole))) return std::nullopt;
    if (!asked.part) {
      const Prepared::Buffer whole{asked.whole, all->data};
      const bool has_part = at_root && (method == Method::broadcast || method == Method::reduce);
      return Given{whole, has_part ? whole : nothing(), all->dtype, all->elements, all->bytes, 0, false};
    }
    if (!(one = tensors_.plain(asked.part))) return std::nullopt;
    const Prepared::Buffer part{asked.part, one->data};
    const auto elements = method == Method::all_to_all ? one->elements : one->elements * ranks_;
    if (!all) return Given{nothing(), part, one->dtype, elements, 0, one->bytes, true};
    if (one->dtype != all->dtype || elements != all->elements) return std::nullopt;
    const bool apart = one->data + one->bytes <= all->data || all->data + all->bytes <= one->data;
    const bool must_be = method == Method::all_to_all || method == Method::scatter;
    if (!apart && (must_be || one->data != all->data + rank_ * one->bytes)) return std::nullopt;
    return Given{{asked.whole, all->data}, part, all->dtype, elements, all->bytes, one->bytes, apart};
  }

  // A root or a tag: 0 by default, -1 for what is none.
  static std::int64_t number_of(PyObject* given) {
    return !given ? 0 : PyLong_Check(given) ? PyLong_AsLongLong(given) : -1;
  }

  // The map alone would take a twentieth of a small call.
  const Known* find(const Key& key) {
    const auto by = reinterpret_cast<std::uintptr_t>(key.algorithm) / 16;
    const auto sum = key.elements * 5 + key.dtype + key.root + key.tag + by;
    auto& [said, known] = recent_[std::uint64_t(sum) % kRecent];
    if (known && said == key) return known;
    const auto found = known_.find(key);
    if (found == known_.end()) return nullptr;
    said = key;
    return known = &found->second;
  }
  // The one object for algorithms of that name, or a user's function; only to be compared, where none is
  // known. Null for others: what is equal, or means the same tomorrow, Python alone knows.
  static PyObject* way(PyObject* algorithm) {
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
  nb::object ended_, token_;
};

}  // namespace ringdp
