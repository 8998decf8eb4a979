#pragma once

#include <pybind11/pybind11.h>

#include <type_traits>
#include <utility>

#include "directory/publish.h"
#include "error.h"

namespace torch_ckpt::python {

/// Makes Failure the Python exception that stands for its error (the table is in docs/design.md).
void bind_errors();
[[noreturn]] void raise(const directory::PublishOutcome& outcome);

/// A path or a text with paths in it, whose bytes need not be UTF-8; as os.fsdecode.
pybind11::str os_text(const std::string& bytes);

/// Tells what the engine warns of.
void pass_on_warnings();

template <class T>
T unwrap(Result<T> result) {
  return std::move(result).value();
}
template <class T>
T unwrap(T value) {
  return value;
}

}  // namespace torch_ckpt::python

/// A function that returns a Result returns its value in Python, or raises its error.
template <class T>
struct pybind11::detail::type_caster<torch_ckpt::Result<T>> {
  using Value = make_caster<std::conditional_t<std::is_void_v<T>, void_type, T>>;
  static constexpr auto name = Value::name;

  static handle cast(torch_ckpt::Result<T> result, return_value_policy, handle parent) {
    if constexpr (std::is_void_v<T>) {
      result.value();
      return none().release();
    } else {
      return Value::cast(std::move(result).value(), return_value_policy::move, parent);
    }
  }
};
