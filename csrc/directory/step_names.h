#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace torch_ckpt::directory {

/// A step is complete if its directory contains this file.
inline constexpr std::string_view kMarkerName = "write_completed";
/// Retention keeps a step if its directory contains this file.
inline constexpr std::string_view kPinnedName = "pinned";

enum class StepKind { step, unfinished, deleted };

struct StepName {
  std::string_view digits;  // the ten digits; a view into the parsed name
  StepKind kind = StepKind::step;
};

/// Returns nullopt if the name is none of a step or of a leftover.
std::optional<StepName> parse_step_name(std::string_view name);
/// Returns the name of the directory into which a step is written.
std::string unfinished_name(std::string_view digits, std::string_view attempt);
/// Returns a new name for a step that is being deleted or replaced.
std::string deleted_name(std::string_view digits);

}  // namespace torch_ckpt::directory
