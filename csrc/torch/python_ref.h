#pragma once

#include <Python.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace torch_ckpt::tensors {

/// An owned reference to a Python object, or nullptr. The GIL must be held to create or destroy it.
class PythonRef {
 public:
  PythonRef() = default;
  /// Takes ownership of a reference.
  explicit PythonRef(PyObject* object) : object_(object) {}
  static PythonRef to(PyObject* object) {
    Py_XINCREF(object);
    return PythonRef(object);
  }
  PythonRef(PythonRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PythonRef& operator=(PythonRef&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~PythonRef() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

/// Reads a tuple of sizes or offsets. Returns false if `tuple` is not a tuple of integers.
inline bool numbers_of(PyObject* tuple, std::vector<std::int64_t>& numbers) {
  numbers.clear();
  if (!PyTuple_Check(tuple)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    const std::int64_t number = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    if (number == -1 && PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    numbers.push_back(number);
  }
  return true;
}

}  // namespace torch_ckpt::tensors
