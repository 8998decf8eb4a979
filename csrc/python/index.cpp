#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/safetensors_files.h"
#include "format/dtype.h"
#include "format/safetensors.h"
#include "index/allowed_globals.h"
#include "index/checkpoint_index.h"
#include "index/encoded_metadata.h"
#include "index/metadata_pickle.h"
#include "index/metadata_seal.h"
#include "planning/tiling.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/folder.h"
#include "python/gil.h"
#include "python/interrupts.h"
#include "python/list.h"
#include "python/memory.h"
#include "python/text.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using index::CheckpointIndex;
using index::EncodedMetadata;

const CheckpointIndex::Entry* entry_of(const CheckpointIndex& index, const py::str& name) {
  const auto number = index.find(bytes_of(name));
  return number ? &index.entries()[*number] : nullptr;
}

/// Returns (offsets, sizes, file, offset in the file, length, is_transformed).
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

/// Returns the name and shard of each record that the metadata does not describe.
py::list undescribed_records_of(const CheckpointIndex& index) {
  // Create one string per name, because many records may share a long name.
  std::map<std::uint64_t, py::object> names;
  return list_of(index.undescribed_records(),
                 [&](const CheckpointIndex::UndescribedRecord& record) {
                   py::object& name = names[record.name.at];
                   if (!name) name = text_of(index.text(record.name));
                   return py::make_tuple(name, shard_of(index, record.shard));
                 });
}

py::list files_of(const CheckpointIndex& index) {
  return list_of(index.files(), [&](auto file) { return text_of(index.text(file)); });
}

/// Returns a tensor's dtype name and size, or None if the entry is not a tensor.
py::object tensor_of(const CheckpointIndex& index, const py::str& name) {
  const CheckpointIndex::Entry* entry = entry_of(index, name);
  if (entry == nullptr || !entry->is_tensor) return py::none();
  return py::make_tuple(index.dtypes()[entry->dtype], tuple_of(index.extents(entry->size)));
}

/// Returns the encoded checksum tables by file name, for files that have a table.
py::dict tables_of(const CheckpointIndex& index) {
  py::dict tables;
  for (std::size_t i = 0; i < index.files().size(); ++i) {
    const std::string_view table = index.text(index.tables()[i]);
    if (!table.empty()) tables[text_of(index.text(index.files()[i]))] = py::bytes(table);
  }
  return tables;
}

py::bytes contents_of(const EncodedMetadata& metadata) {
  auto contents = py::reinterpret_steal<py::bytes>(
      PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(metadata.bytes())));
  if (!contents) throw py::error_already_set();
  char* out = PyBytes_AS_STRING(contents.ptr());
  const ReleasedGil released;
  for (const std::string_view piece : metadata.pieces()) out = std::ranges::copy(piece, out).out;
  return contents;
}

EncodedMetadata metadata_of(const py::bytes& contents) { return EncodedMetadata(contents); }

void bind_encoded_metadata(py::module_& module) {
  py::class_<EncodedMetadata>(module, "EncodedMetadata")
      .def(py::init(&metadata_of), py::arg("contents"))
      .def("__len__", &EncodedMetadata::bytes)
      .def("__bytes__", &contents_of)
      .def_property_readonly("seal",
                             [](const EncodedMetadata& self) { return py::bytes(self.seal()); })
      .def(py::pickle(&contents_of, &metadata_of));
}

using TensorSpec = std::tuple<py::str, std::string, std::vector<std::uint64_t>>;

/// Returns the bytes of a file before the tensors, each given by name, dtype and sizes.
py::bytes safetensors_header(const std::vector<TensorSpec>& specs,
                             const std::map<std::string, std::string>& metadata,
                             std::size_t alignment) {
  std::vector<format::SafeTensor> tensors;
  for (const auto& [name, dtype, sizes] : specs) {
    format::SafeTensor& tensor = tensors.emplace_back();
    tensor.name = bytes_of(name);
    tensor.dtype = format::find_dtype(dtype);
    tensor.sizes = sizes;
    unwrap(format::require_safe(tensor.name, tensor.dtype, tensor.sizes));
  }
  return unwrap(format::encode_safetensors_header(
      tensors, format::SafeMetadata(metadata.begin(), metadata.end()), alignment));
}

