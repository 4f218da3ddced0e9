// Caches the user's line of a call by code location: see comm.call, Note [the user's line].
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>

#include "record.hpp"

namespace ringdp {

class Sites {
 public:
  // The process's cache. Never destroyed, as Python ends before.
  static Sites& of_python() {
    static Sites* const sites = new Sites;
    return *sites;
  }

  bool told = true;  // false: record no lines, to measure what they cost

  // `line`: maps a frame to its line, empty if it is not the user's. `nowhere`: if no frame is.
  void learn(nanobind::object line, nanobind::bytes nowhere) {
    line_ = std::move(line), nowhere_ = std::move(nowhere);
  }

  // Returns the line of the innermost frame that is the user's, in SITE_BYTES bytes.
  nanobind::bytes here() {
    if (!told) return zeros_;
    auto frame = nanobind::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
    for (; frame.is_valid() && !frame.is_none(); frame = back(frame))
      if (const auto& site = of(frame); site.size()) return site;
    return nowhere_;
  }

 private:
  static constexpr std::size_t kPlaces = 512;  // cached locations; a collision replaces

  struct Place {
    nanobind::object code;  // kept alive, so that no other code object gets its address
    int instruction = 0;
    nanobind::bytes site;
  };

  const nanobind::bytes& of(nanobind::handle frame) {
    auto code = nanobind::steal(
        reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
    const int at = instruction(frame);
    const auto address = reinterpret_cast<std::uintptr_t>(code.ptr());
    Place& place = places_[(address / 64 + at / 2) % kPlaces];
    if (!place.code.is(code) || place.instruction != at) {
      auto site = nanobind::cast<nanobind::bytes>(line_(frame));
      if (site.size() && site.size() != kSite) throw nanobind::value_error("a site has SITE_BYTES bytes");
      place = {std::move(code), at, std::move(site)};
    }
    return place.site;
  }

#ifdef Py_LIMITED_API
  static int instruction(nanobind::handle frame) { return nanobind::cast<int>(frame.attr("f_lasti")); }
  static nanobind::object back(nanobind::handle frame) { return frame.attr("f_back"); }
#else
  static int instruction(nanobind::handle frame) {
    return PyFrame_GetLasti(reinterpret_cast<PyFrameObject*>(frame.ptr()));
  }
  static nanobind::object back(nanobind::handle frame) {
    auto* const outer = PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.ptr()));
    return nanobind::steal(reinterpret_cast<PyObject*>(outer));
  }
#endif

  nanobind::object line_;
  nanobind::bytes zeros_{std::array<char, kSite>{}.data(), kSite}, nowhere_ = zeros_;
  std::array<Place, kPlaces> places_;
};

}  // namespace ringdp
