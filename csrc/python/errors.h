#pragma once

#include <pybind11/pybind11.h>

#include "directory/publish.h"
#include "error.h"

namespace torch_ckpt::python {

/// Throws the Python exception that stands for `error` (the table is in docs/design.md). `subject`,
/// where given, names the item that it happened to.
[[noreturn]] void raise(const Error& error, const std::string& subject = {});
[[noreturn]] void raise(const directory::PublishOutcome& outcome);

/// A path or a text with paths in it, whose bytes need not be UTF-8; as os.fsdecode.
pybind11::str os_text(const std::string& bytes);

/// Tells what the engine warns of.
void pass_on_warnings();

template <class T>
T unwrap(Result<T> result, const std::string& subject = {}) {
  if (!result) raise(result.error(), subject);
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

}  // namespace torch_ckpt::python
