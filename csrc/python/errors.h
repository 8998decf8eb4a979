#pragma once

#include <pybind11/pybind11.h>

#include <type_traits>
#include <utility>

#include "directory/publish.h"
#include "error.h"

namespace torch_ckpt::python {

/// Registers the conversion of Failure to Python exceptions (docs/design.md has the table).
void bind_errors();
[[noreturn]] void raise(const directory::PublishOutcome& outcome);

/// Decodes a path, or a text that contains paths, like os.fsdecode: the bytes need not be UTF-8.
pybind11::str os_text(const std::string& bytes);

/// Issues the engine's pending warnings as Python warnings.
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

/// Converts a Result that a bound function returns: returns its value or raises its error.
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
