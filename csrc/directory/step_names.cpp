#include "directory/step_names.h"

#include <algorithm>
#include <cstddef>

#include "directory/file_names.h"

namespace torch_ckpt::directory {
namespace {

constexpr std::size_t kStepDigits = 10;
constexpr std::string_view kUnfinished = ".tmp-";
constexpr std::string_view kDeleted = ".deleted-";

}  // namespace

std::optional<StepName> parse_step_name(std::string_view name) {
  const std::string_view digits = name.substr(0, kStepDigits);
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  if (digits.size() != kStepDigits || !std::ranges::all_of(digits, is_digit)) return std::nullopt;
  std::string_view suffix = name.substr(kStepDigits);
  if (suffix.empty()) return StepName{digits, StepKind::step};
  const bool is_deleted = suffix.starts_with(kDeleted);
  if (!is_deleted && !suffix.starts_with(kUnfinished)) return std::nullopt;
  suffix.remove_prefix(is_deleted ? kDeleted.size() : kUnfinished.size());
  if (suffix.size() != kTagDigits || !is_hex(suffix)) return std::nullopt;
  return StepName{digits, is_deleted ? StepKind::deleted : StepKind::unfinished};
}

std::string unfinished_name(std::string_view digits, std::string_view attempt) {
  return std::string(digits) + std::string(kUnfinished) + std::string(attempt);
}

std::string deleted_name(std::string_view digits) {
  return std::string(digits) + std::string(kDeleted) + random_hex(kTagDigits);
}

}  // namespace torch_ckpt::directory
