#include <pybind11/stl.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "planning/safetensors_layout.h"
#include "planning/state_template.h"
#include "python/gil.h"
#include "python/memory.h"
#include "python/types.h"
#include "torch/extents.h"
#include "torch/fingerprint.h"
#include "torch/flat_state.h"
#include "torch/source_watch.h"
#include "torch/tensor_checks.h"
#include "torch/tensor_save.h"
#include "torch_python/bindings.h"
#include "torch_python/casters.h"

namespace py = pybind11;
using namespace py::literals;

namespace torch_ckpt::python {
namespace {

using planning::RankState;
using tensors::FlatState;
using tensors::PythonRef;
using tensors::SaveSources;
using tensors::ScalarType;
using tensors::SourceWatch;
using tensors::Tensor;

AnyObject object_of(PythonRef object) { return py::reinterpret_steal<AnyObject>(object.release()); }

const FlatState::Row& row_of(const FlatState& state, std::size_t number) {
  if (number >= state.size()) throw py::index_error("row number out of range");
  return state.row(number);
}

using HashLayout = py::typing::Callable<std::uint64_t(AnyObject, AnyObject)>;

std::pair<Bytes, Bytes> contents_of(FlatState& state, const HashLayout& hash_layout) {
  std::vector<std::uint64_t> layouts;
  for (const FlatState::Layout& layout : state.layouts()) {
    layouts.push_back(
        hash_layout(py::handle(layout.mesh.get()), py::handle(layout.placements.get()))
            .cast<std::uint64_t>());
  }
  const RankState here = state.to_rank_state(layouts);
  return without_gil([&] { return std::pair(Bytes{here.state().encode()}, Bytes{here.encode()}); });
}

/// Adds a tensor, or an object with a contiguous buffer.
void add_source(SaveSources& sources, std::string name, const py::handle& value) {
  if (Tensor::is_tensor(value.ptr())) return sources.add(std::move(name), Tensor::of(value.ptr()));
  auto memory = std::make_shared<const Memory>(value, PyBUF_STRIDES);
  if (!memory->is_contiguous()) {
    throw py::value_error(name + ": the buffer must be contiguous in memory");
  }
  sources.add(std::move(name), memory->bytes(), memory);
}

std::span<const std::uint32_t> numbers_of(const py::bytes& assignment) {
  const std::string_view bytes = assignment;
  return {reinterpret_cast<const std::uint32_t*>(bytes.data()),
          bytes.size() / sizeof(std::uint32_t)};
}

py::bytes encoded(const std::vector<std::uint32_t>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(numbers[0])};
}

py::typing::List<std::tuple<int, int, AnyObject, int>> values_to_convert(
    const FlatState& state, const py::bytes& assignment) {
  py::typing::List<std::tuple<int, int, AnyObject, int>> values;
  for (const std::uint32_t item : state.items_to_convert(numbers_of(assignment))) {
    const std::uint32_t number = state.row_of_item(item);
    const FlatState::Row& row = state.row(number);
    const auto value = row.kind == FlatState::Kind::dtensor
                           ? py::reinterpret_steal<AnyObject>(row.local.to_python())
                           : object_of(state.value(row));
    values.append(py::make_tuple(item, number, value, state.part_of_item(item)));
  }
  return values;
}

SaveSources sources_of(const FlatState& state, const py::bytes& assignment, bool with_names) {
  const auto items = numbers_of(assignment);
  SaveSources sources;
  sources.reserve(items.size());
  for (const std::uint32_t item : items) {
    const std::uint32_t number = state.row_of_item(item);
    const FlatState::Row& row = row_of(state, number);
    std::string name = with_names ? std::string(state.name(number)) : std::string();
    if (row.has_tensor()) {
      sources.add(std::move(name), row.local);
    } else if (row.description) {
      const auto& part = row.description->parts.at(state.part_of_item(item));
      add_source(sources, std::move(name), part.value.get());
    } else {
      add_source(sources, std::move(name), row.value.get());
    }
  }
  return sources;
}

using Numbers = std::vector<std::int64_t>;

void describe(FlatState& state, std::size_t number, ScalarType dtype, bool requires_grad,
              const Numbers& size,
              const std::optional<std::vector<std::pair<Numbers, Numbers>>>& boxes,
              std::uint64_t layout) {
  row_of(state, number);
  FlatState::Description description{boxes.has_value(), dtype, layout, {}};
  if (boxes) {
    for (const auto& [offsets, sizes] : *boxes) state.add_part(description, offsets, sizes);
  } else {
    state.add_part(description, Numbers(size.size()), size);
  }
  state.describe(number, requires_grad, size, std::move(description));
}

/// Returns a contiguous tensor with the elements as `dtype`: the tensor itself, or a copy.
Tensor contiguous(const Tensor& tensor, ScalarType dtype) {
  const auto object = py::reinterpret_steal<py::object>(tensor.to_python());
  const tensors::NoGrad no_grad;
  const py::object resolved = object.attr("resolve_conj")().attr("resolve_neg")();
  return Tensor::of(resolved.attr("to")(dtype).attr("contiguous")().ptr());
}

/// Adds this rank's part of a tensor. cast: the dtype in which floating-point tensors are stored,
/// or None.
void add_part(SaveSources& sources, const std::string& name, Tensor tensor,
              const tensors::Extents& sizes, const tensors::Extents& offsets,
              const std::optional<ScalarType>& cast) {
  const format::Dtype* const own = tensor.dtype().known();
  const bool is_cast = cast && planning::stored_dtype(own, cast->known()) != own;
  const ScalarType stored = is_cast ? *cast : tensor.dtype();
  if (tensor.is_cuda()) tensor = contiguous(tensor, stored);
  sources.add_part(name, tensor, sizes, offsets, stored);
}

SaveSources parts_of(const FlatState& state, const py::bytes& assignment, const py::bytes& places,
                     const std::optional<ScalarType>& cast) {
  const auto numbers = numbers_of(assignment);
  SaveSources sources;
  sources.set_places(planning::RankPlaces::decode(places).value());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const FlatState::Row& row = row_of(state, numbers[i]);
    if (!row.has_tensor()) {
      throw py::value_error(std::string(state.name(numbers[i])) +
                            ": safetensors files cannot hold a value of this type");
    }
    tensors::Extents sizes = tensors::unsigned_of(row.local.sizes());
    tensors::Extents offsets(sizes.size(), 0);
    if (row.kind == FlatState::Kind::dtensor) {
      const auto whole = state.extents().at(row.size);
      const auto begin = state.extents().at(state.box(row).offsets);
      sizes.assign(whole.begin(), whole.end());
      offsets.assign(begin.begin(), begin.end());
    }
    add_part(sources, std::string(state.name(numbers[i])), row.local, sizes, offsets, cast);
  }
  return sources;
}

