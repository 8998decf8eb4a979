#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "index/checkpoint_index.h"
#include "index/metadata_pickle.h"
#include "index/metadata_seal.h"
#include "planning/tiling.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/memory.h"
#include "python/text.h"
#include "torch/flat_state.h"
#include "torch/load_match.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using index::CheckpointIndex;
using tensors::FlatState;
using tensors::LoadMatch;
using tensors::PythonRef;
using tensors::SizeRule;

/// A metadata pickle that has turned out to be harmless, and its bytes.
class MetadataProgram {
 public:
  /// `roles` are by "module name".
  MetadataProgram(py::object data, const std::map<std::string, std::string>& roles)
      : data_(std::move(data)), bytes_(data_) {
    index::Globals allowed;
    for (const auto& [name, word] : roles) {
      const auto role = index::role_named(word);
      if (!role) throw py::value_error(name + ": '" + word + "' is not a role");
      allowed.emplace(name, *role);
    }
    values_ = without_gil([&] { return index::walk_metadata_pickle(bytes_.bytes(), allowed); });
  }

  std::size_t end() const { return values_.end; }
  Result<CheckpointIndex> index() const { return CheckpointIndex::of(values_); }

 private:
  py::object data_;
  Memory bytes_;
  index::PickleValues values_;
};

template <class Values, class Make>
py::list list_of(const Values& values, Make make) {
  py::list made(values.size());
  std::size_t i = 0;
  for (const auto& value : values) made[i++] = make(value);
  return made;
}

py::object object_of(PythonRef object) {
  return py::reinterpret_steal<py::object>(object.release());
}

// --- index ---------------------------------------------------------------------------------------

const CheckpointIndex::Entry* entry_of(const CheckpointIndex& index, const py::str& name) {
  const auto number = index.find(bytes_of(name));
  return number ? &index.entries()[*number] : nullptr;
}

/// Offsets, sizes, file, offset and length there, and whether a transform was at work.
py::tuple shard_of(const CheckpointIndex& index, const CheckpointIndex::Shard& shard) {
  const auto extents = [&](std::uint32_t id) {
    return id == CheckpointIndex::kNone ? py::tuple() : tuple_of(index.extents(id));
  };
  const py::object file = shard.file == CheckpointIndex::kNone
                              ? py::object(py::none())
                              : text_of(index.text(index.files()[shard.file]));
  return py::make_tuple(extents(shard.offsets), extents(shard.sizes), file, shard.offset,
                        shard.length, shard.is_transformed);
}

py::list shards_of(const CheckpointIndex& index, const py::str& name) {
  const CheckpointIndex::Entry* entry = entry_of(index, name);
  if (entry == nullptr) throw py::key_error(bytes_of(name));
  return list_of(index.shards(*entry), [&](const auto& shard) { return shard_of(index, shard); });
}

/// Names and shards of records that the metadata does not describe.
py::list strays_of(const CheckpointIndex& index) {
  // Any number of strays may share one long name.
  std::map<std::uint64_t, py::object> names;
  return list_of(index.strays(), [&](const CheckpointIndex::Stray& stray) {
    py::object& name = names[stray.name.at];
    if (!name) name = text_of(index.text(stray.name));
    return py::make_tuple(name, shard_of(index, stray.shard));
  });
}

py::list files_of(const CheckpointIndex& index) {
  return list_of(index.files(), [&](auto file) { return text_of(index.text(file)); });
}

/// The name of a tensor's dtype, and its size; None of what is not one.
py::object tensor_of(const CheckpointIndex& index, const py::str& name) {
  const CheckpointIndex::Entry* entry = entry_of(index, name);
  if (entry == nullptr || !entry->is_tensor) return py::none();
  return py::make_tuple(index.dtypes()[entry->dtype], tuple_of(index.extents(entry->size)));
}

/// The encoded checksum tables by file, of those that have one.
py::dict tables_of(const CheckpointIndex& index) {
  py::dict tables;
  for (std::size_t i = 0; i < index.files().size(); ++i) {
    const std::string_view table = index.text(index.tables()[i]);
    if (!table.empty()) tables[text_of(index.text(index.files()[i]))] = py::bytes(table);
  }
  return tables;
}

