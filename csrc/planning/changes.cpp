#include "planning/changes.h"

#include <algorithm>
#include <string>

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

bool is_floating(const std::string& dtype) {
  return dtype.find("float") != std::string::npos || dtype.find("complex") != std::string::npos;
}

/// The values under one top-level key.
struct Group {
  std::string_view key;
  bool has_changed = false;
  bool has_objects = false;
  std::vector<std::uint32_t> states;    // floating-point tensors beneath "state", as of optimizers
  std::vector<std::uint32_t> matrices;  // other floating-point tensors with several dimensions
  std::vector<std::uint32_t> vectors;   // other floating-point tensors
};

/// Returns the tensors of a group that training changes.
///
/// Modules have only tensors. If a group also has other values, vectors may be constants, such as
/// the weights with which a loader draws samples.
std::vector<std::uint32_t> trained(Group group) {
  std::vector<std::uint32_t> found = std::move(group.states);
  found.insert(found.end(), group.matrices.begin(), group.matrices.end());
  if (!group.has_objects) found.insert(found.end(), group.vectors.begin(), group.vectors.end());
  std::ranges::sort(found);
  return found;
}

/// Returns the second component of a name's path, or nothing.
std::string_view second_of(std::string_view name, std::span<const StateTemplate::PathPart> path) {
  return path.size() < 2 ? std::string_view() : name.substr(path[0].bytes + 1, path[1].bytes);
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
  std::vector<Group> groups;
  for (std::uint32_t number = 0; number < plan.names(); ++number) {
    const StateTemplate& of = plan.first_template(number);
    const StateTemplate::Row& row = of.row(plan.first_row(number));
    const std::string_view name = plan.name(number);
    const auto path = of.path(plan.first_row(number));
    const bool is_counter = is_number(of, row);
    if (is_counter && has_changed[number] && !changes.moved && name != ignored) {
      changes.moved = number;
    }
    const std::string_view key =
        path.size() > 1 ? name.substr(0, path.front().bytes) : std::string_view();
    const auto [at, is_new] = keys.add(key);
    if (is_new) groups.emplace_back();
    Group& group = groups[at];
    group.key = key;
    if (row.kind == Kind::object) {
      // Top-level values and the extra states of modules are no reason to doubt the tensors.
      group.has_objects |= path.size() > 1 && !name.ends_with("_extra_state");
    } else if (!is_counter) {
      group.has_changed |= has_changed[number];
      if (!is_floating(of.dtype(row))) continue;
      if (second_of(name, path) == "state" && path.size() > 2) {
        group.states.push_back(number);
      } else {
        (of.sizes(row).size() > 1 ? group.matrices : group.vectors).push_back(number);
      }
    }
  }
  if (!changes.moved) return changes;
  for (Group& group : groups) {
    const std::string_view key = group.key;
    if (group.has_changed) continue;
    if (auto tensors = trained(std::move(group)); !tensors.empty()) {
      changes.unchanged.emplace_back(key, std::move(tensors));
    }
  }
  return changes;
}

}  // namespace torch_ckpt::planning
