// Reads a tensor's memory in one call and without torch's ABI, through the table of functions that tensor
// classes carry by DLPack 1.3 (its "C exchange API").
//
// Source: https://dmlc.github.io/dlpack/latest/python_spec.html
//
// Note [checked once]
//   Checking whether a tensor is lazily negated took 0.1 us of 0.8, since torch releases the GIL for it. So
//   each tensor is checked once. A later tensor object with the same address and memory is not checked. That
//   is safe, because torch negates only the imaginary part of a complex tensor, of whose elements no two are
//   adjacent (unless as_strided says so), and a tensor that is like that is always checked: one element, or
//   rows of one. A storage is not checked again either: if it is resized, it moves. Undetected is a storage
//   that is freed and remade, shorter and by chance in its old place, with no call in between.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace ringdp {

namespace nb = nanobind;

// DLPack's structs, as far as they are used.
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
  int (*view)(PyObject*, DlTensor*);  // these return 0, or -1 and a Python error
  int (*stream)(std::int32_t device, std::int32_t device_number, void** stream);
};

// The buffer of a plain tensor: on the CPU, contiguous, of a real dtype.
struct Plain {
  std::byte* data;
  int dtype;  // the order of transport.base.DTYPES
  int dimensions;
  std::int64_t elements;
  std::size_t bytes;
};

// The same for a matrix whose rows are contiguous, maybe with gaps between them.
struct PlainRows {
  std::byte* data;
  int dtype;
  std::int64_t rows, elements, stride;  // of a row; from row to row, in elements
};

