#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <optional>
#include <ranges>
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
#include "python/types.h"

namespace py = pybind11;
using namespace py::literals;

namespace torch_ckpt::python {
namespace {

using index::CheckpointIndex;
using index::EncodedMetadata;

const CheckpointIndex::Entry* entry_of(const CheckpointIndex& index, const Name& name) {
  const auto number = index.find(name);
  return number ? &index.entries()[*number] : nullptr;
}

using StoredShard = Typed<"tuple[tuple[int, ...], tuple[int, ...], str | None, int, int, bool]">;

StoredShard shard_of(const CheckpointIndex& index, const CheckpointIndex::Shard& shard) {
  const auto extents = [&](std::uint32_t id) {
    return tuple_of(id == CheckpointIndex::kNone ? std::span<const std::int64_t>()
                                                 : index.extents(id));
  };
  const py::object file = shard.file == CheckpointIndex::kNone
                              ? py::object(py::none())
                              : text_of(index.text(index.files()[shard.file]));
  return py::object(py::make_tuple(extents(shard.offsets), extents(shard.sizes), file, shard.offset,
                                   shard.length, shard.is_transformed));
}

auto shards_of(const CheckpointIndex& index, const Name& name) {
  const CheckpointIndex::Entry* entry = entry_of(index, name);
  if (entry == nullptr) throw py::key_error(name);
  return list_of(index.shards(*entry), [&](const auto& shard) { return shard_of(index, shard); });
}

auto undescribed_records_of(const CheckpointIndex& index) {
  // Create one string per name, because many records may share a long name.
  std::map<std::uint64_t, std::optional<py::str>> names;
  return list_of(index.undescribed_records(),
                 [&](const CheckpointIndex::UndescribedRecord& record) {
                   std::optional<py::str>& name = names[record.name.at];
                   if (!name) name = text_of(index.text(record.name));
                   return py::make_tuple(*name, shard_of(index, record.shard));
                 });
}

auto files_of(const CheckpointIndex& index) {
  return list_of(index.files(), [&](auto file) { return text_of(index.text(file)); });
}

Typed<"tuple[str, tuple[int, ...]] | None"> tensor_of(const CheckpointIndex& index,
                                                      const Name& name) {
  const CheckpointIndex::Entry* entry = entry_of(index, name);
  if (entry == nullptr || !entry->is_tensor) return py::none();
  return py::object(
      py::make_tuple(index.dtypes()[entry->dtype], tuple_of(index.extents(entry->size))));
}

auto tables_of(const CheckpointIndex& index) {
  py::typing::Dict<py::str, py::bytes> tables;
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
  py::class_<EncodedMetadata>(module, "EncodedMetadata",
                              "The contents of a ``.metadata`` file. Saves with the same plan "
                              "share the parts that do not differ.")
      .def(py::init(&metadata_of), "contents"_a)
      .def("__len__", &EncodedMetadata::bytes)
      .def("__bytes__", &contents_of)
      .def_property_readonly("seal",
                             [](const EncodedMetadata& self) { return py::bytes(self.seal()); })
      .def(py::pickle(&contents_of, &metadata_of));
}

using TensorSpec = std::tuple<Name, std::string, std::vector<std::uint64_t>>;

py::bytes safetensors_header(const std::vector<TensorSpec>& specs,
                             const std::map<std::string, std::string>& metadata,
                             std::size_t alignment) {
  std::vector<format::SafeTensor> tensors;
  for (const auto& [name, dtype, sizes] : specs) {
    format::SafeTensor& tensor = tensors.emplace_back();
    tensor.name = name;
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
  py::class_<SafetensorsFile>(module, "SafetensorsFile",
                              "A safetensors file whose header has been read.")
      .def_property_readonly("name", text_getter(&SafetensorsFile::name))
      .def_readonly("bytes", &SafetensorsFile::bytes)
      .def_readonly("header_crc", &SafetensorsFile::header_crc,
                    "CRC-32 of the bytes before the data.")
      .def_readonly("has_stale_checksums", &SafetensorsFile::has_stale_checksums,
                    "True if the file has changed since its checksums were saved.");
  py::class_<SafetensorsFiles>(module, "SafetensorsFiles",
                               "The contents of safetensors files, without the data.")
      .def_readonly("index", &SafetensorsFiles::index)
      .def_property_readonly("metadata",
                             [](const SafetensorsFiles& read) {
                               return std::map(read.metadata.begin(), read.metadata.end());
                             })
      .def_readonly("files", &SafetensorsFiles::files);
  module.def(
      "read_safetensors",
      [](const engine::Folder& directory, const Name& name) {
        return engine::read_safetensors(directory, name);
      },
      "directory"_a, "name"_a, NoGil(),
      "Reads the headers of safetensors files in a directory.\n\n"
      "``name`` is the name of one file, or of an index that names the file of each tensor. Raises "
      "Corrupt, Unsafe and OSError.");
  module.def(
      "require_safe",
      [](const Name& name, const std::string& dtype, const std::vector<std::uint64_t>& sizes) {
        return format::require_safe(name, format::find_dtype(dtype), sizes);
      },
      "name"_a, "dtype"_a, "sizes"_a,
      "Raises CheckpointError with the reason if safetensors files cannot hold a tensor.");
  module.def("encode_safetensors_header", &safetensors_header, "tensors"_a, "metadata"_a,
             "alignment"_a,
             "Returns the bytes of a safetensors file before the data.\n\n"
             "The data must follow in the order of the tensors, which are given by name, dtype and "
             "sizes. It then begins at a multiple of ``alignment``. Raises CheckpointError if "
             ":func:`require_safe` does, or if the header is larger than readers accept.");
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

py::typing::Dict<py::str, std::string> uncovered(const CheckpointIndex& index) {
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
  py::typing::Dict<py::str, std::string> texts;
  for (const auto& [number, text] : found) texts[text_of(index.name(number))] = text;
  return texts;
}

}  // namespace

void bind_index(py::module_& module) {
  py::class_<CheckpointIndex>(
      module, "CheckpointIndex",
      "The contents of a checkpoint, from its metadata. All values have been checked.")
      .def("__len__", [](const CheckpointIndex& index) { return index.entries().size(); })
      .def(
          "__contains__",
          [](const CheckpointIndex& index, const Name& name) {
            return index.find(name).has_value();
          },
          "name"_a)
      .def("names",
           [](const CheckpointIndex& index) {
             return list_of(std::views::iota(std::size_t{0}, index.entries().size()),
                            [&](std::size_t i) { return text_of(index.name(i)); });
           })
      .def("files", &files_of)
      .def("tensor", &tensor_of, "name"_a,
           "Name of a tensor's dtype, without the module, and its size; None for an object.")
      .def("shards", &shards_of, "name"_a,
           "The shards of a tensor: offsets and sizes in elements, file, offset and length in "
           "bytes, and True if it was written through a stream transform. The file is None if the "
           "metadata does not give it. An object has one shard, without offsets and sizes.\n\n"
           "Raises KeyError if there is no such name.")
      .def("undescribed_records", &undescribed_records_of,
           "Names and locations of records that the metadata does not describe.")
      .def("uncovered", &uncovered,
           "Describes the first element that no shard covers, for each tensor that has one.")
      .def_property_readonly("stored_bytes", &CheckpointIndex::stored_bytes,
                             "Total length of all shards in their files.")
      .def_property_readonly(
          "has_transformed", &CheckpointIndex::has_transformed,
          "True if stream transforms have changed any record. Only torch can read such records.")
      .def("tables", &tables_of, "Encoded checksum tables by file name.")
      .def(
          "renamed",
          [](const CheckpointIndex& index, const std::vector<Name>& names) {
            return index.renamed(std::vector<std::string>(names.begin(), names.end()));
          },
          "names"_a, "Returns a copy with other names, which are in the order of the entries.");
  bind_encoded_metadata(module);
  bind_safetensors(module);
  module.attr("MAX_METADATA_BYTES") = CheckpointIndex::kMaxFileBytes;
  module.def(
      "bytes_sealed",
      [](std::span<const std::byte> file) {
        const ReleasedGil released;
        return index::bytes_sealed(file);
      },
      "file"_a,
      "The number of bytes that the seal of a ``.metadata`` file covers; None without a seal.\n\n"
      "Raises Corrupt if these bytes do not match the seal.");
  module.def(
      "seal_of",
      [](const py::bytes& pickled) {
        const std::string_view piece = pickled;
        return Bytes{index::seal_of(std::span(&piece, 1))};
      },
      "pickled"_a, "The bytes that follow the pickle in a ``.metadata`` file.");
  module.def(
      "describe_gap", &describe_gap, "size"_a, "boxes"_a, "offsets"_a,
      "Describes the first element that no box covers; None if the boxes cover everything.\n\n"
      "``size`` is the size, in elements, of the covered part, which is at ``offsets`` in its "
      "tensor. A box is offsets in this part, and sizes.");
  module.def(
      "allow_dtypes", [](const std::vector<std::string>& names) { index::allow_dtypes(names); },
      "names"_a,
      "Adds names of dtypes in the module torch to the names that metadata may contain.");
  module.def(
      "allowed_globals",
      [] {
        std::map<std::string, std::string_view> roles;
        for (const auto& [name, role] : *index::allowed_globals()) roles[name] = index::name(role);
        return roles;
      },
      "The names that metadata may contain, as \"module name\", and their roles; see "
      "csrc/index/allowed_globals.h.");
  module.def(
      "walk_pickle",
      [](std::span<const std::byte> data) {
        return without_gil(
                   [&] { return index::walk_metadata_pickle(data, *index::allowed_globals()); })
            .values.end;
      },
      "data"_a,
      "Checks that running a metadata pickle is safe. Returns the number of bytes up to STOP.\n\n"
      "Raises Unsafe for names that metadata must not contain, and Corrupt for all other defects.");
  module.def(
      "decode_index",
      [](std::span<const std::byte> data, const FileName& source) {
        return CheckpointIndex::decode(data, source);
      },
      "data"_a, "source"_a, NoGil(),
      "Decodes the contents of a ``.metadata`` file without running the pickle.\n\n"
      "Raises Unsafe for names that metadata must not contain and for data outside of the "
      "checkpoint's directory, and Corrupt for all other defects. ``source`` is the origin of the "
      "bytes.");
  module.def(
      "decode_objects",
      [](std::span<const std::byte> pickled, const FileName& source) {
        return CheckpointIndex::decode_objects(pickled, source);
      },
      "pickled"_a, "source"_a, NoGil(),
      "Decodes a pickle of torch's ``Metadata`` that this process has made.\n\n"
      "Raises Unsafe and Corrupt.");
}

}  // namespace torch_ckpt::python
