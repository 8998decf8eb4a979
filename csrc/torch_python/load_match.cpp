#include "torch/load_match.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "index/checkpoint_index.h"
#include "python/list.h"
#include "python/text.h"
#include "torch/flat_state.h"
#include "torch_python/bindings.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using index::CheckpointIndex;
using tensors::FlatState;
using tensors::LoadMatch;
using tensors::SizeRule;

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
  throw py::value_error("'" + word + "' is not a size rule");
}

/// Returns name, stored size and requested size of each tensor with this status whose sizes differ.
py::list other_sizes(const LoadMatch& match, const std::string& status) {
  py::list found;
  for (const std::size_t row : match.rows_with(status_named(status))) {
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

/// Returns name, stored dtype and requested dtype of each tensor whose dtypes differ.
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

/// Returns the fields of a torch_ckpt.loading.reading.Row for one target.
py::tuple row_of(const LoadMatch& match, std::size_t number) {
  if (number >= match.targets().size())
    throw py::index_error("there is no target with this number");
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

/// Returns name, stored dtype and requested dtype of each target whose dtypes differ.
py::list conversions_of(const LoadMatch& match) {
  py::list found;
  for (const tensors::TensorTarget& target : match.targets()) {
    if (target.scalar_type == target.tensor.scalar_type()) continue;
    found.append(
        py::make_tuple(text_of(target.name), target.scalar_type, target.tensor.scalar_type()));
  }
  return found;
}

/// Returns the numbers of the CUDA devices that hold targets.
std::set<int> devices_of(const LoadMatch& match) {
  std::set<int> devices;
  for (const tensors::TensorTarget& target : match.targets()) {
    if (target.tensor.is_cuda()) devices.insert(target.tensor.get_device());
  }
  return devices;
}

/// Returns the stored bytes of all targets.
std::uint64_t bytes_of(const LoadMatch& match) {
  std::uint64_t bytes = 0;
  for (const tensors::TensorTarget& target : match.targets()) {
    bytes += target.region_bytes(c10::elementSize(target.scalar_type));
  }
  return bytes;
}

}  // namespace

void bind_load_match(py::module_& module) {
  py::class_<LoadMatch>(module, "LoadMatch")
      .def(py::init([](const FlatState& state, const CheckpointIndex& index,
                       const std::string& rule, const std::vector<bool>& chosen) {
             if (!chosen.empty() && chosen.size() != state.size()) {
               throw py::value_error("chosen must be empty or have one value per row");
             }
             return std::make_unique<LoadMatch>(state, index, rule_named(rule), chosen);
           }),
           py::arg("state"), py::arg("index"), py::arg("rule"), py::arg("chosen"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def(
          "rows_with",
          [](const LoadMatch& match, const std::string& status) {
            return match.rows_with(status_named(status));
          },
          py::arg("status"))
      .def(
          "names_with",
          [](const LoadMatch& match, const std::string& status) {
            return names_of(match.state(), match.rows_with(status_named(status)));
          },
          py::arg("status"))
      .def("pending",
           [](const LoadMatch& match) { return match.rows_with(LoadMatch::Status::pending); })
      .def(
          "set_status",
          [](LoadMatch& match, std::size_t row, const std::string& status) {
            if (row >= match.state().size())
              throw py::index_error("there is no row with this number");
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
