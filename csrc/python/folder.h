#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <utility>

#include "engine/store.h"
#include "os/directory.h"
#include "python/errors.h"

/// Converts a _core.Directory, or an object whose attribute `files` is a _core.Store.
template <>
struct pybind11::detail::type_caster<torch_ckpt::engine::Folder> {
  using Folder = torch_ckpt::engine::Folder;
  using Directory = torch_ckpt::os::Directory;
  template <class>
  using cast_op_type = Folder&&;
  static constexpr auto name =
      const_name("torch_ckpt._core.Directory | torch_ckpt._base.in_store.InStore");

  bool load(handle object, bool) {
    if (isinstance<Directory>(object)) {
      value.emplace(object.cast<const Directory&>().duplicate().value());
    } else {
      value.emplace(object.attr("files").cast<std::shared_ptr<torch_ckpt::engine::Store>>());
    }
    return true;
  }
  operator Folder&&() { return std::move(*value); }

  std::optional<Folder> value;
};
