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

/// How the values of two saves of one plan differ, by their checksums. A group is what lies under
/// one key of the state dict; names that are such a key have the group "".
struct Changes {
  /// The first object, or tensor of at most one element, that has changed: what counts steps.
  std::optional<std::uint32_t> moved;  // of the plan's names
  // These two only where something has moved.
  /// Groups of which a tensor has changed.
  std::vector<std::string_view> changed;
  /// All others that have tensors, with these.
  std::vector<std::pair<std::string_view, std::vector<std::uint32_t>>> unchanged;
};

/// before, now: by rank.
/// ignored: a name that does not count as moved.
Changes changes_between(const GlobalPlan& plan, std::span<const WrittenFiles> before,
                        std::span<const WrittenFiles> now, std::string_view ignored);

}  // namespace torch_ckpt::planning
