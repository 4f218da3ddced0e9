// The block of `with comm.group():`. Not in Python, as Ctrl-C may come after any call there: it could leave
// the group open if it came as the block begins or ends.
#pragma once

#include "ready.hpp"

namespace ringdp {

class Grouping {
 public:
  // `waits`: whether the block waits at its end for the group's works.
  Grouping(nb::object comm, nb::object group, bool waits)
      : comm_(std::move(comm)), group_(std::move(group)), waits_(waits) {}

  nb::object enter() {
    if (outer_.is_valid()) throw std::runtime_error("a group began twice; allowed: a group() for each block");
    outer_ = comm_.attr("_group");
    collect(group_);
    return group_;
  }
  // `error`: None, or the type of what the block has raised.
  void exit(nb::handle error) {
    collect(outer_);
    if (waits_ && error.is_none()) group_.attr("wait")();
  }

 private:
  // Adds the works of later calls to `group`, or to none.
  void collect(nb::handle group) {
    comm_.attr("_group") = group;
    const nb::object ready = comm_.attr("_ready");
    if (!ready.is_none()) nb::cast<Ready&>(ready).grouped = !group.is_none();
  }

  nb::object comm_, group_, outer_;
  bool waits_;
};

}  // namespace ringdp
