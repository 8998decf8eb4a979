#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/store.h"
#include "os/directory.h"
#include "python/errors.h"

namespace torch_ckpt::python {

/// Converts a _core.Directory or a _core.Store.
inline engine::Folder folder_of(const pybind11::object& object) {
  if (pybind11::isinstance<engine::Store>(object)) {
    return object.cast<std::shared_ptr<engine::Store>>();
  }
  return unwrap(object.cast<const os::Directory&>().duplicate());
}

}  // namespace torch_ckpt::python
