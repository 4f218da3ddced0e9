// A tensor's memory as seen from C++, in one call and without torch's ABI: by the table of functions
// that DLPack 1.3 defines (its "C exchange API") and tensor classes carry.
// https://dmlc.github.io/dlpack/latest/python_spec.html
//
// Note [asked once]
//   To ask a tensor whether it is negated took 0.1 us of 0.8, since torch gives the GIL away for it, so
//   a tensor is asked once. Another one in its place, at the same memory, would not be asked; but what
//   torch negates is the imaginary part of a complex tensor. Its elements don't lie side by side, so it
//   is contiguous only if it has one (or as_strided says so), and one float alone is always asked.
//   Nor is a storage asked again: what is resized lies elsewhere. One that is freed and made anew, shorter
//   and by chance in its old place, with no call between, would not be noticed.
#pragma once

#include <Python.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace ringdp {

// DLPack's layouts, as far as they are used.
struct DlVersion {
  std::uint32_t major, minor;
};
struct DlTensor {
  void* data;
  std::int32_t device, device_number;
  std::int32_t dimensions;
  std::uint8_t type, bits;
  std::uint16_t lanes;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};
struct DlExchange {
  DlVersion version;
  const DlExchange* older;
  void *allocate, *export_owned, *import_owned;
  int (*view)(PyObject*, DlTensor*);  // 0, or -1 and a Python error
};

// A tensor that is its own buffer: in memory on the CPU, contiguous, of a real dtype.
struct Plain {
  std::byte* data;
  int dtype;  // the order of transport.base.DTYPES
  std::int64_t elements;
  std::size_t bytes;
};

class Tensors {
 public:
  // `table`: the capsule that the class carries; tensors of both classes are looked at.
  Tensors(PyObject* table, PyObject* tensor, PyObject* parameter)
      : exchange_(static_cast<const DlExchange*>(PyCapsule_GetPointer(table, "dlpack_exchange_api"))),
        tensor_(tensor), parameter_(parameter) {
    while (exchange_ && exchange_->version.major > 1) exchange_ = exchange_->older;
    PyErr_Clear();
  }

  // Nothing for what is no such tensor: others may still be flattened, slowly.
  std::optional<Plain> plain(PyObject* object) {
    const auto seen = viewed(object);
    if (!seen || seen->device != kCpu) return std::nullopt;
    std::int64_t elements = 1;
    for (int d = seen->dimensions - 1; d >= 0; --d) {
      if (seen->shape[d] != 1 && seen->strides && seen->strides[d] != elements) return std::nullopt;
      elements *= seen->shape[d];
    }
    auto* data = static_cast<std::byte*>(seen->data) + seen->byte_offset;
    const Plain found{data, code(*seen), elements, std::size_t(elements) * seen->bits / 8};
    if (elements && !trusted(object, found)) return std::nullopt;
    return found;
  }

  // How each of a list lies, what it is, and its offset (None: there are none), as bytes that are equal
  // where all of that is. None if one is not of a real dtype or of another class.
  PyObject* seen(PyObject* tensors, PyObject* offsets) {
    if (!PyList_CheckExact(tensors) || (offsets != Py_None && !PyList_CheckExact(offsets))) Py_RETURN_NONE;
    const auto count = PyList_Size(tensors), places = offsets == Py_None ? 0 : PyList_Size(offsets);
    numbers_.clear();
    numbers_.push_back(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      const auto found = viewed(PyList_GetItem(tensors, i));
      if (!found || !found->strides) Py_RETURN_NONE;
      numbers_.push_back(reinterpret_cast<std::intptr_t>(found->data) + std::int64_t(found->byte_offset));
      numbers_.push_back(std::int64_t(code(*found)) << 48 | std::int64_t(found->dimensions) << 32 |
                         std::int64_t(found->device) << 16 | found->device_number);
      numbers_.insert(numbers_.end(), found->shape, found->shape + found->dimensions);
      numbers_.insert(numbers_.end(), found->strides, found->strides + found->dimensions);
    }
    for (Py_ssize_t i = 0; i < places; ++i) {
      numbers_.push_back(PyLong_AsLongLong(PyList_GetItem(offsets, i)));
      if (PyErr_Occurred()) {
        PyErr_Clear();
        Py_RETURN_NONE;
      }
    }
    const auto* first = reinterpret_cast<const char*>(numbers_.data());
    return PyBytes_FromStringAndSize(first, Py_ssize_t(numbers_.size() * sizeof numbers_[0]));
  }

