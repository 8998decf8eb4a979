#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/store.h"
#include "os/directory.h"
#include "python/errors.h"

namespace torch_ckpt::python {

/// Converts a _core.Directory, or an object whose attribute `files` is a _core.Store.
inline engine::Folder folder_of(const pybind11::object& object) {
  if (pybind11::isinstance<os::Directory>(object)) {
    return unwrap(object.cast<const os::Directory&>().duplicate());
  }
  return object.attr("files").cast<std::shared_ptr<engine::Store>>();
}

}  // namespace torch_ckpt::python