/// Returns a method that returns the numbers of the values for which `is_wanted` is true.
template <class IsWanted>
auto numbers_where(IsWanted is_wanted) {
  return [is_wanted](const FlatState& state) {
    std::vector<std::size_t> numbers;
    for (std::size_t i = 0; i < state.size(); ++i) {
      if (!state.row(i).is_removed && is_wanted(state.row(i))) numbers.push_back(i);
    }
    return numbers;
  };
}

}  // namespace

void bind_state(py::module_& module) {
  using Kind = FlatState::Kind;
  using Row = FlatState::Row;
  py::class_<SourceWatch, std::shared_ptr<SourceWatch>>(
      module, "SourceWatch",
      "Tensors whose contents are read later. Detects writes to them in the meantime.\n\n"
      "It compares torch's version counters, which operations on the tensors increment. It does "
      "not see writes through ``.data`` or NumPy, nor the writes of all fused optimizers (except "
      "to their ``step`` tensors).")
      .def(py::init<>())
      .def(
          "add",
          [](SourceWatch& watch, const Name& name, const Tensor& tensor, const AnyObject& holder,
             const py::str& attribute) {
            if (holder.is_none()) return watch.add(name, tensor);
            watch.add(name, tensor, PythonRef::to(holder.ptr()), PythonRef::to(attribute.ptr()));
          },
          "name"_a, "tensor"_a, "holder"_a = py::none(), "attribute"_a = "",
          "Adds a tensor under a fully qualified name, which several tensors may share.\n\n"
          "``holder`` is the object that has the tensor as its attribute ``attribute`` and may "
          "replace it by another tensor; None if the tensor cannot be replaced.")
      .def(
          "changed",
          [](const SourceWatch& watch) {
            return list_of(watch.changed(), [](const std::string& name) { return text_of(name); });
          },
          "Names of the tensors that were written to, or replaced, since they were added.")
      .def_property_readonly(
          "devices", [](const SourceWatch& watch) { return devices_of(watch.devices()); },
          "The CUDA devices of the tensors.")
      .def("release", &SourceWatch::release, "Releases the tensors and their holders.");
  module.def(
      "fingerprint", [](const Tensor& tensor) { return tensors::fingerprint_of(tensor, true); },
      "tensor"_a, NoGil(),
      "A CRC-32 of the elements of a tensor, or 0 if the tensor is not plain.\n\n"
      "The CRC is independent of the tensor's device and strides.");
  py::class_<SaveSources>(
      module, "SaveSources",
      "The values to write: plain tensors, and objects with a contiguous buffer.")
      .def(py::init<>())
      .def(
          "add",
          [](SaveSources& sources, Name name, const AnyObject& value) {
            add_source(sources, std::move(name), value);
          },
          "name"_a, "value"_a, "Adds a value. The name is used only for a separation hint.")
      .def(
          "set_places",
          [](SaveSources& sources, const py::bytes& places) {
            sources.set_places(planning::RankPlaces::decode(places).value());
          },
          "places"_a, "Sets the files of which this rank writes parts, and the place of each part.")
      .def(
          "add_part",
          [](SaveSources& sources, const Name& name, const Tensor& tensor,
             const tensors::Extents& sizes, const tensors::Extents& offsets,
             const std::optional<ScalarType>& cast) {
            add_part(sources, name, tensor, sizes, offsets, cast);
          },
          "name"_a, "tensor"_a, "sizes"_a, "offsets"_a, "cast"_a,
          "Adds this rank's part of a tensor of size ``sizes``, which begins at ``offsets``.\n\n"
          "Its place is the next one. Floating-point elements are stored with the dtype ``cast``.")
      .def_property_readonly("nbytes", &SaveSources::bytes)
      .def(
          "devices", [](const SaveSources& sources) { return devices_of(sources.devices()); },
          "The CUDA devices of the tensors.");
  py::class_<FlatState>(
      module, "FlatState",
      "A state dict as rows, one for each value, with the names that torch's planners give "
      "them.\n\n"
      "``local_chunks`` returns the ChunkStorageMetadata of this rank's shards of a DTensor. With "
      "``watch``, plain tensors and DTensors are held by aliases and added to the watch. Raises "
      "ValueError if two values have the same name.")
      .def(py::init([](const AnyObject& state_dict, const LocalChunks& local_chunks,
                       std::shared_ptr<SourceWatch> watch) {
             return std::make_unique<FlatState>(state_dict.ptr(), local_chunks.ptr(),
                                                std::move(watch));
           }),
           "state_dict"_a, "local_chunks"_a, "watch"_a = nullptr)
      .def("contents", &contents_of, "hash_layout"_a,
           "Encodes the parts of a state dict on which the plan of a save depends.\n\n"
           "The first part is usually identical on several ranks: names, kinds, dtypes and sizes. "
           "The second part has the offsets, sizes and layouts of this rank's parts of sharded "
           "tensors. ``hash_layout`` returns 64 bits, given a mesh and placements.")
      .def("items_to_convert", &values_to_convert, "assignment"_a,
           "Items that must be converted with ``set_item`` before ``sources``: objects, tensors "
           "that must be cloned or pickled, and the parts of described tensors.\n\n"
           "Returns the number of each item, its row, the value of the row, and the number of the "
           "item among the items of its row. The value of a DTensor is its local tensor. "
           "``assignment`` has the numbers of items, as ``RankPlan.items`` returns them.")
      .def("sources", &sources_of, "assignment"_a, "with_names"_a)
      .def("parts", &parts_of, "assignment"_a, "places"_a, "cast"_a,
           "This rank's parts of tensors, for files that several ranks write.\n\n"
           "``places`` has the places of the tensors; see ``SafetensorsLayout.places_of_plan``. "
           "Raises ValueError for a value that is not a tensor.")
      .def(
          "fingerprints",
          [](const FlatState& state, bool whole) {
            return encoded(without_gil([&] { return state.fingerprints(whole); }));
          },
          "whole"_a,
          "A fingerprint of 4 bytes for each replicated tensor; 0 for one that is not plain.")
      .def(
          "checksums",
          [](const FlatState& state, const py::bytes& numbers) {
            return encoded(without_gil([&] { return state.checksums(numbers_of(numbers)); }));
          },
          "numbers"_a,
          "A CRC-32 of 4 bytes for each of the given items; 0 for tensors that are not plain.")
      .def("names",
           [](const FlatState& state) {
             return list_of(std::views::iota(std::size_t{0}, state.size()),
                            [&](std::size_t i) { return text_of(state.name(i)); });
           })
      .def(
          "name",
          [](const FlatState& state, std::size_t row) {
            row_of(state, row);
            return text_of(state.name(row));
          },
          "row"_a)
      .def(
          "value",
          [](const FlatState& state, std::size_t row) {
            return object_of(state.value(row_of(state, row)));
          },
          "row"_a)
      .def(
          "path",
          [](const FlatState& state, std::size_t row) {
            return py::reinterpret_steal<Typed<"tuple[str | int, ...]">>(
                state.path(row_of(state, row)).release());
          },
          "row"_a)
      .def("tensor_bytes", &FlatState::tensor_bytes,
           "Size of all plain tensors and DTensors. A DTensor counts with the size of the complete "
           "tensor.")
      .def("objects", numbers_where([](const Row& row) { return row.kind == Kind::object; }),
           "Numbers of the values that are saved as objects.")
      .def("described_by_torch",
           numbers_where([](const Row& row) { return row.kind == Kind::other; }),
           "Numbers of the tensors that only torch can describe.")
      .def("describe", &describe, "row"_a, "dtype"_a, "requires_grad"_a, "size"_a, "boxes"_a,
           "layout"_a,
           "Sets the properties of a tensor that only torch can describe.\n\n"
           "``boxes`` has the offsets and sizes of its parts on this rank; None for a replica. A "
           "row with several parts has several items. ``layout`` is a hash of a mesh and "
           "placements; 0 without a mesh.")
      .def("on_meta",
           numbers_where([](const Row& row) { return row.local.defined() && row.local.is_meta(); }),
           "Rows of plain tensors and DTensors on the meta device.")
      .def(
          "add",
          [](FlatState& state, const Name& name,
             const py::typing::Tuple<AnyObject, py::ellipsis>& path,
             const AnyObject& value) { state.add(name, path.ptr(), value.ptr()); },
          "name"_a, "path"_a, "value"_a)
      .def(
          "remove",
          [](FlatState& state, std::size_t row) {
            row_of(state, row);
            state.remove(row);
          },
          "row"_a)
      .def(
          "replace",
          [](FlatState& state, std::size_t row, const AnyObject& value) {
            row_of(state, row);
            state.replace(row, value.ptr());
          },
          "row"_a, "value"_a)
      .def(
          "set_part",
          [](FlatState& state, std::size_t row, std::size_t part,
             const Typed<"torch.Tensor">& value) {
            row_of(state, row);
            state.set_part(row, part, value.ptr());
          },
          "row"_a, "part"_a, "value"_a, "Sets the value of a part of a described tensor.")
      .def(
          "set_item",
          [](FlatState& state, std::size_t item, const AnyObject& value) {
            state.set_item(item, value.ptr());
          },
          "item"_a, "value"_a);
}

}  // namespace torch_ckpt::python