// --- state dict ----------------------------------------------------------------------------------

const FlatState::Row& row_of(const FlatState& state, std::size_t number) {
  if (number >= state.size()) throw py::index_error("no row of that number");
  return state.row(number);
}

// --- both ----------------------------------------------------------------------------------------

LoadMatch::Status status_named(const std::string& word) {
  if (word == "loaded") return LoadMatch::Status::loaded;
  if (word == "missing") return LoadMatch::Status::missing;
  if (word == "shape") return LoadMatch::Status::shape;
  if (word == "kind") return LoadMatch::Status::kind;
  if (word == "skipped") return LoadMatch::Status::skipped;
  throw py::value_error("'" + word + "' is not a status");
}

SizeRule rule_named(const std::string& word) {
  if (word == "same") return SizeRule::same;
  if (word == "growing") return SizeRule::growing;
  if (word == "any") return SizeRule::any;
  throw py::value_error("'" + word + "' is not a rule for sizes");
}

/// Names, stored and wanted sizes of tensors that differ in them, of those of a status.
py::list other_sizes(const LoadMatch& match, const std::string& status) {
  py::list found;
  for (const std::size_t row : match.with(status_named(status))) {
    const CheckpointIndex::Entry* entry = match.tensor(row);
    if (entry == nullptr) continue;
    const auto stored = match.index().extents(entry->size);
    const auto wanted = match.state().extents().at(match.state().row(row).size);
    if (std::ranges::equal(stored, wanted)) continue;
    found.append(
        py::make_tuple(text_of(match.state().name(row)), tuple_of(stored), tuple_of(wanted)));
  }
  return found;
}

/// Names, stored and wanted dtypes of tensors that differ in them.
py::list other_dtypes(const LoadMatch& match) {
  py::list found;
  for (std::size_t row = 0; row < match.state().size(); ++row) {
    const CheckpointIndex::Entry* entry = match.tensor(row);
    if (entry == nullptr || match.status(row) == LoadMatch::Status::skipped) continue;
    const at::ScalarType wanted = match.state().row(row).local.scalar_type();
    const auto stored = match.dtype(*entry);
    if (!stored || *stored == wanted) continue;
    found.append(py::make_tuple(text_of(match.state().name(row)), *stored, wanted));
  }
  return found;
}

py::list names_of(const FlatState& state, const std::vector<std::size_t>& rows) {
  return list_of(rows, [&](std::size_t row) { return text_of(state.name(row)); });
}

/// What torch_ckpt.loading.reading.Row has of a target.
py::tuple row_of(const LoadMatch& match, std::size_t number) {
  if (number >= match.targets().size()) throw py::index_error("no target of that number");
  const tensors::TensorTarget& target = match.targets()[number];
  const auto numbers = [](const tensors::Extents& extents) {
    return tuple_of(tensors::signed_of(extents));
  };
  return py::make_tuple(text_of(target.name), target.file, target.offset, target.length,
                        target.scalar_type, numbers(target.sizes), numbers(target.region_offsets),
                        numbers(target.region_lengths), target.tensor);
}

py::list rows_of(const LoadMatch& match) {
  py::list rows(match.targets().size());
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = row_of(match, i);
  return rows;
}

/// Names, stored and wanted dtypes of the targets that differ in them.
py::list conversions_of(const LoadMatch& match) {
  py::list found;
  for (const tensors::TensorTarget& target : match.targets()) {
    if (target.scalar_type == target.tensor.scalar_type()) continue;
    found.append(
        py::make_tuple(text_of(target.name), target.scalar_type, target.tensor.scalar_type()));
  }
  return found;
}

/// The numbers of the CUDA devices of the targets.
std::set<int> devices_of(const LoadMatch& match) {
  std::set<int> devices;
  for (const tensors::TensorTarget& target : match.targets()) {
    if (target.tensor.is_cuda()) devices.insert(target.tensor.get_device());
  }
  return devices;
}

