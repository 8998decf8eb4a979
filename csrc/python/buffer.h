#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <span>

namespace torch_ckpt::python {

/// The memory of an object, which stays where it is as long as this lives.
class Memory {
 public:
  explicit Memory(const pybind11::buffer& object) {
    // Strided memory is refused.
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0)
      throw pybind11::error_already_set();
  }
  ~Memory() { PyBuffer_Release(&view_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

}  // namespace torch_ckpt::python
