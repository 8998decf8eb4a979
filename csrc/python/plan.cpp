#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <ranges>
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
#include "python/types.h"

namespace py = pybind11;
using namespace py::literals;

namespace torch_ckpt::python {
namespace {

using planning::RankPlan;
using planning::SaveCoordinator;
using Written = std::vector<const WrittenFiles*>;
using Structure = std::pair<py::bytes, py::bytes>;

std::vector<planning::WrittenFiles> files_of(const Written& written) {
  std::vector<planning::WrittenFiles> files;
  for (const WrittenFiles* of_rank : written) files.emplace_back(of_rank->files);
  return files;
}

std::pair<std::optional<py::bytes>, Bytes> message_of(const RankPlan& plan,
                                                      const Structure& structure,
                                                      const std::optional<py::bytes>& fingerprints,
                                                      bool with_parts) {
  const auto& [of_template, parts] = structure;
  const std::string_view sums = fingerprints ? std::string_view(*fingerprints) : "";
  if (!with_parts && plan.is_of(of_template, parts)) {
    return {std::nullopt, Bytes{plan.message(std::nullopt, sums)}};
  }
  return {of_template, Bytes{plan.message(std::string_view(parts), sums)}};
}

/// Returns the replies. Equal replies are one object.
auto assign(SaveCoordinator& coordinator,
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

index::EncodedMetadata encoded(SaveCoordinator& coordinator, const Written& written,
                               const std::vector<std::pair<std::string, std::optional<Name>>>& meta,
                               const std::string& version) {
  index::MetadataExtras extras;
  extras.version = version;
  for (const auto& [name, value] : meta) extras.storage_meta.emplace_back(name, value);
  return without_gil([&] { return coordinator.encode(files_of(written), extras); });
}

auto changes_of(const SaveCoordinator& coordinator, const Written& before, const Written& now,
                const Name& counter) {
  const planning::GlobalPlan& plan = coordinator.plan();
  const planning::Changes changes = without_gil(
      [&] { return planning::changes_between(plan, files_of(before), files_of(now), counter); });
  const auto name_of = [&](std::uint32_t name) { return text_of(plan.name(name)); };
  py::typing::Dict<py::str, py::typing::List<py::str>> unchanged;
  for (const auto& [group, names] : changes.unchanged) {
    unchanged[text_of(group)] = list_of(names, name_of);
  }
  return std::pair(changes.moved ? std::optional(name_of(*changes.moved)) : std::nullopt,
                   unchanged);
}

auto names_of(const SaveCoordinator& coordinator) {
  return list_of(std::views::iota(std::size_t{0}, coordinator.plan().names()),
                 [&](std::size_t i) { return text_of(coordinator.plan().name(i)); });
}

auto differing_replicas(const SaveCoordinator& coordinator) {
  const auto differing = without_gil([&] { return coordinator.differing_replicas(); });
  return list_of(differing, [](const planning::DifferingReplica& replica) {
    return py::make_tuple(text_of(replica.name), replica.groups);
  });
}

auto differing_copies(const SaveCoordinator& coordinator, const std::vector<py::bytes>& checksums) {
  const std::vector<std::string_view> of_ranks(checksums.begin(), checksums.end());
  const auto differing =
      without_gil([&] { return planning::differing_copies(coordinator.plan(), of_ranks); });
  return list_of(differing, [](const planning::DifferingCopy& copy) {
    return py::make_tuple(text_of(copy.name), copy.groups, copy.meshes);
  });
}

}  // namespace

void bind_plan(py::module_& module) {
  py::class_<RankPlan>(
      module, "RankPlan",
      "The plan of one rank for the saves of a group (csrc/planning/save_coordinator.h).\n\n"
      "``structure`` is the result of ``FlatState.contents``.")
      .def(py::init<>())
      .def("message", &message_of, "structure"_a, "fingerprints"_a, "with_parts"_a = false,
           "The template, or None if the rank has the plan, and the message to the coordinator.")
      .def(
          "accept",
          [](RankPlan& plan, const Structure& structure, const py::bytes& reply) {
            return plan.accept(structure.first, structure.second, reply);
          },
          "structure"_a, "reply"_a)
      .def_property_readonly(
          "items", [](const RankPlan& plan) { return py::bytes(plan.items()); },
          "The numbers of the items that the rank writes, for ``FlatState.sources``.")
      .def_property_readonly(
          "copies", [](const RankPlan& plan) { return py::bytes(plan.copies()); },
          "The numbers of the items that must be copies of other ranks' items, for "
          "``FlatState.checksums``.");
  py::class_<SaveCoordinator>(
      module, "SaveCoordinator",
      "The plans of all ranks. ``before``, ``now`` and ``written`` are by rank.")
      .def(py::init<>())
      .def("assign", &assign, "messages"_a,
           "The replies, by rank; empty if all ranks must send their parts.\n\n"
           "Raises CheckpointError if the values of a name differ in kind, dtype or size between "
           "ranks, or if the shards of a tensor do not cover it, on each of its meshes.")
      .def_property_readonly(
          "plan_hash", &SaveCoordinator::plan_hash,
          "A number that is equal for plans of the same states, in this process.")
      .def("names", &names_of, "The fully qualified names of all values.")
      .def(
          "bytes_by_rank",
          [](const SaveCoordinator& self) {
            const auto bytes = self.plan().bytes();
            return std::vector<std::uint64_t>(bytes.begin(), bytes.end());
          },
          "The bytes of plain tensors and DTensors that each rank writes.")
      .def("differing_replicas", &differing_replicas,
           "Names of the values whose fingerprints differ in the last messages, and the groups of "
           "ranks that have the same version.")
      .def("differing_copies", &differing_copies, "checksums"_a,
           "Sharded tensors that are not copies, given the checksums of each rank.\n\n"
           "Returns the name of each, the groups of ranks that have the same version, and the "
           "ranks of each mesh.")
      .def("changes", &changes_of, "before"_a, "now"_a, "counter"_a,
           "Compares two saves: changed number, and the unchanged groups with their names.\n\n"
           "The number is the first object or one-element tensor that has changed, except "
           "``counter``. A group is all tensors under one top-level key. There are no groups if no "
           "number has changed.")
      .def("describe", &SaveCoordinator::describe, NoGil(),
           "Encodes the part of the metadata that depends only on the plan.\n\n"
           "If it was not called, ``encode`` does it.")
      .def("encode", &encoded, "written"_a, "storage_meta"_a, "version"_a,
           "The contents of ``.metadata``.\n\n"
           "Raises Corrupt if a rank has not reported one location for each of its items.");
}

}  // namespace torch_ckpt::python