 private:
  // What is of another class, or of no dtype of ours, is none.
  std::optional<DlTensor> viewed(PyObject* object) {
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if (!exchange_ || (type != tensor_ && type != parameter_)) return std::nullopt;
    DlTensor seen;
    if (exchange_->view(object, &seen) != 0) {
      PyErr_Clear();
      return std::nullopt;
    }
    if (code(seen) < 0) return std::nullopt;
    return seen;
  }

  struct Asked {  // a tensor that is trusted
    const PyObject* tensor;
    const std::byte* data;
    std::size_t bytes;
  };
  static constexpr std::size_t kAsked = 64;  // that it remembers; of those that collide, the last

  static constexpr std::int32_t kCpu = 1;

  static int code(const DlTensor& t) {
    enum { integer = 0, natural = 1, floating = 2, brain = 4, boolean = 6 };
    if (t.lanes != 1) return -1;
    switch (t.type << 8 | t.bits) {
      case floating << 8 | 32: return 0;
      case floating << 8 | 64: return 1;
      case floating << 8 | 16: return 2;
      case brain << 8 | 16: return 3;
      case integer << 8 | 8: return 4;
      case natural << 8 | 8: return 5;
      case integer << 8 | 32: return 6;
      case integer << 8 | 64: return 7;
      case boolean << 8 | 8: return 8;
      case integer << 8 | 16: return 9;
    }
    return -1;
  }

  // Of what DLPack does not tell: it is not negated lazily, and lies in its storage. See Note [asked once].
  bool trusted(PyObject* tensor, const Plain& seen) {
    Asked& asked = asked_[reinterpret_cast<std::uintptr_t>(tensor) / 16 % kAsked];
    const bool known = asked.tensor == tensor && asked.data == seen.data && seen.bytes <= asked.bytes;
    const bool maybe_imaginary = seen.elements == 1 && seen.dtype <= 2;
    if (known && !maybe_imaginary) return true;
    const bool is = !negated(tensor) && (known || stored(tensor, seen));
    asked = is ? Asked{tensor, seen.data, seen.bytes} : Asked{};
    return is;
  }

  static bool negated(PyObject* tensor) {
    static PyObject* const method = method_of(tensor, "is_neg");
    PyObject* const answer = PyObject_Vectorcall(method, &tensor, 1, nullptr);
    const bool is = answer != Py_False;
    Py_XDECREF(answer);
    PyErr_Clear();
    return is;
  }

  // Whether all its elements are in memory: its storage may have been freed or cut, or be none.
  static bool stored(PyObject* tensor, const Plain& seen) {
    static PyObject* const method = method_of(tensor, "untyped_storage");
    PyObject* const storage = PyObject_Vectorcall(method, &tensor, 1, nullptr);
    const auto base = number(storage, "data_ptr"), size = number(storage, "nbytes");
    Py_XDECREF(storage);
    PyErr_Clear();
    const auto at = reinterpret_cast<std::uintptr_t>(seen.data);
    return base != 0 && base <= at && at + seen.bytes <= base + size;
  }

  // What the method gives; 0 if it raises.
  static std::size_t number(PyObject* object, const char* method) {
    PyObject* const answer = object ? PyObject_CallMethod(object, method, nullptr) : nullptr;
    const auto number = answer ? PyLong_AsSize_t(answer) : 0;
    Py_XDECREF(answer);
    PyErr_Clear();
    return number;
  }

  // Not bound, so that it is looked up once; both classes have torch.Tensor's.
  static PyObject* method_of(PyObject* tensor, const char* name) {
    return PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(tensor)), name);
  }

  const DlExchange* exchange_;
  const PyObject *tensor_, *parameter_;  // which torch keeps alive
  std::array<Asked, kAsked> asked_{};
  std::vector<std::int64_t> numbers_;  // of `seen`
};

}  // namespace ringdp
