#include "python/plan.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "planning/changes.h"
#include "planning/replicas.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/list.h"
#include "python/results.h"
#include "python/text.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using planning::GlobalPlan;

std::unique_ptr<PlanWithMetadata> plan_of(
    const std::vector<std::pair<py::bytes, py::bytes>>& encoded) {
  const std::vector<std::pair<std::string_view, std::string_view>> states(encoded.begin(),
                                                                          encoded.end());
  return std::make_unique<PlanWithMetadata>(
      without_gil([&] { return GlobalPlan::decode(states); }));
}

using Written = std::vector<const WrittenFiles*>;

std::vector<planning::WrittenFiles> files_of(const Written& written) {
  std::vector<planning::WrittenFiles> files;
  for (const WrittenFiles* of_rank : written) files.emplace_back(of_rank->files);
  return files;
}

index::EncodedMetadata encoded(
    PlanWithMetadata& save, const Written& written,
    const std::vector<std::pair<std::string, std::optional<py::str>>>& meta,
    const std::string& version, const std::string& phases) {
  index::MetadataExtras extras;
  extras.version = version;
  extras.phases = phases;
  for (const auto& [name, value] : meta) {
    extras.storage_meta.emplace_back(name, value ? std::optional(bytes_of(*value)) : std::nullopt);
  }
  return without_gil([&] { return save.metadata.encode(files_of(written), extras); });
}

py::tuple changes_of(const PlanWithMetadata& save, const Written& before, const Written& now,
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
  const py::object moved =
      changes.moved ? py::object(text_of(save.plan.name(*changes.moved))) : py::none();
  return py::make_tuple(moved, unchanged);
}

/// Encodes the numbers of items, as FlatState.sources accepts them.
py::bytes encoded_numbers(std::span<const std::uint32_t> numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size_bytes()};
}

/// Returns the name of each value that differs, and the ranks that have each version of it.
py::list differing_replicas(const PlanWithMetadata& save,
                            const std::vector<std::optional<py::bytes>>& fingerprints) {
  std::vector<std::string_view> of_ranks;
  for (const auto& of_rank : fingerprints) {
    of_ranks.push_back(of_rank ? std::string_view(*of_rank) : std::string_view());
  }
  const auto differing =
      without_gil([&] { return planning::differing_replicas(save.plan, of_ranks); });
  return list_of(differing, [](const planning::DifferingReplica& replica) {
    return py::make_tuple(text_of(replica.name), replica.groups);
  });
}

/// Returns the name of each differing copy, the ranks that have each version of it, and the ranks
/// of each mesh.
py::list differing_copies(const PlanWithMetadata& save, const std::vector<py::bytes>& checksums) {
  const std::vector<std::string_view> of_ranks(checksums.begin(), checksums.end());
  const auto differing =
      without_gil([&] { return planning::differing_copies(save.plan, of_ranks); });
  return list_of(differing, [](const planning::DifferingCopy& copy) {
    return py::make_tuple(text_of(copy.name), copy.groups, copy.meshes);
  });
}

}  // namespace

void bind_plan(py::module_& module) {
  py::class_<PlanWithMetadata>(module, "GlobalPlan")
      .def(py::init(&plan_of), py::arg("contents"))
      .def(
          "assignment",
          [](const PlanWithMetadata& save, std::size_t rank) {
            return encoded_numbers(save.plan.owned(rank));
          },
          py::arg("rank"))
      .def(
          "copies",
          [](const PlanWithMetadata& save, std::size_t rank) {
            return encoded_numbers(save.plan.copies(rank));
          },
          py::arg("rank"))
      .def("names",
           [](const PlanWithMetadata& save) {
             py::list names;
             for (std::size_t i = 0; i < save.plan.names(); ++i) {
               names.append(text_of(save.plan.name(i)));
             }
             return names;
           })
      .def("differing_replicas", &differing_replicas, py::arg("fingerprints"))
      .def("differing_copies", &differing_copies, py::arg("checksums"))
      .def("changes", &changes_of, py::arg("before"), py::arg("now"), py::arg("counter"))
      .def(
          "describe", [](PlanWithMetadata& save) { save.metadata.describe(); }, NoGil())
      .def("encode", &encoded, py::arg("written"), py::arg("storage_meta"), py::arg("version"),
           py::arg("phases"));
}

}  // namespace torch_ckpt::python
