#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "directory/model_save.h"
#include "directory/version.h"
#include "engine/delta.h"
#include "os/shared_memory.h"
#include "planning/object_files.h"
#include "planning/safetensors_layout.h"
#include "planning/save_coordinator.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/list.h"
#include "python/memory.h"
#include "python/publishing.h"
#include "python/text.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using directory::ModelSave;
using planning::SafetensorsLayout;

using Metadata = std::vector<std::pair<py::str, py::str>>;

SafetensorsLayout layout_of_tensors(Result<std::vector<format::SafeTensor>> tensors,
                                    SafetensorsLayout::Options options) {
  if (!tensors) throw Failure(tensors.error());
  return SafetensorsLayout::of(std::move(*tensors), options).value();
}

format::SafeMetadata metadata_of(const Metadata& given) {
  format::SafeMetadata metadata;
  for (const auto& [key, value] : given) metadata.emplace_back(bytes_of(key), bytes_of(value));
  return metadata;
}

/// Returns the dtype with this name, or nullptr for None.
const format::Dtype* cast_of(const std::optional<std::string>& name) {
  return name ? format::find_dtype(*name) : nullptr;
}

SafetensorsLayout layout_of_plan(const planning::SaveCoordinator& coordinator,
                                 const std::optional<std::vector<py::str>>& names,
                                 const std::optional<std::string>& cast,
                                 std::uint64_t max_shard_bytes, const Metadata& metadata,
                                 const std::string& tag) {
  std::vector<std::string> renamed;
  if (names) {
    for (const py::str& name : *names) renamed.push_back(bytes_of(name));
  }
  return layout_of_tensors(planning::safe_tensors_of(coordinator.plan(), renamed, cast_of(cast)),
                           {max_shard_bytes, metadata_of(metadata), tag});
}

SafetensorsLayout layout_of_rows(
    const std::vector<std::tuple<py::str, std::string, std::vector<std::uint64_t>>>& rows,
    const std::optional<std::string>& cast, std::uint64_t max_shard_bytes,
    const Metadata& metadata) {
  std::vector<format::SafeTensor> tensors;
  for (const auto& [name, dtype, sizes] : rows) {
    format::SafeTensor& tensor = tensors.emplace_back();
    tensor.name = bytes_of(name);
    tensor.dtype = planning::stored_dtype(format::find_dtype(dtype), cast_of(cast));
    tensor.sizes = sizes;
  }
  return layout_of_tensors(std::move(tensors), {max_shard_bytes, metadata_of(metadata)});
}

std::vector<std::pair<std::string, std::uint64_t>> files_of(const SafetensorsLayout& layout) {
  std::vector<std::pair<std::string, std::uint64_t>> files;
  for (const SafetensorsLayout::File& file : layout.files()) {
    files.emplace_back(file.name, file.bytes);
  }
  return files;
}

/// Returns the encoded places for each rank. offers: the encoded addresses of the memory that each
/// rank offers; empty if it offers none.
py::list encoded_places(const SafetensorsLayout& layout,
                        const std::vector<std::vector<planning::OwnedPart>>& parts,
                        const std::vector<py::bytes>& offers) {
  std::vector<std::optional<os::MemoryFile::Address>> decoded(offers.size());
  for (std::size_t rank = 0; rank < offers.size(); ++rank) {
    const std::string_view offer = offers[rank];
    if (!offer.empty()) decoded[rank] = planning::decode_address(offer).value();
  }
  return list_of(planning::RankPlaces::of(layout, parts, decoded),
                 [](const planning::RankPlaces& places) { return py::bytes(places.encode()); });
}

bool interleaves(const SafetensorsLayout& layout, const planning::SaveCoordinator& coordinator,
                 const std::vector<std::string>& hosts) {
  const auto parts = planning::owned_parts_of(coordinator.plan());
  return planning::are_interleaved(planning::file_parts_of(layout, parts), hosts);
}

bool shares_files(const SafetensorsLayout& layout, const planning::SaveCoordinator& coordinator,
                  const std::vector<std::string>& hosts) {
  const auto parts = planning::owned_parts_of(coordinator.plan());
  return planning::are_shared(planning::file_parts_of(layout, parts), hosts);
}

