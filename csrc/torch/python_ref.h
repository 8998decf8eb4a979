#pragma once

#include <Python.h>

#include <utility>

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

}  // namespace torch_ckpt::tensors
