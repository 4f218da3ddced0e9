// The user's line of a call, in the table that comm.call keeps: see there, Note [the user's line]. It
// is looked up here because, of a call that has been made before, it would be a tenth in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "record.hpp"

namespace ringdp {

class Sites {
 public:
  // `known`: by place, bytes; empty where the line is not the user's. `search`: of a frame whose place
  // is not known, or not the user's.
  void learn(nanobind::dict known, nanobind::object search) {
    known_ = std::move(known), search_ = std::move(search);
  }

  // SITE_BYTES bytes, for a call from `frame`; zeros for one from None.
  nanobind::bytes of(nanobind::handle frame) const {
    if (frame.is_none()) return nowhere_;
    const auto code = nanobind::steal(code_of(frame));
    const auto offset = nanobind::steal(PyObject_GetAttr(frame.ptr(), lasti()));
    if (!code || !offset) throw nanobind::python_error();
    const auto place = reinterpret_cast<std::intptr_t>(code.ptr()) + PyLong_AsSsize_t(offset.ptr());
    const auto key = nanobind::steal(PyLong_FromSsize_t(place));
    PyObject* const found = PyDict_GetItemWithError(known_.ptr(), key.ptr());
    if (found && PyObject_IsTrue(found)) return nanobind::borrow<nanobind::bytes>(found);
    return nanobind::cast<nanobind::bytes>(search_(frame));
  }

 private:
  static PyObject* code_of(nanobind::handle frame) {
    return reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr())));
  }
  static PyObject* lasti() {
    static PyObject* const name = PyUnicode_InternFromString("f_lasti");
    return name;
  }

  nanobind::dict known_;
  nanobind::object search_;
  nanobind::bytes nowhere_{std::array<char, kSite>{}.data(), kSite};
};

}  // namespace ringdp
