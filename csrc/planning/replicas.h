#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "error.h"
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

/// A sharded tensor whose copies differ.
struct DifferingCopy {
  std::string_view name;
  std::vector<std::vector<std::uint32_t>> groups;  // see DifferingReplica
  std::vector<std::vector<std::uint32_t>> meshes;  // the ranks of each layout, if all have a mesh
};

/// Compares the checksums of the copies of sharded tensors. Returns the differing tensors, sorted
/// by name. Fails with Errc::frame_damaged if a checksum is missing.
///
/// checksums: by rank, a std::uint32_t for each of GlobalPlan::copies().
Result<std::vector<DifferingCopy>> differing_copies(const GlobalPlan& plan,
                                                    std::span<const std::string_view> checksums);

}  // namespace torch_ckpt::planning