py::list places_of_plan(const SafetensorsLayout& layout,
                        const planning::SaveCoordinator& coordinator,
                        const std::vector<py::bytes>& offers) {
  return encoded_places(layout, planning::owned_parts_of(coordinator.plan()), offers);
}

using Sizes = std::vector<std::uint64_t>;

py::list places_of_parts(
    const SafetensorsLayout& layout,
    const std::vector<std::vector<std::tuple<std::size_t, Sizes, Sizes>>>& by_rank,
    const std::vector<py::bytes>& offers) {
  std::vector<std::vector<planning::OwnedPart>> parts;
  for (const auto& given : by_rank) {
    auto& of_rank = parts.emplace_back();
    for (const auto& [tensor, offsets, sizes] : given) {
      if (tensor >= layout.tensors().size()) throw py::index_error("no tensor has this number");
      of_rank.push_back({tensor, offsets, sizes});
    }
  }
  return encoded_places(layout, parts, offers);
}

/// Returns nullptr if other processes could not use the memory.
std::unique_ptr<os::MemoryFile> offer_memory() {
  auto made = os::MemoryFile::create();
  return made ? std::make_unique<os::MemoryFile>(std::move(*made)) : nullptr;
}

/// The encoded checksums of each rank's parts, by file.
using PartTables = std::vector<std::map<std::string, py::bytes>>;
/// Names and contents of other files.
using Extras = std::vector<std::pair<std::filesystem::path, py::bytes>>;

std::vector<SafetensorsLayout::WrittenParts> parts_of(const PartTables& written) {
  std::vector<SafetensorsLayout::WrittenParts> parts;
  for (const auto& of_rank : written) {
    for (const auto& [file, encoded] : of_rank) parts.push_back({file, encoded});
  }
  return parts;
}

std::vector<SafetensorsLayout::Extra> extras_of(const Extras& given) {
  std::vector<SafetensorsLayout::Extra> extras;
  for (const auto& [name, contents] : given) extras.push_back({name.native(), contents});
  return extras;
}

void complete(ModelSave& save, const SafetensorsLayout& layout, const Extras& extras,
              const PartTables& written, bool sync) {
  const auto parts = parts_of(written);
  const auto others = extras_of(extras);
  without_gil([&] {
    save.complete(layout, others, layout.checksum_tables(parts).value(), sync).value();
    return true;
  });
}

// --- objects in a store --------------------------------------------------------------------------

using planning::FileAssembly;

/// Returns the contents of the file of checksums.
py::bytes checksums_of(const SafetensorsLayout& layout, const Extras& extras,
                       const PartTables& written) {
  const auto parts = parts_of(written);
  const auto others = extras_of(extras);
  const std::string encoded = without_gil([&]() -> Result<std::string> {
    auto tables = layout.checksum_tables(parts);
    if (!tables) return tables.error();
    return format::encode_safe_checksums(
        planning::checksums_of(layout.files(), std::move(*tables), others));
  });
  return {encoded};
}

/// Returns the names of the files in a file of checksums.
std::vector<py::str> names_in_checksums(std::span<const std::byte> encoded) {
  std::vector<py::str> names;
  for (const auto& file : format::decode_safe_checksums(encoded).value()) {
    names.push_back(os_text(file.name));
  }
  return names;
}

/// Adds the checksums in `more` to those in `encoded`, which have precedence.
py::bytes join_checksums(std::span<const std::byte> encoded, std::span<const std::byte> more) {
  auto all = format::decode_safe_checksums(encoded).value();
  const std::size_t before = all.size();
  for (auto& file : format::decode_safe_checksums(more).value()) {
    const auto known = std::span(all).first(before);
    const auto has_name = [&](const auto& other) { return other.name == file.name; };
    if (std::ranges::none_of(known, has_name)) all.push_back(std::move(file));
  }
  return {format::encode_safe_checksums(all)};
}

/// Returns the encoded places, the encoded assemblies and the streams that are sent, of each rank.
py::tuple object_files(const SafetensorsLayout& layout,
                       const planning::SaveCoordinator& coordinator, bool assembles_all) {
  const auto files = without_gil([&] {
    return planning::ObjectFiles::of(layout, planning::owned_parts_of(coordinator.plan()),
                                     assembles_all);
  });
  const auto bytes_of_each = [](const auto& assemblies) {
    return list_of(assemblies, [](const FileAssembly& it) { return py::bytes(it.encode()); });
  };
  const auto with_receivers = [](const auto& sent) {
    return list_of(sent, [](const planning::ObjectFiles::Sent& it) {
      return py::make_tuple(it.to, text_of(it.file), it.bytes);
    });
  };
  return py::make_tuple(
      list_of(files.places, [](const auto& places) { return py::bytes(places.encode()); }),
      list_of(files.assemblies, bytes_of_each), list_of(files.sent, with_receivers));
}

