#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <optional>
#include <span>

#include "python/text.h"

namespace torch_ckpt::python {

/// Exports the buffer of a Python object: its memory stays valid and does not move for the lifetime
/// of this object. Refuses strided memory unless `flags` allow it.
class Memory {
 public:
  explicit Memory(pybind11::handle object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw pybind11::error_already_set();
  }
  ~Memory() { PyBuffer_Release(&view_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  bool is_contiguous() const { return PyBuffer_IsContiguous(&view_, 'C') != 0; }
  std::span<const std::byte> bytes() const { return writable_bytes(); }
  /// Requires that `flags` include PyBUF_WRITABLE.
  std::span<std::byte> writable_bytes() const {
    return {static_cast<std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

/// An argument with a contiguous buffer that the function writes to.
using Writable = Typed<"typing_extensions.Buffer">;

}  // namespace torch_ckpt::python

/// Converts an argument with a contiguous buffer, without copying it.
template <>
struct pybind11::detail::type_caster<std::span<const std::byte>> {
  template <class>
  using cast_op_type = std::span<const std::byte>;
  static constexpr auto name = const_name("typing_extensions.Buffer");

  bool load(handle object, bool) {
    memory.emplace(object);
    return true;
  }
  operator std::span<const std::byte>() const { return memory->bytes(); }

  std::optional<torch_ckpt::python::Memory> memory;
};
