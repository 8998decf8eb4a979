#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <optional>
#include <span>
#include <type_traits>

#include "python/types.h"

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

/// An object with a contiguous buffer.
using Buffer = Typed<"typing_extensions.Buffer">;

}  // namespace torch_ckpt::python

namespace pybind11::detail {

/// Converts an argument with a contiguous buffer, without copying it.
template <class Byte>
struct buffer_caster {
  template <class>
  using cast_op_type = std::span<Byte>;
  static constexpr auto name = const_name("typing_extensions.Buffer");

  bool load(handle object, bool) {
    memory.emplace(object, std::is_const_v<Byte> ? PyBUF_SIMPLE : PyBUF_WRITABLE);
    return true;
  }
  operator std::span<Byte>() const { return memory->writable_bytes(); }

  std::optional<torch_ckpt::python::Memory> memory;
};

template <>
struct type_caster<std::span<const std::byte>> : buffer_caster<const std::byte> {};
template <>
struct type_caster<std::span<std::byte>> : buffer_caster<std::byte> {};

}  // namespace pybind11::detail
