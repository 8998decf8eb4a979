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

Result<std::vector<DifferingCopy>> differing_copies(const GlobalPlan& plan,
                                                    std::span<const std::string_view> checksums) {
  struct Copies {
    // Ranks, grouped by part and checksum, and by layout.
    std::map<std::uint32_t, std::map<std::uint32_t, std::vector<std::uint32_t>>> versions;
    std::map<std::uint64_t, std::vector<std::uint32_t>> layouts;
  };
  std::map<std::string_view, Copies> found;
  for (std::uint32_t rank = 0; rank < plan.ranks(); ++rank) {
    const RankState& here = plan.of_rank(rank);
    const auto items = plan.copies(rank);
    if (rank >= checksums.size() || checksums[rank].size() < items.size() * sizeof(std::uint32_t)) {
      return format_error(Errc::frame_damaged, "rank " + std::to_string(rank) +
                                                   " has sent too few checksums of its tensors");
    }
    for (std::size_t i = 0; i < items.size(); ++i) {
      std::uint32_t checksum = 0;
      std::memcpy(&checksum, checksums[rank].data() + i * sizeof checksum, sizeof checksum);
      Copies& copies = found[here.name(items[i])];
      copies.versions[plan.part_of_item(rank, items[i])][checksum].push_back(rank);
      copies.layouts[here.layout(here.box(items[i]))].push_back(rank);
    }
  }
  std::vector<DifferingCopy> differing;
  for (auto& [name, copies] : found) {
    const auto part = std::ranges::find_if(
        copies.versions, [](const auto& versions) { return versions.second.size() > 1; });
    if (part == copies.versions.end()) continue;
    DifferingCopy& copy = differing.emplace_back();
    copy.name = name;
    for (auto& [checksum, ranks] : part->second) copy.groups.push_back(std::move(ranks));
    if (!copies.layouts.contains(RankState::kNoLayout)) {
      for (auto& [layout, ranks] : copies.layouts) copy.meshes.push_back(std::move(ranks));
    }
    std::ranges::sort(copy.groups);
    std::ranges::sort(copy.meshes);
  }
  return differing;
}

}  // namespace torch_ckpt::planning