void bind_assemblies(py::module_& module) {
  module.def("names_in_checksums", &names_in_checksums, py::arg("encoded"));
  module.def("join_checksums", &join_checksums, py::arg("encoded"), py::arg("more"));
  py::class_<FileAssembly>(module, "FileAssembly")
      .def(py::init([](std::string_view encoded) {
             return std::make_unique<FileAssembly>(FileAssembly::decode(encoded).value());
           }),
           py::arg("encoded"))
      .def_property_readonly("name", &FileAssembly::name)
      .def_property_readonly("bytes", &FileAssembly::bytes)
      .def(
          "ranges",
          [](const FileAssembly& self, std::uint64_t begin, std::uint64_t end) {
            return list_of(self.ranges(begin, end), [](const FileAssembly::Range& range) {
              return py::make_tuple(range.stream, range.offset, range.bytes);
            });
          },
          py::arg("begin"), py::arg("end"))
      .def_property_readonly("ranks",
                             [](const FileAssembly& self) {
                               std::vector<std::size_t> ranks;
                               for (std::size_t i = 0; i < self.streams(); ++i) {
                                 ranks.push_back(self.rank_of(i));
                               }
                               return ranks;
                             })
      .def(
          "copy_head",
          [](const FileAssembly& self, std::uint64_t begin, const py::object& out) {
            const Memory memory(out, PyBUF_WRITABLE);
            self.copy_head(begin, memory.writable_bytes());
          },
          py::arg("begin"), py::arg("out"))
      .def(
          "copy",
          [](const FileAssembly& self, std::size_t stream, std::uint64_t offset,
             std::span<const std::byte> data, std::uint64_t begin, const py::object& out) {
            const Memory memory(out, PyBUF_WRITABLE);
            without_gil([&] {
              return self.copy({stream, offset, data.size()}, data, begin, memory.writable_bytes());
            });
          },
          py::arg("stream"), py::arg("offset"), py::arg("data"), py::arg("begin"), py::arg("out"));
}

// --- versions and deltas -------------------------------------------------------------------------

using engine::Delta;

/// Completes a directory to which Delta::write_files() has written.
void complete_version(ModelSave& save, const Delta& delta, bool sync) {
  std::vector<SafetensorsLayout::File> files;
  std::vector<std::string> tables;
  std::vector<ModelSave::Extra> others;
  for (const format::DeltaFile& file : delta.files()) {
    if (file.has_tensors) {
      files.push_back({file.name, file.start, file.bytes});
      tables.push_back(file.table);
    } else {
      others.push_back({file.name, file.start});
    }
  }
  without_gil([&] { return save.complete(files, others, tables, sync); });
}

Delta read_delta(const os::Directory& directory, const std::filesystem::path& name) {
  return without_gil([&]() -> Result<Delta> {
    const auto file = directory.open_for_read(name.native());
    if (!file) return file.error();
    return Delta::read(engine::Context::process(), *file);
  });
}

py::list tensors_of(const Delta& delta) {
  return list_of(delta.tensors(), [](const Delta::Tensor& tensor) {
    return py::make_tuple(text_of(tensor.tensor->name), std::string(tensor.tensor->dtype->name),
                          tensor.tensor->sizes);
  });
}

void apply(Delta& delta, const std::vector<py::object>& targets) {
  std::vector<std::unique_ptr<Memory>> memory;
  std::vector<std::span<std::byte>> bytes;
  for (const py::object& target : targets) {
    memory.push_back(std::make_unique<Memory>(target, PyBUF_WRITABLE));
    bytes.push_back(memory.back()->writable_bytes());
  }
  without_gil([&] { return delta.apply(engine::Context::process(), bytes); });
}

