#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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
#include "python/types.h"

namespace py = pybind11;
using namespace py::literals;

namespace torch_ckpt::python {
namespace {

using directory::ModelSave;
using planning::SafetensorsLayout;

using Metadata = std::vector<std::pair<Name, Name>>;

SafetensorsLayout layout_of_tensors(Result<std::vector<format::SafeTensor>> tensors,
                                    SafetensorsLayout::Options options) {
  if (!tensors) throw Failure(tensors.error());
  return SafetensorsLayout::of(std::move(*tensors), options).value();
}

/// Returns the dtype with this name, or nullptr for None.
const format::Dtype* cast_of(const std::optional<std::string>& name) {
  return name ? format::find_dtype(*name) : nullptr;
}

SafetensorsLayout layout_of_plan(const planning::SaveCoordinator& coordinator,
                                 const std::optional<std::vector<Name>>& names,
                                 const std::optional<std::string>& cast,
                                 std::uint64_t max_shard_bytes, const Metadata& metadata,
                                 const std::string& tag) {
  std::vector<std::string> renamed;
  if (names) renamed.assign(names->begin(), names->end());
  return layout_of_tensors(planning::safe_tensors_of(coordinator.plan(), renamed, cast_of(cast)),
                           {max_shard_bytes, {metadata.begin(), metadata.end()}, tag});
}

SafetensorsLayout layout_of_rows(
    const std::vector<std::tuple<Name, std::string, std::vector<std::uint64_t>>>& rows,
    const std::optional<std::string>& cast, std::uint64_t max_shard_bytes,
    const Metadata& metadata) {
  std::vector<format::SafeTensor> tensors;
  for (const auto& [name, dtype, sizes] : rows) {
    format::SafeTensor& tensor = tensors.emplace_back();
    tensor.name = name;
    tensor.dtype = planning::stored_dtype(format::find_dtype(dtype), cast_of(cast));
    tensor.sizes = sizes;
  }
  return layout_of_tensors(std::move(tensors),
                           {max_shard_bytes, {metadata.begin(), metadata.end()}});
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
auto encoded_places(const SafetensorsLayout& layout,
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

auto places_of_plan(const SafetensorsLayout& layout, const planning::SaveCoordinator& coordinator,
                    const std::vector<py::bytes>& offers) {
  return encoded_places(layout, planning::owned_parts_of(coordinator.plan()), offers);
}

using Sizes = std::vector<std::uint64_t>;

auto places_of_parts(const SafetensorsLayout& layout,
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

std::optional<os::MemoryFile> offer_memory() {
  auto made = os::MemoryFile::create();
  return made ? std::optional(std::move(*made)) : std::nullopt;
}

/// The encoded checksums of each rank's parts, by file.
using PartTables = std::vector<std::map<std::string, py::bytes>>;
/// Names and contents of other files.
using Extras = std::vector<std::pair<FileName, py::bytes>>;

std::vector<SafetensorsLayout::WrittenParts> parts_of(const PartTables& written) {
  std::vector<SafetensorsLayout::WrittenParts> parts;
  for (const auto& of_rank : written) {
    for (const auto& [file, encoded] : of_rank) parts.push_back({file, encoded});
  }
  return parts;
}

std::vector<SafetensorsLayout::Extra> extras_of(const Extras& given) {
  std::vector<SafetensorsLayout::Extra> extras;
  for (const auto& [name, contents] : given) extras.push_back({name, contents});
  return extras;
}

void complete(ModelSave& save, const SafetensorsLayout& layout, const Extras& extras,
              const PartTables& written, bool sync) {
  const auto parts = parts_of(written);
  const auto others = extras_of(extras);
  without_gil(
      [&] { return save.complete(layout, others, layout.checksum_tables(parts).value(), sync); });
}

// --- objects in a store --------------------------------------------------------------------------

using planning::FileAssembly;

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

auto names_in_checksums(std::span<const std::byte> encoded) {
  return list_of(format::decode_safe_checksums(encoded).value(),
                 [](const auto& file) { return os_text(file.name); });
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

auto object_files(const SafetensorsLayout& layout, const planning::SaveCoordinator& coordinator,
                  bool assembles_all) {
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
  module.def("names_in_checksums", &names_in_checksums, "encoded"_a,
             "The names of the files in a file of checksums. Raises Corrupt if it is damaged.");
  module.def("join_checksums", &join_checksums, "encoded"_a, "more"_a,
             "Adds the checksums of files that are only in ``more`` to a file of checksums.");
  py::class_<FileAssembly>(module, "FileAssembly",
                           "The assembly of a file from the parts of several ranks; see "
                           "csrc/planning/object_files.h.\n\n"
                           "Raises Corrupt if the encoded description is damaged.")
      .def(py::init([](const py::bytes& encoded) { return unwrap(FileAssembly::decode(encoded)); }),
           "encoded"_a)
      .def_property_readonly("name", &FileAssembly::name)
      .def_property_readonly("bytes", &FileAssembly::bytes)
      .def(
          "ranges",
          [](const FileAssembly& self, std::uint64_t begin, std::uint64_t end) {
            return list_of(self.ranges(begin, end), [](const FileAssembly::Range& range) {
              return py::make_tuple(range.stream, range.offset, range.bytes);
            });
          },
          "begin"_a, "end"_a,
          "The bytes of streams that the bytes from ``begin`` to ``end`` of the file consist of: "
          "number of the stream, offset and size. The head of the file is in no stream.")
      .def_property_readonly(
          "ranks",
          [](const FileAssembly& self) {
            std::vector<std::size_t> ranks;
            for (std::size_t i = 0; i < self.streams(); ++i) {
              ranks.push_back(self.rank_of(i));
            }
            return ranks;
          },
          "The ranks that send the streams.")
      .def("copy_head", &FileAssembly::copy_head, "begin"_a, "out"_a, NoGil(),
           "Copies the bytes of the head to ``out``, which has the file's bytes from ``begin`` on.")
      .def(
          "copy",
          [](const FileAssembly& self, std::size_t stream, std::uint64_t offset,
             std::span<const std::byte> data, std::uint64_t begin, std::span<std::byte> out) {
            return self.copy({stream, offset, data.size()}, data, begin, out);
          },
          "stream"_a, "offset"_a, "data"_a, "begin"_a, "out"_a, NoGil(),
          "Copies bytes of a stream, from ``offset`` on, to their places in ``out``.");
}

// --- versions and deltas -------------------------------------------------------------------------

using engine::Delta;

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

Delta read_delta(const os::Directory& directory, const FileName& name) {
  const auto file = directory.open_for_read(name).value();
  return Delta::read(engine::Context::process(), file).value();
}

auto tensors_of(const Delta& delta) {
  return list_of(delta.tensors(), [](const Delta::Tensor& tensor) {
    return py::make_tuple(text_of(tensor.tensor->name), std::string(tensor.tensor->dtype->name),
                          tensor.tensor->sizes);
  });
}

void apply(Delta& delta, const std::vector<Buffer>& targets) {
  std::vector<std::unique_ptr<Memory>> memory;
  std::vector<std::span<std::byte>> bytes;
  for (const Buffer& target : targets) {
    memory.push_back(std::make_unique<Memory>(target, PyBUF_WRITABLE));
    bytes.push_back(memory.back()->writable_bytes());
  }
  without_gil([&] { return delta.apply(engine::Context::process(), bytes); });
}

void bind_deltas(py::module_& module) {
  module.attr("DELTA_NAME") = std::string(format::kDeltaName);
  module.attr("LATEST_NAME") = std::string(directory::kLatestName);
  module.def("update_latest", &directory::update_latest, "root"_a, "sync"_a, NoGil(),
             "Makes the link ``latest`` in the root of versions lead to the newest one.\n\n"
             "Raises OSError, and FileExistsError if it is not a link.");
  py::class_<Delta>(
      module, "Delta",
      "A delta, which is read into memory; csrc/engine/delta.h describes how it is applied.\n\n"
      "Raises OSError, and Corrupt if it is damaged.")
      .def(py::init(&read_delta), "directory"_a, "name"_a, NoGil())
      .def_property_readonly("base", [](const Delta& self) { return os_text(self.base()); })
      .def("tensors", &tensors_of, "Name, dtype and shape of each tensor of the version.")
      .def("apply", &apply, "targets"_a,
           "Changes the memory of each of the ``tensors``, in place: contiguous, writable buffers. "
           "After a success, the delta must not be used again.\n\n"
           "Raises CheckpointError if a target does not have the values of the base, Corrupt if "
           "the delta is damaged, and ValueError if targets share memory.")
      .def(
          "write_files",
          [](const Delta& self, const os::Directory& base, const os::Directory& to) {
            return self.write_files(engine::Context::process(), base, to);
          },
          "base"_a, "to"_a, NoGil(),
          "Writes the version's safetensors files. Raises as ``apply`` does, and OSError.");
}

}  // namespace

void bind_model(py::module_& module) {
  bind_deltas(module);
  py::class_<SafetensorsLayout>(
      module, "SafetensorsLayout",
      "The files of a model in Hugging Face's layout; see csrc/planning/safetensors_layout.h.\n\n"
      "Floating-point tensors are stored with the dtype ``cast``; None keeps each tensor's dtype. "
      "A file has at most ``max_shard_bytes`` bytes of tensors, or one larger tensor. ``metadata`` "
      "is stored in each file. Raises CheckpointError if the files cannot hold a value.")
      .def(py::init(&layout_of_plan), "coordinator"_a, "names"_a, "cast"_a, "max_shard_bytes"_a,
           "metadata"_a, "tag"_a = "",
           "Lays out the values of a plan. ``names`` has new names, in the order of the plan's. "
           "``tag`` becomes part of the names of the files, which then have an index in any case.")
      .def_static("of_tensors", &layout_of_rows, "tensors"_a, "cast"_a, "max_shard_bytes"_a,
                  "metadata"_a, "Lays out tensors, given the name, dtype and size of each.")
      .def("files", &files_of, "The name of each file, and its size in bytes.")
      .def_property_readonly(
          "index", [](const SafetensorsLayout& layout) { return py::bytes(layout.index()); },
          "The contents of the index; empty if a single file has none.")
      .def("checksums", &checksums_of, "extras"_a, "written"_a,
           "The contents of the file of checksums, from the arguments of ``ModelSave.complete``. "
           "``extras`` includes the index. Raises Corrupt if the ranks have not written all bytes.")
      .def("object_files", &object_files, "coordinator"_a, "assembles_all"_a,
           "Decides which rank writes each file; see csrc/planning/object_files.h.\n\n"
           "Returns, by rank: the places of the values, for ``FlatState.parts``; the files that "
           "the rank assembles, for ``FileAssembly``; and the receiver, the file and the size of "
           "each stream that the rank sends, in the order of the files.")
      .def("interleaves", &interleaves, "coordinator"_a, "hosts"_a, NoGil(),
           "True if ranks of several hosts would write to the same ranges of a file, in short "
           "runs.\n\n"
           "``hosts`` are the hosts of the ranks.")
      .def("shares_files", &shares_files, "coordinator"_a, "hosts"_a, NoGil(),
           "True if ranks of several hosts would write to one file.")
      .def("places_of_plan", &places_of_plan, "coordinator"_a, "offers"_a,
           "The places of each rank's values, for ``FlatState.parts``.\n\n"
           "``offers`` are the addresses of the memory that each rank offers to the ranks of its "
           "machine; an empty one if it offers none.")
      .def("places_of_parts", &places_of_parts, "parts"_a, "offers"_a,
           "The places of each rank's parts, for ``SaveSources.set_places``.\n\n"
           "A part is the number of its tensor, and its offsets and size in the tensor.");
  py::class_<os::MemoryFile>(
      module, "MemoryFile",
      "Memory that a rank offers to the ranks of its machine, to collect short writes.")
      .def_property_readonly("address", [](const os::MemoryFile& file) {
        return py::bytes(planning::encode_address(file.address()));
      });
  module.def("offer_memory", &offer_memory,
             "Offers memory. Returns None if other processes could not use it. The memory is "
             "allocated when a rank uses it.");
  py::class_<ModelSave>(
      module, "ModelSave",
      "The coordinator's part of a save in Hugging Face's layout; csrc/directory/model_save.h has "
      "the protocol.\n\n"
      "Creates a directory beside ``name`` in ``parent``. Raises OSError, and FileExistsError if "
      "the directory ``name`` exists and must not be replaced.")
      .def(py::init([](const os::Directory& parent, const FileName& name, bool replace,
                       const std::vector<FileName>& extras) {
             directory::Warnings warnings;
             auto made = without_gil([&] {
               return ModelSave::begin(parent, name, replace, {extras.begin(), extras.end()},
                                       warnings);
             });
             warn(warnings);
             return made;
           }),
           "parent"_a, "name"_a, "replace"_a, "extras"_a,
           "``extras`` has the names of the files that ``complete`` receives.")
      .def_property_readonly(
          "temporary", [](const ModelSave& save) { return os_text(save.temporary()); },
          "The name of the new directory.")
      .def("complete", &complete, "layout"_a, "extras"_a, "written"_a, "sync"_a,
           "Writes headers, the index, other files and checksums, after all ranks have written.\n\n"
           "``extras`` has the names and contents of the other files; ``written`` has each rank's "
           "``WrittenFiles.tables``. Raises OSError, and Corrupt if a file does not have its size.")
      .def("complete_version", &complete_version, "delta"_a, "sync"_a,
           "Completes a directory to which ``Delta.write_files`` has written. Raises as "
           "``complete`` does.")
      .def(
          "link_unchanged",
          [](ModelSave& self, const os::Directory& base, bool sync) {
            directory::Warnings warnings;
            without_gil([&] { return self.link_unchanged(base, sync, warnings); });
            warn(warnings);
          },
          "base"_a, "sync"_a,
          "Replaces each file that ``base`` contains with the same name and bytes by a hard link. "
          "Warns of a file that cannot be linked. Raises OSError.")
      .def(
          "write_delta",
          [](const ModelSave& self, const os::Directory& base, const FileName& name, bool sync) {
            without_gil([&] {
              return engine::write_delta(engine::Context::process(), base, name, self.directory(),
                                         sync);
            });
          },
          "base"_a, "name"_a, "sync"_a,
          "Writes the delta from ``base``, which ``name`` names in messages, to the directory.\n\n"
          "Raises OSError, ValueError if ``base`` has no checksums, and Corrupt if a file of "
          "either directory does not match them.")
      .def(
          "publish",
          [](ModelSave& save, bool sync) {
            directory::Warnings warnings;
            const auto outcome = without_gil([&] { return save.publish(sync, warnings); });
            warn(warnings);
            raise_unpublished(outcome);
          },
          "sync"_a, "Gives the directory its name. Raises OSError and DurabilityUncertain.")
      .def(
          "discard",
          [](ModelSave& save) {
            run_and_warn([&](directory::Warnings& warnings) { save.discard(warnings); });
          },
          "Removes the directory. Does nothing after ``publish``.");
  bind_assemblies(module);
}

}  // namespace torch_ckpt::python
