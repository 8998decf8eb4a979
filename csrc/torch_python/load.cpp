#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "planning/region.h"
#include "planning/strides.h"
#include "python/folder.h"
#include "python/gil.h"
#include "python/list.h"
#include "python/reads.h"
#include "python/types.h"
#include "python/waiting.h"
#include "torch/load_state.h"
#include "torch/load_waves.h"
#include "torch_python/bindings.h"
#include "torch_python/casters.h"

namespace py = pybind11;
using namespace py::literals;

namespace torch_ckpt::python {
namespace {

using index::CheckpointIndex;
using tensors::FlatState;
using tensors::LoadState;
using tensors::MatchReport;
using tensors::ScalarType;
using tensors::SizeRule;
using tensors::TensorRead;
using tensors::TensorReads;
using Numbers = std::vector<std::int64_t>;

/// One of the reads, for Python.
struct NumberedRead {
  const TensorReads* reads;
  std::size_t number;

  const TensorRead& operator*() const { return reads->reads()[number]; }
  const TensorRead* operator->() const { return &**this; }
};

NumberedRead read_of(const TensorReads& reads, std::size_t number) {
  if (number >= reads.reads().size()) throw py::index_error("there is no read of this number");
  return {&reads, number};
}

void add_read(TensorReads& reads, const Name& name, const Name& file, const Number& offset,
              const Number& length, ScalarType dtype, const Numbers& sizes, const Numbers& offsets,
              const Numbers& lengths, const tensors::Tensor& tensor, bool is_transformed) {
  TensorRead read =
      tensors::make_read({name, reads.file_number(file), number_of(offset, name, "offset"),
                          number_of(length, name, "length")},
                         dtype, sizes, offsets, lengths, tensor);
  read.is_transformed = is_transformed;
  reads.add(std::move(read));
}

/// Increments the versions of the tensors that a load has changed, when it ends: autograd does not
/// see the engine's writes.
class MarkedAsChanged {
 public:
  MarkedAsChanged(const TensorReads& reads, const tensors::LoadWaves& waves)
      : reads_(reads), waves_(waves) {}
  ~MarkedAsChanged() {
    try {
      const py::list changed = list_of(waves_.changed(), [this](std::size_t number) {
        return py::handle(reads_.reads()[number].tensor.object());
      });
      py::module_::import("torch.autograd.graph").attr("increment_version")(changed);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("torch_ckpt, which marks loaded tensors as changed");
    }
  }
  MarkedAsChanged(const MarkedAsChanged&) = delete;
  MarkedAsChanged& operator=(const MarkedAsChanged&) = delete;

