#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "index/metadata_encoder.h"
#include "planning/global_plan.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/text.h"
#include "torch/flat_state.h"
#include "torch/tensor_checks.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using planning::GlobalPlan;
using planning::StateTemplate;
using tensors::FlatState;

// File, offset, length and CRC-32 of each stored item of a rank.
using Places = std::vector<std::tuple<std::string, std::uint64_t, std::uint64_t, std::uint32_t>>;

std::unique_ptr<GlobalPlan> plan_of(const std::vector<py::bytes>& templates) {
  std::vector<std::string> texts(templates.begin(), templates.end());
  return std::make_unique<GlobalPlan>(without_gil([&]() -> Result<GlobalPlan> {
    std::vector<StateTemplate> decoded;
    for (const std::string& text : texts) {
      auto made = StateTemplate::decode(text);
      if (!made) return std::move(made).error();
      decoded.push_back(std::move(*made));
    }
    return GlobalPlan::of(std::move(decoded));
  }));
}

py::bytes encoded(const GlobalPlan& plan, const std::vector<Places>& places,
                  const std::map<std::string, std::string>& tables,
                  const index::CheckpointIndex* rest,
                  const std::vector<std::pair<std::string, std::optional<py::str>>>& meta,
                  const std::string& version, const std::string& phases) {
  index::MetadataExtras extras;
  extras.version = version;
  extras.phases = phases;
  for (const auto& [name, value] : meta) {
    extras.storage_meta.emplace_back(name, value ? std::optional(bytes_of(*value)) : std::nullopt);
  }
  const std::string made = without_gil([&] {
    std::vector<std::vector<planning::StoredPart>> stored(places.size());
    for (std::size_t rank = 0; rank < places.size(); ++rank) {
      for (const auto& [file, offset, length, crc] : places[rank]) {
        stored[rank].push_back({file, offset, length});
      }
    }
    index::CheckpointIndex index = plan.index(stored, rest);
    for (const auto& [file, table] : tables) index.set_table(file, table);
    return index::encode_metadata(index, extras);
  });
  return py::bytes(made);
}

/// By name: whether it is a number or has one element, and its CRC-32, or of shards their offsets
/// and CRC-32s.
py::dict fingerprints_of(const GlobalPlan& plan, const std::vector<Places>& places) {
  std::map<std::string_view, std::vector<std::pair<std::vector<std::int64_t>, std::uint32_t>>>
      shards;
  py::dict found;
  for (std::size_t rank = 0; rank < plan.ranks(); ++rank) {
    const StateTemplate& here = plan.of_rank(rank);
    const auto rows = plan.owned(rank);
    for (std::size_t i = 0; i < rows.size() && i < places[rank].size(); ++i) {
      const StateTemplate::Row& row = here.row(rows[i]);
      const std::uint32_t crc = std::get<3>(places[rank][i]);
      const std::string_view name = here.name(rows[i]);
      if (row.kind == StateTemplate::Kind::shard) {
        const auto offsets = here.extents(row.offsets);
        shards[name].push_back({{offsets.begin(), offsets.end()}, crc});
        continue;
      }
      const auto sizes = here.extents(row.sizes);
      const bool is_number =
          row.kind == StateTemplate::Kind::object ||
          std::ranges::all_of(sizes, [](std::int64_t size) { return size == 1; }) ||
          std::ranges::any_of(sizes, [](std::int64_t size) { return size == 0; });
      found[text_of(name)] = py::make_tuple(is_number, crc);
    }
  }
  for (auto& [name, parts] : shards) {
    std::ranges::sort(parts);
    py::tuple all(parts.size());
    for (std::size_t i = 0; i < parts.size(); ++i) {
      all[i] = py::make_tuple(tuple_of(parts[i].first), parts[i].second);
    }
    found[text_of(name)] = py::make_tuple(false, all);
  }
  return found;
}

/// The path of each name in the nested state dict.
py::dict paths_of(const GlobalPlan& plan) {
  py::dict paths;
  for (std::size_t i = 0; i < plan.names(); ++i) {
    const std::string_view name = plan.name(i);
    py::list path;
    std::size_t at = 0;
    for (const auto& part : plan.first_rank(i).path(plan.first_row(i))) {
      const std::string_view word = name.substr(at, part.bytes);
      at += part.bytes + 1;
      if (part.is_number) {
        path.append(py::int_(std::stoll(std::string(word))));
      } else {
        path.append(text_of(word));
      }
    }
    paths[text_of(name)] = py::tuple(path);
  }
  return paths;
}

/// The names of a rank's plain tensors.
py::list plain_names(const GlobalPlan& plan, std::size_t rank) {
  if (rank >= plan.ranks()) throw py::index_error("no rank of that number");
  py::list names;
  const StateTemplate& here = plan.of_rank(rank);
  for (std::size_t i = 0; i < here.size(); ++i) {
    if (here.row(i).kind == StateTemplate::Kind::tensor) names.append(text_of(here.name(i)));
  }
  return names;
}

/// Names and values of rows: tensors that the engine writes as they are, and the numbers of those
/// that are other values, which Python turns into something to write.
py::tuple sources_of(const FlatState& state, const std::vector<std::size_t>& rows) {
  py::list names(rows.size());
  py::list values(rows.size());
  py::list others;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] >= state.size()) throw py::index_error("no row of that number");
    const FlatState::Row& row = state.row(rows[i]);
    names[i] = text_of(state.name(rows[i]));
    values[i] = row.kind == FlatState::Kind::dtensor
                    ? py::reinterpret_steal<py::object>(THPVariable_Wrap(row.local))
                    : py::reinterpret_borrow<py::object>(row.value.get());
    const bool is_written_as_it_is = row.kind != FlatState::Kind::other &&
                                     tensors::is_plain(row.local) &&
                                     (!row.local.is_cuda() || tensors::is_dense(row.local));
    if (!is_written_as_it_is) others.append(i);
  }
  return py::make_tuple(names, values, others);
}

}  // namespace

void bind_plan(py::module_& module) {
  module.def(
      "template_of", [](const FlatState& state) { return py::bytes(state.to_template().encode()); },
      py::arg("state"));
  module.def("sources_of", &sources_of, py::arg("state"), py::arg("rows"));
  py::class_<GlobalPlan>(module, "GlobalPlan")
      .def(py::init(&plan_of), py::arg("templates"))
      .def(
          "owned",
          [](const GlobalPlan& plan, std::size_t rank) {
            if (rank >= plan.ranks()) throw py::index_error("no rank of that number");
            const auto rows = plan.owned(rank);
            return std::vector<std::uint32_t>(rows.begin(), rows.end());
          },
          py::arg("rank"))
      .def(
          "plans",
          [](const GlobalPlan& plan, const py::str& name) { return plan.plans(bytes_of(name)); },
          py::arg("name"))
      .def("plain_names", &plain_names, py::arg("rank"))
      .def("paths", &paths_of)
      .def("fingerprints", &fingerprints_of, py::arg("places"))
      .def("encode", &encoded, py::arg("places"), py::arg("tables"), py::arg("rest"),
           py::arg("storage_meta"), py::arg("version"), py::arg("phases"));
}

}  // namespace torch_ckpt::python
