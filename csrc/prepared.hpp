// A collective that is prepared once and started many times, with a new number, buffers and caller each
// time. The dict `kept` holds its buffers while they are used.
#pragma once

#include <nanobind/nanobind.h>

#include "progress.hpp"

namespace ringdp {

namespace nb = nanobind;

// Keeps what a running call uses alive, under its ticket in `kept`, even if the caller goes on without it.
// Must be called before C++ returns: Python may raise KeyboardInterrupt as the call returns, so the caller
// may never see the ticket, and its frame's references go.
template <class Ticket>
Ticket keep(const nb::dict& kept, Ticket ticket, nb::handle used) {
  kept[nb::int_(ticket)] = used;
  return ticket;
}

inline const char* checked(const nb::bytes& site) {
  if (site.size() != kSite) throw nb::value_error("a site has SITE_BYTES bytes");
  return site.c_str();
}

constexpr double kSlice = 0.1;  // s that a call runs between Python's checks for signals

class Prepared {
 public:
  // A buffer. `owner`: the caller's tensor, or an object that keeps its memory, or None.
  struct Buffer {
    nb::handle owner;
    std::byte* data;
  };

  // An exchange. `bounds`: of the ranks' shards of the whole. `received`: empty but in an uneven all_to_all.
  Prepared(Progress& core, Collective collective, int root, std::vector<std::int64_t> bounds,
           std::vector<std::int64_t> received, Dtype dtype, std::uint64_t kind, nb::dict kept)
      : Prepared(core, std::move(bounds), core.segment().ranks(), dtype, kind, std::move(kept)) {
    received_ = std::move(received);
    Exchange exchange{collective, bounds_.data(), nullptr, nullptr, root};
    if (!received_.empty()) {
      if (received_.size() != bounds_.size()) throw nb::value_error("received has ranks + 1 numbers");
      exchange.received = received_.data();
      brief_ = false;  // what the others send each other takes as long
    }
    what_ = exchange;
    elements_ = bounds_.back();
  }
  // A program. `bounds`: of the chunks of its buffer, the whole. `program` owns the rows. `changes`: whether
  // they change the buffer. `elements`: of the collective; the buffer may hold fewer.
  Prepared(Progress& core, nb::object program, Rows rows, bool changes, std::vector<std::int64_t> bounds,
           Dtype dtype, std::uint64_t kind, std::int64_t elements, nb::dict kept)
      : Prepared(core, std::move(bounds), rows.chunks, dtype, kind, std::move(kept)) {
    rows.bounds = bounds_.data();
    brief_ &= rows.count <= kFewRows;
    what_ = rows;
    changes_ = changes;
    elements_ = elements;
    program_ = std::move(program);
  }
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  std::uint64_t kind() const { return kind_; }
  std::uint64_t next() const { return core_.issued; }
  // Whether the whole is its only buffer, with this rank's part inside it.
  bool in_place() const { return std::holds_alternative<Rows>(what_); }
  bool changes() const { return changes_; }
  bool averages() const { return dtype_.divide != nullptr; }
  std::size_t bytes() const { return bounds_.back() * dtype_.size; }
  // Returns where a rank's part of a program's buffer begins, in bytes.
  std::size_t part_at(int rank) const {
    const auto each = (bounds_.size() - 1) / core_.segment().ranks();
    return bounds_[rank * each] * dtype_.size;
  }
  bool failed() const { return core_.peers().reported().has_value(); }

  bool keeps() const { return PyDict_Size(kept_.ptr()); }

  // Returns what keeps the buffer's memory, its storage: after `x.data = y` the tensor x no longer does.
  static nb::object memory(Buffer buffer) {
    static PyObject* const storage = PyUnicode_InternFromString("untyped_storage");
    const bool tensor = nb::hasattr(buffer.owner, storage);
    return tensor ? nb::object(buffer.owner.attr(storage)()) : nb::borrow(buffer.owner);
  }

  // Starts it in the background. Returns a ticket for `wait`.
  std::uint64_t start(Buffer whole, Buffer part, nb::bytes site) {
    const auto used = uses(whole, part, site);
    const Job what = job(whole, part, site);
    std::uint64_t ticket;
    {
      nb::gil_scoped_release free;
      ticket = core_.start(what, true);
    }
    return keep(kept_, ticket, used);
  }
  // Starts it and works on it for up to kSlice. Returns 0 if it has ended, else its ticket.
  std::uint64_t run(Buffer whole, Buffer part, nb::bytes site) {
    std::uint64_t ticket = 0;
    if (brief_) {
      ticket = core_.run_brief(job(whole, part, site));
      if (!ticket) return 0;
      // Ctrl-C may come in `uses`, where torch runs the Python code of a function mode or of a subclass.
      keep(kept_, ticket, nb::make_tuple(nb::find(*this), whole.owner, part.owner, site));
    }
    const auto used = uses(whole, part, site);
    if (!ticket) ticket = core_.start(job(whole, part, site), false);
    {
      nb::gil_scoped_release free;
      if (core_.wait(ticket, kSlice)) return 0;
    }
    return keep(kept_, ticket, used);
  }

 private:
  static constexpr std::size_t kFewRows = 32;  // the most for `run_brief`: each row may wait

  Prepared(Progress& core, std::vector<std::int64_t> bounds, int pieces, Dtype dtype, std::uint64_t kind,
           nb::dict kept)
      : core_(core), bounds_(std::move(bounds)), dtype_(dtype), kind_(kind), kept_(std::move(kept)) {
    if (bounds_.size() != std::size_t(pieces) + 1) throw nb::value_error("bounds are pieces + 1 numbers");
    brief_ = core.brief(bytes());
  }

  // Returns the next job. Its number is taken here, and no Python code runs until it has been started.
  Job job(Buffer whole, Buffer part, const nb::bytes& site) {
    Job made{what_, dtype_, 0, kind_, elements_, checked(site)};
    made.number = core_.issued++;
    if (auto* const exchange = std::get_if<Exchange>(&made.what))
      exchange->whole = whole.data, exchange->part = part.data;
    else
      std::get<Rows>(made.what).buffer = whole.data;
    return made;
  }

  // Returns the objects that a job uses until it ends. Called before the GIL is released, as another thread
  // may then change `x.data`.
  nb::tuple uses(Buffer whole, Buffer part, const nb::bytes& site) const {
    return nb::make_tuple(nb::find(*this), memory(whole), memory(part), site);
  }

  Progress& core_;
  std::vector<std::int64_t> bounds_, received_;
  std::variant<Rows, Exchange> what_;  // without buffers
  nb::object program_;                 // owns the rows
  bool changes_ = true;
  Dtype dtype_;
  std::uint64_t kind_;
  std::int64_t elements_ = 0;
  nb::dict kept_;
  bool brief_;  // takes less time than releasing and reacquiring the GIL would
};

}  // namespace ringdp
