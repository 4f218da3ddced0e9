// A communicator method whose repeated calls stay in C++. A call that `Ready` has cached is run or started
// at once, and so is a message that fits into a slab, if it can be moved now. Every other call goes to the
// wrapped Python function, which alone defines the method.
#pragma once

#include "ready.hpp"
#include <algorithm>
#include <structmember.h>

namespace ringdp {

struct Repeated {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject* function;
  int method;
};

// Positions of a call's arguments after `self`, by method; 0: it has none. `sizes`: of the parts of the
// whole, which may be uneven; `received`: of an all_to_all's output.
struct Places {
  Method method;
  int whole, part, op, root, sizes = 0, received = 0;
};
constexpr Places kArguments[] = {  // in the order of transport.repeated.METHODS
    {Method::all_reduce, 1, 0, 2, 0},
    {Method::reduce_scatter, 2, 1, 3, 0},
    {Method::all_gather, 1, 2, 0, 0},
    {Method::all_to_all, 2, 1, 0, 0},
    {Method::broadcast, 1, 0, 0, 2},
    {Method::reduce, 1, 0, 3, 2},
    {Method::gather, 1, 2, 0, 3},
    {Method::scatter, 2, 1, 0, 3},
    {Method::barrier, 0, 0, 0, 0},
    {Method::send, 1, 0, 0, 2},
    {Method::isend, 1, 0, 0, 2},
    {Method::recv, 1, 0, 0, 2},
    {Method::reduce_scatter, 2, 1, 4, 0, 3},
    {Method::all_gather, 1, 2, 0, 0, 3},
    {Method::gather, 1, 2, 0, 4, 3},
    {Method::scatter, 2, 1, 0, 4, 3},
    {Method::all_to_all, 2, 1, 0, 0, 4, 3},
};

// Returns the call's result, or null, having done nothing.
inline nb::object again(const Repeated& self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  static PyObject* const op_name = PyUnicode_InternFromString("op");
  static PyObject* const root_name = PyUnicode_InternFromString("root");
  static PyObject* const to_name = PyUnicode_InternFromString("dst");
  static PyObject* const from_name = PyUnicode_InternFromString("src");
  static PyObject* const tag_name = PyUnicode_InternFromString("tag");
  static PyObject* const scale_name = PyUnicode_InternFromString("scale");
  static PyObject* const async_name = PyUnicode_InternFromString("async_op");
  static PyObject* const algorithm_name = PyUnicode_InternFromString("algorithm");
  static PyObject* const ready_name = PyUnicode_InternFromString("_ready");
  const Places& at = kArguments[self.method];
  const Method method = at.method;
  const bool message = method >= Method::send;
  PyObject* const peer_name = !message ? root_name : method == Method::recv ? from_name : to_name;
  const int needed = (at.whole > 0) + (at.part > 0) + (at.sizes > 0) + (at.received > 0);
  if (count < 1 + needed || count > 1 + std::max({needed, at.op, at.root})) return {};
  const auto given = [&](int place) { return place && place < count ? args[place] : nullptr; };
  Arguments arguments{given(at.whole), given(at.part), given(at.op), given(at.root), nullptr, nullptr, false};
  for (Py_ssize_t i = 0, more = names ? PyTuple_Size(names) : 0; i < more; ++i) {
    PyObject *const name = PyTuple_GetItem(names, i), *const value = args[count + i];
    if (name == op_name && at.op && !arguments.op)
      arguments.op = value;
    else if (name == peer_name && at.root && !arguments.root)
      arguments.root = value;
    else if (name == tag_name && at.whole)
      arguments.tag = value;
    else if (message)
      return {};
    else if (name == algorithm_name && at.whole && !at.received)
      arguments.algorithm = value;
    else if (name == async_name && PyBool_Check(value))
      arguments.async = value == Py_True;
    else if (!(name == scale_name && at.op && value == Py_None))  // the default
      return {};
  }
  const auto ready = nb::steal(PyObject_GetAttr(args[0], ready_name));
  if (!ready.is_valid()) return PyErr_Clear(), nb::object();
  static PyTypeObject* const type = reinterpret_cast<PyTypeObject*>(nb::type<Ready>().ptr());
  if (Py_TYPE(ready.ptr()) != type) return {};
  auto& cache = *nb::inst_ptr<Ready>(ready);
  if (at.sizes) return cache.again(args[0], method, arguments, args[at.sizes], given(at.received));
  return message ? cache.message(args[0], method, arguments) : cache.again(args[0], method, arguments);
}

inline PyObject* call_repeated(PyObject* self, PyObject* const* args, std::size_t flags, PyObject* names) {
  const auto& method = *reinterpret_cast<Repeated*>(self);
  try {
    if (auto done = again(method, args, PyVectorcall_NARGS(flags), names); done.is_valid())
      return done.release().ptr();
  } catch (nb::python_error& e) {
    e.restore();
    return nullptr;
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    return nullptr;
  }
  return PyObject_Vectorcall(method.function, args, flags, names);
}

// Repeated(method, function)
inline PyObject* new_repeated(PyTypeObject* type, PyObject* args, PyObject*) {
  int number;
  PyObject* function;
  if (!PyArg_ParseTuple(args, "iO", &number, &function)) return nullptr;
  if (number < 0 || number >= int(std::size(kArguments)))
    return PyErr_Format(PyExc_ValueError, "no repeated method has the number %d", number);
  auto* const made = PyType_GenericAlloc(type, 0);
  if (!made) return nullptr;
  auto& method = *reinterpret_cast<Repeated*>(made);
  method.call = call_repeated;
  method.function = Py_NewRef(function);
  method.method = number;
  return made;
}

inline void end_repeated(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  Py_DECREF(reinterpret_cast<Repeated*>(self)->function);
  PyObject_Free(self);
  Py_DECREF(type);
}

inline PyObject* bind_repeated(PyObject* self, PyObject* object, PyObject*) {
  static PyObject* const method = nb::module_::import_("types").attr("MethodType").inc_ref().ptr();
  return object ? PyObject_CallFunctionObjArgs(method, self, object, nullptr) : Py_NewRef(self);
}

// Its name, its documentation, its marks are the function's.
inline PyObject* look_up_repeated(PyObject* self, PyObject* name) {
  PyObject* const function = reinterpret_cast<Repeated*>(self)->function;
  if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0) return Py_NewRef(function);
  if (PyUnicode_CompareWithASCIIString(name, "__class__") == 0) return PyObject_GenericGetAttr(self, name);
  return PyObject_GetAttr(function, name);
}
inline int mark_repeated(PyObject* self, PyObject* name, PyObject* value) {
  return PyObject_SetAttr(reinterpret_cast<Repeated*>(self)->function, name, value);
}

inline nb::object repeated_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Repeated, call), READONLY, nullptr}, {}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_repeated)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(end_repeated)},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(bind_repeated)},
                                {Py_tp_getattro, reinterpret_cast<void*>(look_up_repeated)},
                                {Py_tp_setattro, reinterpret_cast<void*>(mark_repeated)},
                                {Py_tp_members, members},
                                {0, nullptr}};
  // torch.compile recognizes a method in C by the name of Cython's type for functions, and calls it as it
  // is. With any other type name it would lose `self` (torch 2.13).
  static PyType_Spec spec{"ringdp._core.cython_function_or_method", sizeof(Repeated), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
                          slots};
  return nb::steal(PyType_FromSpec(&spec));
}

}  // namespace ringdp
