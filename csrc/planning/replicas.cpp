#include "planning/replicas.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <utility>

namespace torch_ckpt::planning {
namespace {

/// Returns true if all ranks have the same names and fingerprints, as in most saves.
bool are_equal(const GlobalPlan& plan, std::span<const std::string_view> fingerprints) {
  for (std::size_t rank = 1; rank < fingerprints.size(); ++rank) {
    if (&plan.of_rank(rank).state() != &plan.of_rank(0).state() ||
        fingerprints[rank] != fingerprints[0]) {
      return false;
    }
  }
  return true;
}

}  // namespace

std::vector<DifferingReplica> differing_replicas(const GlobalPlan& plan,
                                                 std::span<const std::string_view> fingerprints) {
  std::vector<DifferingReplica> differing;
  if (are_equal(plan, fingerprints)) return differing;
  std::map<std::string_view, std::map<std::uint32_t, std::vector<std::uint32_t>>> versions;
  for (std::size_t rank = 0; rank < fingerprints.size(); ++rank) {
    const StateTemplate& here = plan.of_rank(rank).state();
    std::string_view rest = fingerprints[rank];
    for (const auto kind : {StateTemplate::Kind::tensor, StateTemplate::Kind::object}) {
      for (std::size_t row = 0; row < here.size(); ++row) {
        std::uint32_t fingerprint = 0;
        if (here.row(row).kind != kind || rest.size() < sizeof fingerprint) continue;
        std::memcpy(&fingerprint, rest.data(), sizeof fingerprint);
        rest.remove_prefix(sizeof fingerprint);
        if (fingerprint == 0) continue;
        versions[here.name(row)][fingerprint].push_back(static_cast<std::uint32_t>(rank));
      }
    }
  }
  for (auto& [name, groups] : versions) {
    if (groups.size() < 2) continue;
    DifferingReplica& found = differing.emplace_back();
    found.name = name;
    for (auto& [fingerprint, ranks] : groups) found.groups.push_back(std::move(ranks));
    std::ranges::sort(found.groups);
  }
  return differing;
}

}  // namespace torch_ckpt::planning
