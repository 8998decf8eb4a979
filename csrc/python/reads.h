#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/load_session.h"
#include "index/checkpoint_index.h"
#include "index/name_table.h"
#include "python/options.h"
#include "python/types.h"

namespace torch_ckpt::python {

/// An object to read. `target` is for the caller: where the object belongs.
struct ObjectRead {
  std::string name;
  std::string file;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  Typed<"typing.Any"> target;
};

/// The CheckpointIndex that has the checksum tables, or a dict from file names to tables.
using Tables = Typed<"torch_ckpt._core.CheckpointIndex | dict[str, bytes]">;
using Number = Typed<"int">;

/// Converts an offset or length from the metadata, which may be damaged or malicious.
inline std::uint64_t number_of(const Number& value, const std::string& name, const char* what) {
  const std::uint64_t number =
      PyLong_Check(value.ptr()) ? PyLong_AsUnsignedLongLong(value.ptr()) : std::uint64_t(-1);
  if (number != std::uint64_t(-1)) return number;
  PyErr_Clear();
  throw Failure(format_error(Errc::range_past_end, name + ": the metadata has an invalid " + what +
                                                       ": " +
                                                       pybind11::repr(value).cast<std::string>()));
}

/// Returns the files with their checksum tables.
inline std::vector<engine::LoadFile> files_with_tables(const index::NameTable& names,
                                                       const Tables& tables) {
  std::vector<engine::LoadFile> files;
  for (std::size_t i = 0; i < names.size(); ++i) files.push_back({std::string(names.at(i)), {}});
  if (pybind11::isinstance<pybind11::dict>(tables)) {
    const auto known = tables.cast<pybind11::dict>();
    for (engine::LoadFile& file : files) {
      const pybind11::str name = text_of(file.name);
      if (known.contains(name)) file.checksum_table = known[name].cast<std::string>();
    }
    return files;
  }
  const auto& index = tables.cast<const index::CheckpointIndex&>();
  for (std::size_t i = 0; i < index.files().size(); ++i) {
    if (const auto number = names.find(index.text(index.files()[i]))) {
      files[*number].checksum_table = index.text(index.tables()[i]);
      files[*number].is_bare = index.is_bare();
    }
  }
  return files;
}

inline engine::LoadOptions load_options(const ReadOptions& options, const Events& ready = {}) {
  auto load = read_options<engine::LoadOptions>(options);
  load.verify = options.attr("verify").cast<bool>();
  load.ready = ready_events(ready);
  unwrap(load.check());
  return load;
}

}  // namespace torch_ckpt::python