class Tensors {
 public:
  // `table`: the capsule that the tensor class carries. Only tensors of exactly these two classes are read.
  // `checked`: how many are remembered, a power of two; one may replace another earlier.
  Tensors(nb::handle table, nb::handle tensor, nb::handle parameter, std::size_t checked = 64)
      : exchange_(static_cast<const DlExchange*>(PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api"))),
        tensor_(tensor), parameter_(parameter), checked_(checked) {
    while (exchange_ && exchange_->version.major > 1) exchange_ = exchange_->older;
    PyErr_Clear();
  }

  // Returns the buffer of a plain tensor, else nothing. Python flattens other tensors, slowly.
  std::optional<Plain> plain(nb::handle object) {
    const auto seen = viewed(object);
    if (!seen || seen->device != kCpu || code(*seen) < 0) return std::nullopt;
    std::int64_t elements = 1;
    for (int d = seen->dimensions - 1; d >= 0; --d) {
      if (seen->shape[d] != 1 && seen->strides && seen->strides[d] != elements) return std::nullopt;
      elements *= seen->shape[d];
    }
    auto* data = static_cast<std::byte*>(seen->data) + seen->byte_offset;
    const Plain found{data, code(*seen), seen->dimensions, elements, std::size_t(elements) * seen->bits / 8};
    if (elements && !trusted(object, found, maybe_imaginary(*seen))) return std::nullopt;
    return found;
  }

  std::optional<PlainRows> plain_rows(nb::handle object) {
    const auto seen = viewed(object);
    if (!seen || seen->device != kCpu || code(*seen) < 0 || seen->dimensions != 2) return std::nullopt;
    const auto rows = seen->shape[0], elements = seen->shape[1];
    const auto stride = rows > 1 && seen->strides ? seen->strides[0] : elements;
    if ((elements > 1 && seen->strides && seen->strides[1] != 1) || stride < elements) return std::nullopt;
    auto* data = static_cast<std::byte*>(seen->data) + seen->byte_offset;
    const auto all = rows && elements ? (rows - 1) * stride + elements : 0;
    const Plain whole{data, code(*seen), 2, all, std::size_t(all) * seen->bits / 8};
    if (all && !trusted(object, whole, maybe_imaginary(*seen))) return std::nullopt;
    return PlainRows{data, code(*seen), rows, elements, stride};
  }

  // Appends numbers that are equal if and only if all tensors' memory, layouts, dtypes, devices, `offsets`
  // (or None) and the last tensor's current stream are; that is the last number. Returns false if a tensor
  // is of another class, or lazily negated.
  bool describe(nb::list tensors, nb::handle offsets, std::vector<std::int64_t>& numbers) {
    DlTensor last{};
    numbers.push_back(std::int64_t(nb::len(tensors)));
    for (nb::handle tensor : tensors) {
      const auto found = viewed(tensor);
      if (!found || !found->strides || (maybe_imaginary(*found) && negated(tensor))) return false;
      last = *found;
      numbers.push_back(reinterpret_cast<std::intptr_t>(last.data) + std::int64_t(last.byte_offset));
      numbers.push_back(std::int64_t(last.type) << 56 | std::int64_t(last.bits) << 48 |
                        std::int64_t(last.dimensions) << 32 | std::int64_t(last.device) << 16 |
                        last.device_number);
      numbers.insert(numbers.end(), last.shape, last.shape + last.dimensions);
      numbers.insert(numbers.end(), last.strides, last.strides + last.dimensions);
    }
    if (!offsets.is_none()) {
      for (nb::handle offset : nb::borrow<nb::sequence>(offsets)) {
        std::int64_t number;
        if (!nb::try_cast(offset, number)) return false;
        numbers.push_back(number);
      }
    }
    void* stream = nullptr;
    if (!exchange_ || exchange_->stream(last.device, last.device_number, &stream) != 0) {
      PyErr_Clear();
      return false;
    }
    numbers.push_back(reinterpret_cast<std::intptr_t>(stream));
    return true;
  }

 private:
  // Returns nothing if the object is of another class.
  std::optional<DlTensor> viewed(nb::handle object) {
    if (!exchange_ || !(object.type().is(tensor_) || object.type().is(parameter_))) return std::nullopt;
    DlTensor seen;
    if (exchange_->view(object.ptr(), &seen) != 0) {
      PyErr_Clear();
      return std::nullopt;
    }
    return seen;
  }

  struct Checked {
    nb::handle tensor;
    const std::byte* data;
    std::size_t bytes;
  };
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

  // Returns whether it may be the imaginary part of a complex tensor: no two of its elements are adjacent.
  static bool maybe_imaginary(const DlTensor& t) {
    if (code(t) < 0 || code(t) > 2) return false;
    for (int d = 0; d < t.dimensions; ++d)
      if (t.shape[d] > 1 && (!t.strides || t.strides[d] == 1)) return false;
    return true;
  }

  static bool negated(nb::handle tensor) { return nb::cast<bool>(tensor.attr("is_neg")()); }

  // Checks what DLPack does not say: the tensor is not lazily negated and lies inside its storage. See
  // Note [checked once].
  bool trusted(nb::handle tensor, const Plain& seen, bool maybe_imaginary) {
    const auto hash = reinterpret_cast<std::uintptr_t>(tensor.ptr()) * 0x9e3779b97f4a7c15 >> 32;
    Checked& checked = checked_[hash & (checked_.size() - 1)];
    const bool known = checked.tensor.is(tensor) && checked.data == seen.data && seen.bytes <= checked.bytes;
    if (known && !maybe_imaginary) return true;
    bool is = false;
    try {
      is = !negated(tensor) && (known || stored(tensor, seen));
    } catch (const std::exception&) {  // it has no storage
    }
    checked = is ? Checked{tensor, seen.data, seen.bytes} : Checked{};
    return is;
  }

  // Returns whether all elements lie in the storage, which may have been freed or shrunk.
  static bool stored(nb::handle tensor, const Plain& seen) {
    const auto storage = tensor.attr("untyped_storage")();
    const auto base = nb::cast<std::uintptr_t>(storage.attr("data_ptr")());
    const auto at = reinterpret_cast<std::uintptr_t>(seen.data);
    const auto bytes = nb::cast<std::size_t>(storage.attr("nbytes")());
    return base != 0 && base <= at && at + seen.bytes <= base + bytes;
  }

  const DlExchange* exchange_;
  nb::handle tensor_, parameter_;  // torch keeps them alive
  std::vector<Checked> checked_;
};

}  // namespace ringdp
