#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "planning/changes.h"
#include "planning/global_plan.h"
#include "planning/plan_metadata.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/results.h"
#include "python/text.h"
#include "torch/flat_state.h"
#include "torch/tensor_checks.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using planning::GlobalPlan;
using planning::RankState;
using planning::StateTemplate;
using tensors::FlatState;

// A plan, and the metadata of its saves, which come one after the other.
struct SavePlan {
  explicit SavePlan(GlobalPlan made) : plan(std::move(made)), metadata(plan) {}

  const GlobalPlan plan;
  planning::PlanMetadata metadata;
};

std::unique_ptr<SavePlan> plan_of(const std::vector<std::pair<py::bytes, py::bytes>>& told) {
  std::vector<std::pair<std::string_view, std::string_view>> texts(told.begin(), told.end());
  return std::make_unique<SavePlan>(without_gil([&]() -> Result<GlobalPlan> {
    std::unordered_map<std::string_view, std::shared_ptr<const StateTemplate>> templates;
    std::vector<RankState> states;
    for (const auto& [of_template, of_rank] : texts) {
      auto& known = templates[of_template];
      if (!known) {
        auto made = StateTemplate::decode(of_template);
        if (!made) return std::move(made).error();
        known = std::make_shared<const StateTemplate>(std::move(*made));
      }
      auto state = RankState::decode(known, of_rank);
      if (!state) return std::move(state).error();
      states.push_back(std::move(*state));
    }
    return GlobalPlan::of(std::move(states));
  }));
}

/// The template of a state, and what else a plan depends on.
py::tuple told_of(const FlatState& state) {
  const RankState here = state.to_rank_state();
  const auto [of_template, of_rank] =
      without_gil([&] { return std::pair(here.state().encode(), here.encode()); });
  return py::make_tuple(py::bytes(of_template), py::bytes(of_rank));
}

using Written = std::vector<const WrittenFiles*>;

std::vector<planning::WrittenFiles> files_of(const Written& written) {
  std::vector<planning::WrittenFiles> files;
  for (const WrittenFiles* of_rank : written) files.emplace_back(of_rank->files);
  return files;
}

py::bytes encoded(SavePlan& save, const Written& written, const index::CheckpointIndex* rest,
                  const std::vector<std::pair<std::string, std::optional<py::str>>>& meta,
                  const std::string& version, const std::string& phases) {
  index::MetadataExtras extras;
  extras.version = version;
  extras.phases = phases;
  for (const auto& [name, value] : meta) {
    extras.storage_meta.emplace_back(name, value ? std::optional(bytes_of(*value)) : std::nullopt);
  }
  const auto pieces =
      without_gil([&] { return save.metadata.encode(files_of(written), rest, extras); });
  std::size_t size = 0;
  for (const std::string_view piece : pieces) size += piece.size();
  auto whole = py::reinterpret_steal<py::bytes>(
      PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
  if (!whole) throw py::error_already_set();
  char* out = PyBytes_AS_STRING(whole.ptr());
  const ReleasedGil released;
  for (const std::string_view piece : pieces) out = std::ranges::copy(piece, out).out;
  return whole;
}

py::tuple changes_of(const SavePlan& save, const Written& before, const Written& now,
                     const py::str& counter) {
  const std::string ignored = bytes_of(counter);
  const planning::Changes changes = without_gil([&] {
    return planning::changes_between(save.plan, files_of(before), files_of(now), ignored);
  });
  py::dict unchanged;
  for (const auto& [group, names] : changes.unchanged) {
    py::list texts;
    for (const std::uint32_t name : names) texts.append(text_of(save.plan.name(name)));
    unchanged[text_of(group)] = texts;
  }
  py::list changed;
  for (const std::string_view group : changes.changed) changed.append(text_of(group));
  const py::object moved =
      changes.moved ? py::object(text_of(save.plan.name(*changes.moved))) : py::none();
  return py::make_tuple(moved, changed, unchanged);
}

/// The path of each name in the nested state dict.
py::dict paths_of(const SavePlan& save) {
  const GlobalPlan& plan = save.plan;
  py::dict paths;
  for (std::size_t i = 0; i < plan.names(); ++i) {
    const std::string_view name = plan.name(i);
    py::list path;
    std::size_t at = 0;
    for (const auto& part : plan.first_template(i).path(plan.first_row(i))) {
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

/// The names of what a rank is taken to have in common with others: plain tensors, then objects.
py::list replicated_names(const SavePlan& save, std::size_t rank) {
  const GlobalPlan& plan = save.plan;
  if (rank >= plan.ranks()) throw py::index_error("no rank of that number");
  py::list names;
  const StateTemplate& here = plan.of_rank(rank).state();
  for (const auto kind : {StateTemplate::Kind::tensor, StateTemplate::Kind::object}) {
    for (std::size_t i = 0; i < here.size(); ++i) {
      if (here.row(i).kind == kind) names.append(text_of(here.name(i)));
    }
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
  module.def("told_of", &told_of, py::arg("state"));
  module.def("sources_of", &sources_of, py::arg("state"), py::arg("rows"));
  py::class_<SavePlan>(module, "GlobalPlan")
      .def(py::init(&plan_of), py::arg("told"))
      .def(
          "owned",
          [](const SavePlan& save, std::size_t rank) {
            if (rank >= save.plan.ranks()) throw py::index_error("no rank of that number");
            const auto rows = save.plan.owned(rank);
            return std::vector<std::uint32_t>(rows.begin(), rows.end());
          },
          py::arg("rank"))
      .def(
          "plans",
          [](const SavePlan& save, const py::str& name) { return save.plan.plans(bytes_of(name)); },
          py::arg("name"))
      .def("replicated_names", &replicated_names, py::arg("rank"))
      .def("paths", &paths_of)
      .def("changes", &changes_of, py::arg("before"), py::arg("now"), py::arg("counter"))
      .def(
          "describe", [](SavePlan& save) { save.metadata.describe(); }, NoGil())
      .def("encode", &encoded, py::arg("written"), py::arg("rest"), py::arg("storage_meta"),
           py::arg("version"), py::arg("phases"));
}

}  // namespace torch_ckpt::python