 private:
  const TensorReads& reads_;
  const tensors::LoadWaves& waves_;
};

std::vector<std::size_t> load(const TensorReads& reads, const engine::Folder& directory,
                              const Tables& tables, const ReadOptions& options,
                              const Progress& progress, const Events& ready) {
  tensors::LoadWaves waves(
      directory, files_with_tables(reads.files(), tables), load_options(options, ready),
      [&progress](engine::LoadSession& session, std::uint64_t done_before) {
        wait_for(session, progress, done_before);
      },
      reads.reads());
  const MarkedAsChanged marked(reads, waves);
  return without_gil([&] { return waves.run(); });
}

/// Lets signal handlers run, while the GIL is held.
Result<> check_signals() {
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  return {};
}

auto names_of(const std::vector<std::string_view>& names) { return list_of(names, text_of); }

using Size = Typed<"torch.Size">;

Size size_of(const Numbers& sizes) {
  return py::object(py::module_::import("torch").attr("Size")(tuple_of(sizes)));
}

Typed<"torch.Tensor"> detached(const tensors::Tensor& tensor) {
  return py::object(py::reinterpret_steal<py::object>(tensor.to_python()).attr("detach")());
}

auto sizes_of(const std::vector<MatchReport::Sizes>& tensors) {
  return list_of(tensors, [](const MatchReport::Sizes& of) {
    return py::make_tuple(text_of(of.name), size_of(of.stored), size_of(of.wanted));
  });
}

template <auto Member, auto Convert>
auto converted() {
  return [](const MatchReport& report) { return Convert(report.*Member); };
}

Size size_of(const tensors::Extents& extents) { return size_of(tensors::signed_of(extents)); }

ObjectRead object_read(const LoadState& state, std::size_t row) {
  const CheckpointIndex::Shard& record = state.record(row);
  return {std::string(state.name(row)), std::string(state.file_of(record)), record.offset,
          record.length, py::reinterpret_steal<py::object>(state.path(state.row(row)).release())};
}

void plan_box(const CheckpointIndex& index, const Name& name, const Numbers& offsets,
              const Numbers& sizes, const tensors::Tensor& target, TensorReads& reads) {
  const auto entry = index.find(name);
  if (!entry || !index.entries()[*entry].is_tensor) throw py::key_error(name);
  const std::size_t dims = index.extents(index.entries()[*entry].size).size();
  if (offsets.size() != dims || sizes.size() != dims) {
    throw py::value_error(name + ": the box does not have the tensor's number of dimensions");
  }
  tensors::plan_box(index, name, index.entries()[*entry], {offsets, sizes}, target, reads,
                    &check_signals);
}

void bind_reads(py::module_& module) {
  using Read = const NumberedRead&;
  py::class_<NumberedRead>(module, "TensorRead",
                           "One read of a ``TensorReads``: a region of a stored tensor, its "
                           "record, and the tensor that receives it.")
      .def_property_readonly("name", [](Read read) { return text_of(read->record.name); })
      .def_property_readonly(
          "file", [](Read read) { return text_of(read.reads->files().at(read->record.file)); })
      .def_property_readonly("offset", [](Read read) { return read->record.offset; })
      .def_property_readonly("length", [](Read read) { return read->record.length; })
      .def_property_readonly("dtype", [](Read read) { return read->dtype; })
      .def_property_readonly("sizes", [](Read read) { return size_of(read->record.sizes); })
      .def_property_readonly("region_offsets", [](Read read) { return size_of(read->offsets()); })
      .def_property_readonly("region_lengths", [](Read read) { return size_of(read->lengths()); })
      .def_property_readonly("tensor", [](Read read) { return detached(read->tensor); })
      .def_property_readonly(
          "is_transformed", [](Read read) { return read->is_transformed; },
          "True if a transform has changed the record, so that only torch can read it.");
  py::class_<TensorReads>(module, "TensorReads",
                          "Tensors to read from the files of one checkpoint.")
      .def(py::init<>())
      .def(
          "add", &add_read, "name"_a, "file"_a, "offset"_a, "length"_a, "dtype"_a, "sizes"_a,
          "region_offsets"_a, "region_lengths"_a, "tensor"_a, "is_transformed"_a = false,
          "Adds a region of a stored tensor.\n\n"
          "Raises Corrupt if the offset or the length is not a number of bytes, and ValueError if "
          "the region does not lie within the stored tensor, or ``tensor`` does not have its size.")
      .def("__len__", [](const TensorReads& reads) { return reads.reads().size(); })
      .def("__iter__",
           [](const py::object& reads) {
             return py::reinterpret_steal<py::typing::Iterator<NumberedRead>>(
                 PySeqIter_New(reads.ptr()));
           })
      .def("__getitem__", &read_of, "number"_a, py::keep_alive<0, 1>())
      .def(
          "split",
          [](TensorReads& reads, std::uint64_t max_bytes,
             const std::function<bool(py::str)>& can_split) {
            reads.split(max_bytes, [&](std::string_view file) { return can_split(text_of(file)); });
          },
          "max_bytes"_a, "can_split"_a,
          "Splits reads into targets of more than ``max_bytes`` along the first dimension.\n\n"
          "Splits only reads from files for whose names ``can_split`` returns True.")
      .def("subset", &TensorReads::subset, "numbers"_a)
      .def_property_readonly("stored_bytes", &TensorReads::stored_bytes)
      .def_property_readonly("digest", &TensorReads::digest,
                             "A checksum of which bytes of which files are read.")
      .def_property_readonly(
          "devices", [](const TensorReads& reads) { return devices_of(reads.devices()); },
          "The CUDA devices of the targets.")
      .def(
          "conversions",
          [](const TensorReads& reads) {
            std::vector<std::tuple<py::str, ScalarType, ScalarType>> found;
            for (const TensorRead& of : reads.reads()) {
              if (of.dtype == of.tensor.dtype()) continue;
              found.emplace_back(text_of(of.record.name), of.dtype, of.tensor.dtype());
            }
            return found;
          },
          "Name, stored dtype and target dtype of each read that converts the elements.")
      .def("load", &load, py::kw_only(), "directory"_a, "tables"_a, "options"_a,
           "progress"_a = py::none(), "ready"_a = Events{},
           "Fills the targets. Returns the numbers of the reads whose records only torch.load can "
           "read.\n\n"
           "``tables`` has the checksum table of each file. ``ready`` are devices and events; "
           "targets on a device are written after its events.");
  module.def("plan_box", &plan_box, "index"_a, "name"_a, "offsets"_a, "sizes"_a, "target"_a,
             "reads"_a,
             "Adds the reads of a box of a stored tensor into ``target``.\n\n"
             "Raises KeyError if there is no tensor of this name, and Corrupt if the checkpoint "
             "lacks a record or does not have the box completely.");
}

}  // namespace

void bind_load(py::module_& module) {
  bind_reads(module);
  py::enum_<SizeRule>(
      module, "SizeRule",
      "Permitted differences between the size of a tensor in the state dict and its stored size: "
      "none, larger dimensions in the state dict, or any sizes of as many dimensions.")
      .value("SAME", SizeRule::same)
      .value("GROWING", SizeRule::growing)
      .value("ANY", SizeRule::any);
  py::class_<MatchReport>(
      module, "MatchReport",
      "How a state dict compares with a checkpoint. See torch_ckpt.LoadReport for the lists.")
      .def_property_readonly("loaded", converted<&MatchReport::loaded, names_of>())
      .def_property_readonly("missing", converted<&MatchReport::missing, names_of>())
      .def_property_readonly("unexpected", converted<&MatchReport::unexpected, names_of>())
      .def_property_readonly("shapes", converted<&MatchReport::shapes, sizes_of>())
      .def_property_readonly("grown", converted<&MatchReport::grown, sizes_of>())
      .def_property_readonly("truncated", converted<&MatchReport::truncated, sizes_of>())
      .def_property_readonly("dtypes",
                             [](const MatchReport& report) {
                               return list_of(report.dtypes, [](const MatchReport::Dtypes& of) {
                                 return py::make_tuple(text_of(of.name), of.stored, of.wanted);
                               });
                             })
      .def_readonly("kinds", &MatchReport::kinds,
                    "Rows that are a tensor in the state dict and an object in the checkpoint, or "
                    "vice versa.")
      .def_property_readonly("loaded_keys", converted<&MatchReport::loaded_keys, names_of>(),
                             "Top-level keys with a value that is loaded.")
      .def_property_readonly("absent_keys", converted<&MatchReport::absent_keys, names_of>(),
                             "Top-level keys that contain values, none of which is loaded.");
  py::class_<LoadState, FlatState>(
      module, "LoadState",
      "The targets of a load: a flattened state dict, and what a checkpoint has for it.")
      .def(py::init([](const AnyObject& state_dict, const LocalChunks& local_chunks) {
             return std::make_unique<LoadState>(state_dict.ptr(), local_chunks.ptr());
           }),
           "state_dict"_a, "local_chunks"_a)
      .def(
          "match",
          [](LoadState& state, const CheckpointIndex& index, SizeRule rule,
             const std::optional<std::function<bool(py::str)>>& chosen) {
            std::function<bool(std::string_view)> is_chosen;
            if (chosen) {
              is_chosen = [&](std::string_view name) { return (*chosen)(text_of(name)); };
            }
            return state.match(index, rule, is_chosen);
          },
          "index"_a, "rule"_a, "chosen"_a, py::keep_alive<1, 2>(), py::keep_alive<0, 1>(),
          py::keep_alive<0, 2>(),
          "Compares each value with the entry of the same name.\n\n"
          "``chosen`` returns True for the names to load; None loads all.")
      .def("undescribed", &LoadState::undescribed,
           "Rows that are loaded as tensors and must be described before ``plan``.")
      .def(
          "plan",
          [](const LoadState& state, TensorReads& reads) {
            return state.plan(reads, &check_signals);
          },
          "reads"_a,
          "Adds the reads of all tensors. Returns the rows of the objects.\n\n"
          "Raises Corrupt if the checkpoint lacks a record or does not have a tensor completely.")
      .def(
          "is_transformed",
          [](const LoadState& state, std::size_t row) { return state.record(row).is_transformed; },
          "row"_a, "True if a transform has changed the record of an object in the plan.")
      .def("object_read", &object_read, "row"_a,
           "The read of an object in the plan. Its target is the value's path.")
      .def("loaded", &LoadState::loaded)
      .def("loaded_on_meta", &LoadState::loaded_on_meta,
           "Rows that are loaded and are tensors on the meta device.")
      .def("zero_unstored", &LoadState::zero_unstored,
           "Sets the elements to zero that lie outside the stored tensors.");
}

}  // namespace torch_ckpt::python