void bind_safetensors(py::module_& module) {
  using engine::SafetensorsFile;
  using engine::SafetensorsFiles;
  py::class_<SafetensorsFile>(module, "SafetensorsFile")
      .def_property_readonly("name", [](const SafetensorsFile& file) { return text_of(file.name); })
      .def_readonly("bytes", &SafetensorsFile::bytes)
      .def_readonly("header_crc", &SafetensorsFile::header_crc)
      .def_readonly("has_stale_checksums", &SafetensorsFile::has_stale_checksums);
  py::class_<SafetensorsFiles>(module, "SafetensorsFiles")
      .def_readonly("index", &SafetensorsFiles::index)
      .def_property_readonly("metadata",
                             [](const SafetensorsFiles& read) {
                               return std::map(read.metadata.begin(), read.metadata.end());
                             })
      .def_readonly("files", &SafetensorsFiles::files);
  module.def(
      "read_safetensors",
      [](const py::object& directory, const py::str& name) {
        const std::string text = bytes_of(name);
        const engine::Folder folder = folder_of(directory);
        return without_gil([&] { return engine::read_safetensors(folder, text); });
      },
      py::arg("directory"), py::arg("name"));
  module.def(
      "require_safe",
      [](const py::str& name, const std::string& dtype, const std::vector<std::uint64_t>& sizes) {
        unwrap(format::require_safe(bytes_of(name), format::find_dtype(dtype), sizes));
      },
      py::arg("name"), py::arg("dtype"), py::arg("sizes"));
  module.def("encode_safetensors_header", &safetensors_header, py::arg("tensors"),
             py::arg("metadata"), py::arg("alignment"));
}

using planning::Coverage;
using Numbers = std::vector<std::int64_t>;

/// Describes the part of a box at `offsets` that smaller boxes in it do not cover.
std::optional<std::string> describe_gap(const Numbers& size,
                                        const std::vector<std::pair<Numbers, Numbers>>& given,
                                        const Numbers& offsets) {
  std::vector<planning::Box> boxes;
  for (const auto& [begin, sizes] : given) boxes.push_back({begin, sizes});
  Interrupts interrupts;
  const Coverage coverage = interrupts.run(
      [&] { return planning::check_coverage(size, std::move(boxes), interrupts.check()); });
  if (coverage.state == Coverage::State::complete) return std::nullopt;
  return planning::describe(coverage, given.size(), offsets);
}

/// Returns a description for each tensor that its shards do not cover.
py::dict uncovered(const CheckpointIndex& index) {
  Interrupts interrupts;
  const auto found = interrupts.run([&]() -> Result<std::map<std::uint32_t, std::string>> {
    std::map<std::uint32_t, std::string> descriptions;
    for (std::uint32_t i = 0; i < index.entries().size(); ++i) {
      const auto coverage = planning::check_coverage(index, i, interrupts.check());
      if (!coverage) return coverage.error();
      if (coverage->state == Coverage::State::complete) continue;
      descriptions[i] = planning::describe(*coverage, index.entries()[i].shard_count);
    }
    return descriptions;
  });
  py::dict texts;
  for (const auto& [number, text] : found) texts[text_of(index.name(number))] = text;
  return texts;
}

}  // namespace

void bind_index(py::module_& module) {
  bind_encoded_metadata(module);
  bind_safetensors(module);
  module.attr("MAX_METADATA_BYTES") = CheckpointIndex::kMaxFileBytes;
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
  module.def("describe_gap", &describe_gap, py::arg("size"), py::arg("boxes"), py::arg("offsets"));
  module.def(
      "allow_dtypes", [](const std::vector<std::string>& names) { index::allow_dtypes(names); },
      py::arg("names"));
  module.def("allowed_globals", [] {
    std::map<std::string, std::string_view> roles;
    for (const auto& [name, role] : *index::allowed_globals()) roles[name] = index::name(role);
    return roles;
  });
  module.def(
      "walk_pickle",
      [](std::span<const std::byte> data) {
        return without_gil(
                   [&] { return index::walk_metadata_pickle(data, *index::allowed_globals()); })
            .values.end;
      },
      py::arg("data"));
  module.def(
      "decode_index",
      [](std::span<const std::byte> data, const std::filesystem::path& source) {
        return CheckpointIndex::decode(data, source.native());
      },
      py::arg("data"), py::arg("source"), NoGil());
  module.def(
      "decode_objects",
      [](std::span<const std::byte> pickled, const std::filesystem::path& source) {
        return CheckpointIndex::decode_objects(pickled, source.native());
      },
      py::arg("pickled"), py::arg("source"), NoGil());

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
      .def("undescribed_records", &undescribed_records_of)
      .def("uncovered", &uncovered)
      .def_property_readonly("stored_bytes", &CheckpointIndex::stored_bytes)
      .def_property_readonly("has_transformed", &CheckpointIndex::has_transformed)
      .def("tables", &tables_of)
      .def(
          "renamed",
          [](const CheckpointIndex& index, const std::vector<py::str>& names) {
            std::vector<std::string> texts;
            for (const py::str& name : names) texts.push_back(bytes_of(name));
            return unwrap(index.renamed(texts));
          },
          py::arg("names"));
}

}  // namespace torch_ckpt::python
