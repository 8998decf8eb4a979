#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "planning/save_coordinator.h"
#include "python/bindings.h"
#include "python/errors.h"
#include "python/gil.h"
#include "python/list.h"
#include "python/results.h"
#include "python/text.h"

namespace py = pybind11;

namespace torch_ckpt::python {
namespace {

using planning::RankPlan;
using planning::SaveCoordinator;
using Written = std::vector<const WrittenFiles*>;
using Structure = std::pair<py::bytes, py::bytes>;

py::bytes object_of(std::string_view bytes) { return {bytes.data(), bytes.size()}; }

std::vector<planning::WrittenFiles> files_of(const Written& written) {
  std::vector<planning::WrittenFiles> files;
  for (const WrittenFiles* of_rank : written) files.emplace_back(of_rank->files);
  return files;
}

/// Returns the template, or None if the message does not need it, and the message.
py::tuple message_of(const RankPlan& plan, const Structure& structure,
                     const std::optional<py::bytes>& fingerprints, bool with_parts) {
  const auto& [of_template, parts] = structure;
  const std::string_view sums = fingerprints ? std::string_view(*fingerprints) : "";
  if (!with_parts && plan.is_of(of_template, parts)) {
    return py::make_tuple(py::none(), py::bytes(plan.message(std::nullopt, sums)));
  }
  return py::make_tuple(of_template, py::bytes(plan.message(std::string_view(parts), sums)));
}

/// Returns the replies. Equal replies are one object.
py::list assign(SaveCoordinator& coordinator,
                const std::vector<std::pair<std::optional<py::bytes>, py::bytes>>& given) {
  std::vector<SaveCoordinator::Message> messages;
  for (const auto& [of_template, message] : given) {
    messages.emplace_back(message, of_template ? std::string_view(*of_template) : "");
  }
  const auto replies = without_gil([&] { return coordinator.assign(messages); });
  std::unordered_map<std::string_view, py::bytes> made;
  return list_of(replies, [&](const std::string& reply) {
    return made.try_emplace(reply, py::bytes(reply)).first->second;
  });
}

index::EncodedMetadata encoded(
    SaveCoordinator& coordinator, const Written& written,
    const std::vector<std::pair<std::string, std::optional<py::str>>>& meta,
    const std::string& version) {
  index::MetadataExtras extras;
  extras.version = version;
  for (const auto& [name, value] : meta) {
    extras.storage_meta.emplace_back(name, value ? std::optional(bytes_of(*value)) : std::nullopt);
  }
  return without_gil([&] { return coordinator.encode(files_of(written), extras); });
}

/// Returns the name of the number that has changed, or None, and the names of the tensors of each
/// unchanged group.
py::tuple changes_of(const SaveCoordinator& coordinator, const Written& before, const Written& now,
                     const py::str& counter) {
  const planning::GlobalPlan& plan = coordinator.plan();
  const std::string ignored = bytes_of(counter);
  const planning::Changes changes = without_gil(
      [&] { return planning::changes_between(plan, files_of(before), files_of(now), ignored); });
  py::dict unchanged;
  for (const auto& [group, names] : changes.unchanged) {
    py::list texts;
    for (const std::uint32_t name : names) texts.append(text_of(plan.name(name)));
    unchanged[text_of(group)] = texts;
  }
  const py::object moved =
      changes.moved ? py::object(text_of(plan.name(*changes.moved))) : py::none();
  return py::make_tuple(moved, unchanged);
}

py::list names_of(const SaveCoordinator& coordinator) {
  py::list names;
  for (std::size_t i = 0; i < coordinator.plan().names(); ++i) {
    names.append(text_of(coordinator.plan().name(i)));
  }
  return names;
}

/// Returns the name of each value that differs, and the ranks that have each version of it.
py::list differing_replicas(const SaveCoordinator& coordinator) {
  const auto differing = without_gil([&] { return coordinator.differing_replicas(); });
  return list_of(differing, [](const planning::DifferingReplica& replica) {
    return py::make_tuple(text_of(replica.name), replica.groups);
  });
}

/// Returns the name of each differing copy, the ranks that have each version of it, and the ranks
/// of each mesh.
py::list differing_copies(const SaveCoordinator& coordinator,
                          const std::vector<py::bytes>& checksums) {
  const std::vector<std::string_view> of_ranks(checksums.begin(), checksums.end());
  const auto differing =
      without_gil([&] { return planning::differing_copies(coordinator.plan(), of_ranks); });
  return list_of(differing, [](const planning::DifferingCopy& copy) {
    return py::make_tuple(text_of(copy.name), copy.groups, copy.meshes);
  });
}

}  // namespace

void bind_plan(py::module_& module) {
  py::class_<RankPlan>(module, "RankPlan")
      .def(py::init<>())
      .def("message", &message_of, py::arg("structure"), py::arg("fingerprints"),
           py::arg("with_parts") = false)
      .def(
          "accept",
          [](RankPlan& plan, const Structure& structure, const py::bytes& reply) {
            return plan.accept(structure.first, structure.second, reply);
          },
          py::arg("structure"), py::arg("reply"))
      .def_property_readonly("items", [](const RankPlan& plan) { return object_of(plan.items()); })
      .def_property_readonly("copies",
                             [](const RankPlan& plan) { return object_of(plan.copies()); });
  py::class_<SaveCoordinator>(module, "SaveCoordinator")
      .def(py::init<>())
      .def("assign", &assign, py::arg("messages"))
      .def_property_readonly("plan_hash", &SaveCoordinator::plan_hash)
      .def("names", &names_of)
      .def("bytes_by_rank",
           [](const SaveCoordinator& self) {
             const auto bytes = self.plan().bytes();
             return std::vector<std::uint64_t>(bytes.begin(), bytes.end());
           })
      .def("differing_replicas", &differing_replicas)
      .def("differing_copies", &differing_copies, py::arg("checksums"))
      .def("changes", &changes_of, py::arg("before"), py::arg("now"), py::arg("counter"))
      .def("describe", &SaveCoordinator::describe, NoGil())
      .def("encode", &encoded, py::arg("written"), py::arg("storage_meta"), py::arg("version"));
}

}  // namespace torch_ckpt::python