/// Of all targets, as stored.
std::uint64_t bytes_of(const LoadMatch& match) {
  std::uint64_t bytes = 0;
  for (const tensors::TensorTarget& target : match.targets()) {
    bytes += target.region_bytes(c10::elementSize(target.scalar_type));
  }
  return bytes;
}

}  // namespace

void bind_index(py::module_& module) {
  module.attr("SEAL_BYTES") = index::kSealBytes;
  module.def(
      "bytes_sealed",
      [](std::span<const std::byte> file) {
        const ReleasedGil released;
        return index::bytes_sealed(file);
      },
      py::arg("file"));
  module.def(
      "seal_of",
      [](std::string_view pickled) { return py::bytes(index::seal_of(std::span(&pickled, 1))); },
      py::arg("pickled"));
  module.def(
      "tile",
      [](const std::vector<std::int64_t>& whole,
         const std::vector<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>>& of) {
        std::vector<planning::Box> boxes;
        for (const auto& [offsets, sizes] : of) boxes.push_back({offsets, sizes});
        return planning::tile(whole, boxes);
      },
      py::arg("whole"), py::arg("boxes"));

  py::class_<MetadataProgram>(module, "MetadataProgram")
      .def(py::init<py::object, const std::map<std::string, std::string>&>(), py::arg("data"),
           py::arg("roles"))
      .def_property_readonly("end", &MetadataProgram::end)
      .def("index", &MetadataProgram::index, NoGil());

  py::class_<CheckpointIndex>(module, "CheckpointIndex")
      .def("__len__", [](const CheckpointIndex& index) { return index.entries().size(); })
      .def("__contains__",
           [](const CheckpointIndex& index, const py::str& name) {
             return index.find(bytes_of(name)).has_value();
           })
      .def("names",
           [](const CheckpointIndex& index) {
             py::list names(index.entries().size());
             for (std::size_t i = 0; i < names.size(); ++i) names[i] = text_of(index.name(i));
             return names;
           })
      .def("files", &files_of)
      .def("tensor", &tensor_of, py::arg("name"))
      .def("shards", &shards_of, py::arg("name"))
      .def("strays", &strays_of)
      .def("uncovered",
           [](const CheckpointIndex& index) {
             return list_of(planning::uncovered(index),
                            [&](std::uint32_t entry) { return text_of(index.name(entry)); });
           })
      .def("tables", &tables_of)
      .def("phases", [](const CheckpointIndex& index) { return text_of(index.phases()); })
      .def(
          "rename",
          [](CheckpointIndex& index, const std::vector<py::str>& names) {
            std::vector<std::string> texts;
            for (const py::str& name : names) texts.push_back(bytes_of(name));
            unwrap(index.rename(texts));
          },
          py::arg("names"));

  py::class_<FlatState>(module, "FlatState")
      .def(py::init([](const py::object& state_dict, const py::object& chunks_here) {
             return std::make_unique<FlatState>(state_dict.ptr(), chunks_here.ptr());
           }),
           py::arg("state_dict"), py::arg("chunks_here"))
      .def("__len__", &FlatState::size)
      .def("names",
           [](const FlatState& state) {
             py::list names(state.size());
             for (std::size_t i = 0; i < state.size(); ++i) names[i] = text_of(state.name(i));
             return names;
           })
      .def(
          "name",
          [](const FlatState& state, std::size_t row) {
            row_of(state, row);
            return text_of(state.name(row));
          },
          py::arg("row"))
      .def(
          "value",
          [](const FlatState& state, std::size_t row) {
            return py::reinterpret_borrow<py::object>(row_of(state, row).value.get());
          },
          py::arg("row"))
      .def(
          "path",
          [](const FlatState& state, std::size_t row) {
            return object_of(state.path(row_of(state, row)));
          },
          py::arg("row"))
      .def("others",
           [](const FlatState& state) {
             py::list rows;
             for (std::size_t i = 0; i < state.size(); ++i) {
               const FlatState::Row& row = state.row(i);
               if (row.kind == FlatState::Kind::other && !row.is_removed) rows.append(i);
             }
             return rows;
           })
      .def("plain",
           [](const FlatState& state) {
             py::list values;
             for (std::size_t i = 0; i < state.size(); ++i) {
               const FlatState::Row& row = state.row(i);
               if (row.kind == FlatState::Kind::plain) {
                 values.append(py::reinterpret_borrow<py::object>(row.value.get()));
               }
             }
             return values;
           })
      .def("on_meta",
           [](const FlatState& state) {
             py::list rows;
             for (std::size_t i = 0; i < state.size(); ++i) {
               const FlatState::Row& row = state.row(i);
               if (row.local.defined() && row.local.is_meta()) rows.append(i);
             }
             return rows;
           })
      .def(
          "is_object",
          [](const FlatState& state, std::size_t row) {
            return state.is_object(row_of(state, row));
          },
          py::arg("row"))
      .def(
          "add",
          [](FlatState& state, const py::str& name, const py::tuple& path,
             const py::object& value) { state.add(bytes_of(name), path.ptr(), value.ptr()); },
          py::arg("name"), py::arg("path"), py::arg("value"))
      .def(
          "remove",
          [](FlatState& state, std::size_t row) {
            row_of(state, row);
            state.remove(row);
          },
          py::arg("row"))
      .def(
          "replace",
          [](FlatState& state, std::size_t row, const py::object& value) {
            row_of(state, row);
            state.replace(row, value.ptr());
          },
          py::arg("row"), py::arg("value"));

  py::class_<LoadMatch>(module, "LoadMatch")
      .def(py::init([](const FlatState& state, const CheckpointIndex& index,
                       const std::string& rule, const std::vector<bool>& chosen) {
             if (!chosen.empty() && chosen.size() != state.size()) {
               throw py::value_error("there are as many choices as rows, or none");
             }
             return std::make_unique<LoadMatch>(state, index, rule_named(rule), chosen);
           }),
           py::arg("state"), py::arg("index"), py::arg("rule"), py::arg("chosen"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def(
          "rows_with",
          [](const LoadMatch& match, const std::string& status) {
            return match.with(status_named(status));
          },
          py::arg("status"))
      .def(
          "names_with",
          [](const LoadMatch& match, const std::string& status) {
            return names_of(match.state(), match.with(status_named(status)));
          },
          py::arg("status"))
      .def("pending", [](const LoadMatch& match) { return match.with(LoadMatch::Status::pending); })
      .def(
          "set_status",
          [](LoadMatch& match, std::size_t row, const std::string& status) {
            row_of(match.state(), row);
            match.set_status(row, status_named(status));
          },
          py::arg("row"), py::arg("status"))
      .def("other_sizes", &other_sizes, py::arg("status"))
      .def("other_dtypes", &other_dtypes)
      .def("absent",
           [](const LoadMatch& match) {
             return list_of(match.absent(), [&](std::uint32_t key) {
               return text_of(match.state().keys().at(key));
             });
           })
      .def("unexpected",
           [](const LoadMatch& match) {
             return list_of(match.unexpected(), [&](std::uint32_t entry) {
               return text_of(match.index().name(entry));
             });
           })
      .def("keys",
           [](const LoadMatch& match) {
             return list_of(match.keys(), [&](std::uint32_t key) {
               return text_of(match.state().keys().at(key));
             });
           })
      .def("files",
           [](const LoadMatch& match) {
             return list_of(match.files(), [&](std::uint32_t file) {
               return text_of(match.index().text(match.index().files()[file]));
             });
           })
      .def("plan", &LoadMatch::plan)
      .def("row", py::overload_cast<const LoadMatch&, std::size_t>(&row_of), py::arg("target"))
      .def("rows", &rows_of)
      .def("conversions", &conversions_of)
      .def("cuda_devices", &devices_of)
      .def_property_readonly("bytes", py::overload_cast<const LoadMatch&>(&bytes_of));
}

}  // namespace torch_ckpt::python
