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

/// How the values of two saves of one plan differ, by their checksums. A group is all values under
/// one top-level key of the state dict; values at the top have the group "".
struct Changes {
  /// The first object, or tensor of at most one element, that has changed, e.g. a step counter. The
  /// number of its name in the plan.
  std::optional<std::uint32_t> moved;
  // The next two members are only set if `moved` is.
  /// Groups with a tensor that has changed.
  std::vector<std::string_view> changed;
  /// All other groups that contain tensors, and these tensors.
  std::vector<std::pair<std::string_view, std::vector<std::uint32_t>>> unchanged;
};

/// Compares two saves. `before` and `now` are by rank; `ignored` is a name that does not count as
/// moved.
Changes changes_between(const GlobalPlan& plan, std::span<const WrittenFiles> before,
                        std::span<const WrittenFiles> now, std::string_view ignored);

}  // namespace torch_ckpt::planning
