#include "planning/changes.h"

#include <algorithm>

namespace torch_ckpt::planning {
namespace {

using Kind = StateTemplate::Kind;

/// Returns the checksums of the rows that a rank owns, by position among these rows.
std::vector<std::uint32_t> checksums_of(const WrittenFiles& written, std::size_t owned) {
  std::vector<std::uint32_t> found(owned);
  for (const format::FileResult& file : written) {
    std::size_t i = 0;
    for (const format::ItemLocation& location : file.locations.decoded()) {
      const std::uint32_t crc = file.crcs[i++];
      if (location.item < owned) found[location.item] = crc;
    }
  }
  return found;
}

/// Returns true for an object or a tensor of at most one element.
bool is_number(const StateTemplate& of, const StateTemplate::Row& row) {
  if (row.kind != Kind::tensor) return row.kind == Kind::object;
  const auto sizes = of.sizes(row);
  return std::ranges::all_of(sizes, [](std::int64_t size) { return size == 1; }) ||
         std::ranges::any_of(sizes, [](std::int64_t size) { return size == 0; });
}

}  // namespace

Changes changes_between(const GlobalPlan& plan, std::span<const WrittenFiles> before,
                        std::span<const WrittenFiles> now, std::string_view ignored) {
  std::vector<bool> has_changed(plan.names());
  for (std::size_t rank = 0; rank < plan.ranks(); ++rank) {
    const std::size_t owned = plan.owned(rank).size();
    const auto earlier = checksums_of(before[rank], owned);
    const auto later = checksums_of(now[rank], owned);
    for (std::size_t i = 0; i < owned; ++i) {
      if (earlier[i] != later[i]) has_changed[plan.entry(rank, i)] = true;
    }
  }
  Changes changes;
  index::NameTable keys;
  std::vector<std::pair<std::string_view, std::vector<std::uint32_t>>> groups;
  std::vector<bool> group_has_changed;
  for (std::uint32_t number = 0; number < plan.names(); ++number) {
    const StateTemplate& of = plan.first_template(number);
    const StateTemplate::Row& row = of.row(plan.first_row(number));
    const std::string_view name = plan.name(number);
    if (row.kind == Kind::other) continue;
    if (is_number(of, row)) {
      if (has_changed[number] && !changes.moved && name != ignored) changes.moved = number;
      continue;
    }
    const auto path = of.path(plan.first_row(number));
    const std::string_view key =
        path.size() > 1 ? name.substr(0, path.front().bytes) : std::string_view();
    const auto [group, is_new] = keys.add(key);
    if (is_new) {
      groups.emplace_back(key, std::vector<std::uint32_t>());
      group_has_changed.push_back(false);
    }
    groups[group].second.push_back(number);
    if (has_changed[number]) group_has_changed[group] = true;
  }
  if (!changes.moved) return changes;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    if (group_has_changed[group]) {
      changes.changed.push_back(groups[group].first);
    } else {
      changes.unchanged.push_back(std::move(groups[group]));
    }
  }
  return changes;
}

}  // namespace torch_ckpt::planning
