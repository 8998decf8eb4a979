#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "planning/global_plan.h"

namespace torch_ckpt::planning {

/// A value of which several ranks have different versions.
struct DifferingReplica {
  std::string_view name;
  std::vector<std::vector<std::uint32_t>> groups;  // ranks with equal versions, in ascending order
};

/// Compares the fingerprints of replicas: plain tensors and objects that have the same name on
/// several ranks. Returns the differing values, sorted by name.
///
/// fingerprints: by rank, a std::uint32_t for each plain tensor and then for each object of the
/// rank's template; empty if the rank sent none. Values with the fingerprint 0 are not compared.
std::vector<DifferingReplica> differing_replicas(const GlobalPlan& plan,
                                                 std::span<const std::string_view> fingerprints);

}  // namespace torch_ckpt::planning