void bind_versions(py::module_& module, py::class_<ModelSave>& save) {
  module.attr("DELTA_NAME") = std::string(format::kDeltaName);
  module.attr("LATEST_NAME") = std::string(directory::kLatestName);
  module.def("update_latest", &directory::update_latest, py::arg("root"), py::arg("sync"), NoGil());
  save.def("complete_version", &complete_version, py::arg("delta"), py::arg("sync"))
      .def(
          "link_unchanged",
          [](ModelSave& self, const os::Directory& base, bool sync) {
            directory::Warnings warnings;
            without_gil([&] { return self.link_unchanged(base, sync, warnings); });
            warn(warnings);
          },
          py::arg("base"), py::arg("sync"))
      .def(
          "write_delta",
          [](const ModelSave& self, const os::Directory& base, const std::filesystem::path& name,
             bool sync) {
            without_gil([&] {
              return engine::write_delta(engine::Context::process(), base, name.native(),
                                         self.directory(), sync);
            });
          },
          py::arg("base"), py::arg("name"), py::arg("sync"));
  py::class_<Delta>(module, "Delta")
      .def(py::init(&read_delta), py::arg("directory"), py::arg("name"))
      .def_property_readonly("base", [](const Delta& self) { return os_text(self.base()); })
      .def("tensors", &tensors_of)
      .def("apply", &apply, py::arg("targets"))
      .def(
          "write_files",
          [](const Delta& self, const os::Directory& base, const os::Directory& to) {
            return self.write_files(engine::Context::process(), base, to);
          },
          py::arg("base"), py::arg("to"), NoGil());
}

}  // namespace

void bind_model(py::module_& module) {
  py::class_<SafetensorsLayout>(module, "SafetensorsLayout")
      .def(py::init(&layout_of_plan), py::arg("coordinator"), py::arg("names"), py::arg("cast"),
           py::arg("max_shard_bytes"), py::arg("metadata"), py::arg("tag") = "")
      .def_static("of_tensors", &layout_of_rows, py::arg("tensors"), py::arg("cast"),
                  py::arg("max_shard_bytes"), py::arg("metadata"))
      .def("files", &files_of)
      .def_property_readonly(
          "index", [](const SafetensorsLayout& layout) { return py::bytes(layout.index()); })
      .def("checksums", &checksums_of, py::arg("extras"), py::arg("written"))
      .def("object_files", &object_files, py::arg("coordinator"), py::arg("assembles_all"))
      .def("interleaves", &interleaves, py::arg("coordinator"), py::arg("hosts"), NoGil())
      .def("shares_files", &shares_files, py::arg("coordinator"), py::arg("hosts"), NoGil())
      .def("places_of_plan", &places_of_plan, py::arg("coordinator"), py::arg("offers"))
      .def("places_of_parts", &places_of_parts, py::arg("parts"), py::arg("offers"));
  py::class_<os::MemoryFile>(module, "MemoryFile")
      .def_property_readonly("address", [](const os::MemoryFile& file) {
        return py::bytes(planning::encode_address(file.address()));
      });
  module.def("offer_memory", &offer_memory);
  py::class_<ModelSave> model_save(module, "ModelSave");
  model_save
      .def(py::init([](const os::Directory& parent, const std::filesystem::path& name, bool replace,
                       const std::vector<std::filesystem::path>& extras) {
             std::set<std::string> names;
             for (const auto& extra : extras) names.insert(extra.native());
             directory::Warnings warnings;
             auto made = without_gil(
                 [&] { return ModelSave::begin(parent, name.native(), replace, names, warnings); });
             warn(warnings);
             return std::make_unique<ModelSave>(std::move(made));
           }),
           py::arg("parent"), py::arg("name"), py::arg("replace"), py::arg("extras"))
      .def_property_readonly("temporary",
                             [](const ModelSave& save) { return os_text(save.temporary()); })
      .def("complete", &complete, py::arg("layout"), py::arg("extras"), py::arg("written"),
           py::arg("sync"))
      .def(
          "publish",
          [](ModelSave& save, bool sync) {
            directory::Warnings warnings;
            const auto outcome = without_gil([&] { return save.publish(sync, warnings); });
            warn(warnings);
            raise_unpublished(outcome);
          },
          py::arg("sync"))
      .def("discard", [](ModelSave& save) {
        run_and_warn([&](directory::Warnings& warnings) { save.discard(warnings); });
      });
  bind_versions(module, model_save);
  bind_assemblies(module);
}

}  // namespace torch_ckpt::python
