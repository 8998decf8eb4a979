#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "planning/global_plan.h"
#include "planning/plan_metadata.h"

namespace torch_ckpt::planning {

/// The differences between two saves with the same plan, found by comparing checksums. A group is
/// all values under one top-level key of the state dict; top-level values are in the group "".
struct Changes {
  /// Name number of the first changed object or tensor of at most one element, such as a step
  /// counter.
  std::optional<std::uint32_t> moved;
  /// If `moved` is set: the groups that contain trained tensors, none of which has changed, each
  /// with these tensors: the floating-point tensors of a module, or the states of an optimizer. The
  /// states of data loaders and random number generators rarely change, and do not count.
  std::vector<std::pair<std::string_view, std::vector<std::uint32_t>>> unchanged;
};

/// Compares two saves. before, now: the written files, by rank. ignored: a name that is never
/// reported as `moved`.
Changes changes_between(const GlobalPlan& plan, std::span<const WrittenFiles> before,
                        std::span<const WrittenFiles> now, std::string_view ignored);

}  // namespace torch_ckpt::planning
