#include "planning/global_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "planning/tiling.h"
#include "seeded_hash.h"

namespace torch_ckpt::planning {
namespace {

using Kind = StateTemplate::Kind;
using Row = StateTemplate::Row;

using index::listed;

std::string_view kind_name(const Row& row) {
  switch (row.kind) {
    case Kind::tensor:
      return row.is_described ? "another kind of tensor" : "a plain tensor";
    case Kind::shard:
      return row.is_described ? "shards of another kind of tensor" : "a DTensor";
    case Kind::object:
      return "an object";
    case Kind::absent:
      break;
  }
  return "no value";
}

std::uint64_t product(std::span<const std::int64_t> sizes) {
  std::uint64_t all = 1;
  for (const std::int64_t size : sizes) all *= static_cast<std::uint64_t>(size);
  return all;
}

Error refused(std::string detail) { return format_error(Errc::unsavable, std::move(detail)); }

constexpr std::uint32_t kNone = 0xffffffff;

/// Returns the ranks that have a part of a tensor with this layout: the ranks of its mesh.
std::string mesh_of(std::span<const RankState> states, std::string_view name,
                    std::uint64_t layout) {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < states.size(); ++rank) {
    const RankState& here = states[rank];
    for (std::size_t item = 0; item < here.items(); ++item) {
      if (here.row(item).kind != Kind::shard || !here.has(item) || here.name(item) != name) {
        continue;
      }
      if (here.layout(here.box(item)) == layout) ranks.push_back(rank);
      break;
    }
  }
  return "the mesh of " + text_of_ranks(ranks);
}

/// Returns the layout of the part that a rank has of a row, or kNoLayout if the rank has none.
std::uint64_t layout_of(const RankState& state, std::uint32_t row) {
  for (std::size_t item = row; item < state.items() && state.row_of(item) <= row; ++item) {
    if (state.row_of(item) != row || state.box(item) == RankState::kNone) continue;
    return state.layout(state.box(item));
  }
  return RankState::kNoLayout;
}

}  // namespace

std::string text_of_ranks(std::span<const std::uint32_t> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (last > i) text.append("-").append(std::to_string(ranks[last]));
    i = last + 1;
  }
  return text;
}

Result<GlobalPlan> GlobalPlan::of(std::vector<RankState> states) {
  GlobalPlan plan;
  plan.states_ = std::move(states);
  plan.part_of_item_.resize(plan.ranks());
  index::IdTable known;  // parts by entry and box
  index::ExtentsTable extents;
  // The entry of each row, by template: most ranks share a template.
  std::unordered_map<const StateTemplate*, std::vector<std::uint32_t>> entries_of;
  // Ids (in `extents`) of the offsets and sizes of each box of the current rank.
  std::vector<std::pair<std::uint32_t, std::uint32_t>> boxes;
  for (std::uint32_t rank = 0; rank < plan.ranks(); ++rank) {
    const RankState& rank_state = plan.states_[rank];
    const auto [of_template, is_new] =
        entries_of.try_emplace(&rank_state.state(), std::vector<std::uint32_t>());
    if (is_new) {
      auto entries = plan.add_entries(rank);
      if (!entries) return std::move(entries).error();
      of_template->second = std::move(*entries);
    }
    boxes.clear();
    for (std::uint32_t box = 0; box < rank_state.boxes(); ++box) {
      boxes.emplace_back(extents.intern(rank_state.offsets(box)),
                         extents.intern(rank_state.sizes(box)));
    }
    std::vector<std::uint32_t>& parts = plan.part_of_item_[rank];
    parts.assign(rank_state.items(), kNone);
    for (std::uint32_t i = 0; i < rank_state.items(); ++i) {
      if (!rank_state.has(i)) continue;
      const std::uint32_t row = rank_state.row_of(i);
      const Kind kind = rank_state.state().row(row).kind;
      const std::uint32_t number = of_template->second[row];
      Entry& entry = plan.entries_[number];
      if (kind == Kind::shard) {
        const std::uint64_t layout = rank_state.layout(rank_state.box(i));
        if (entry.first_part == kNone) {
          entry.rank = rank;
          entry.row = row;
          entry.layout = layout;
        } else if (&plan.states_[entry.rank].state() != &rank_state.state()) {
          TC_TRY(plan.check_same(entry, rank, row));
        }
        entry.has_copies |= layout != entry.layout || layout == RankState::kNoLayout;
      }
      const auto [offsets, sizes] = kind == Kind::shard ? boxes[rank_state.box(i)]
                                                        : std::pair<std::uint32_t, std::uint32_t>();
      const std::uint64_t hash =
          SeededHash()((std::uint64_t{number} << 32) | offsets) + std::uint64_t{sizes};
      const auto [at, is_new_part] =
          known.add(hash, plan.parts_.size(), [&, o = offsets, s = sizes](std::uint32_t one) {
            const Part& part = plan.parts_[one];
            return part.entry == number && part.offsets == o && part.sizes == s;
          });
      if (is_new_part) {
        Part part;
        part.owner = rank;
        part.item = i;
        part.entry = number;
        part.offsets = offsets;
        part.sizes = sizes;
        part.bytes = rank_state.bytes(i);
        (entry.last_part == kNone ? entry.first_part : plan.parts_[entry.last_part].next) = at;
        entry.last_part = at;
        plan.parts_.push_back(part);
      }
      ++plan.parts_[at].holders;
      parts[i] = at;
    }
  }
  plan.choose_owners();
  TC_TRY(plan.find_copies());
  TC_TRY(plan.check_cover());
  return plan;
}

Result<std::vector<std::uint32_t>> GlobalPlan::add_entries(std::uint32_t rank) {
  const StateTemplate& state = states_[rank].state();
  std::vector<std::uint32_t> entries(state.size(), kNone);
  for (std::uint32_t i = 0; i < state.size(); ++i) {
    const Row& row = state.row(i);
    if (row.kind == Kind::absent) continue;
    if (state.name(i).size() > index::CheckpointIndex::kMaxNameBytes) {
      return refused("rank " + std::to_string(rank) + " has a value with a name of " +
                     std::to_string(state.name(i).size()) + " bytes; the maximum is " +
                     std::to_string(index::CheckpointIndex::kMaxNameBytes) +
                     ". The name begins with " + std::string(state.name(i).substr(0, 100)));
    }
    const auto [number, is_new] = names_.add(state.name(i));
    if (is_new) entries_.push_back({rank, i, kNone, kNone});
    entries[i] = number;
    // Compare the dtype and size of a DTensor only on ranks that have a part of it: on ranks
    // outside its mesh, torch may report a different size.
    if (row.kind == Kind::shard && row_of(entries_[number]).kind == Kind::shard) continue;
    TC_TRY(check_same(entries_[number], rank, i));
  }
  return entries;
}

Result<> GlobalPlan::check_same(const Entry& first, std::uint32_t rank, std::uint32_t row) const {
  if (first.rank == rank && first.row == row) return {};
  const StateTemplate& first_state = states_[first.rank].state();
  const StateTemplate& state = states_[rank].state();
  const Row& a = first_state.row(first.row);
  const Row& b = state.row(row);
  const bool has_size = a.kind == Kind::tensor || a.kind == Kind::shard;
  if (a.kind == b.kind &&
      (!has_size || (first_state.dtype(a) == state.dtype(b) &&
                     std::ranges::equal(first_state.sizes(a), state.sizes(b))))) {
    return {};
  }
  const std::string name(state.name(row));
  const std::string ranks[2] = {"rank " + std::to_string(first.rank),
                                "rank " + std::to_string(rank)};
  if (a.kind != b.kind) {
    return refused(name + ": " + ranks[0] + " has " + std::string(kind_name(a)) + ", " + ranks[1] +
                   " has " + std::string(kind_name(b)));
  }
  std::string of[2] = {"torch." + first_state.dtype(a) + " " + listed(first_state.sizes(a)),
                       "torch." + state.dtype(b) + " " + listed(state.sizes(b))};
  const std::uint64_t layouts[2] = {first.layout, layout_of(states_[rank], row)};
  if (layouts[0] != layouts[1] && std::ranges::find(layouts, RankState::kNoLayout) == layouts + 2) {
    for (const int i : {0, 1}) of[i] += " on " + mesh_of(states_, name, layouts[i]);
  }
  const std::string why = a.kind == Kind::tensor
                              ? ". Plain tensors with the same name are treated as replicas, and "
                                "only one is saved. Use "
                                "a DTensor or different names."
                              : ". A sharded tensor must have the same dtype and size on all "
                                "ranks. If each mesh has a tensor of its own, use different names.";
  return refused(name + ": " + ranks[0] + " has " + of[0] + ", " + ranks[1] + " has " + of[1] +
                 why);
}

void GlobalPlan::choose_owners() {
  bytes_.assign(ranks(), 0);
  for (Part& part : parts_) {
    if (part.holders == 1) bytes_[part.owner] += part.bytes;
  }
  // By part, if it is replicated: the ranks that have it, in ascending order, and their items.
  std::vector<std::vector<std::pair<std::uint32_t, std::uint32_t>>> holders(parts_.size());
  std::vector<std::uint32_t> several;
  for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
    for (std::uint32_t item = 0; item < part_of_item_[rank].size(); ++item) {
      const std::uint32_t part = part_of_item_[rank][item];
      if (part == kNone || parts_[part].holders < 2) continue;
      if (holders[part].empty()) several.push_back(part);
      holders[part].emplace_back(rank, item);
    }
  }
  for (const std::uint32_t number : several) {
    Part& part = parts_[number];
    const auto chosen = std::ranges::min_element(
        holders[number], {}, [&](const auto& holder) { return bytes_[holder.first]; });
    std::tie(part.owner, part.item) = *chosen;
    bytes_[part.owner] += part.bytes;
  }
  owned_.assign(ranks(), {});
  for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
    for (std::uint32_t item = 0; item < part_of_item_[rank].size(); ++item) {
      const std::uint32_t part = part_of_item_[rank][item];
      if (part != kNone && parts_[part].owner == rank && parts_[part].item == item) {
        owned_[rank].push_back(item);
      }
    }
    // clang-tidy 14 cannot compile the function of std::ranges.
    std::stable_partition(owned_[rank].begin(), owned_[rank].end(), [&](std::uint32_t item) {
      return !states_[rank].row(item).is_described;
    });
  }
}

Result<> GlobalPlan::find_copies() {
  if (std::ranges::none_of(entries_, &Entry::has_copies)) return {};
  // The parts that each layout of an entry has.
  std::map<std::uint32_t, std::map<std::uint64_t, std::vector<std::uint32_t>>> parts_of;
  copies_.assign(ranks(), {});
  for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
    const RankState& here = states_[rank];
    for (std::uint32_t item = 0; item < part_of_item_[rank].size(); ++item) {
      const std::uint32_t part = part_of_item_[rank][item];
      if (part == kNone || !entries_[parts_[part].entry].has_copies) continue;
      auto& parts = parts_of[parts_[part].entry][here.layout(here.box(item))];
      if (parts_[part].bytes == 0) continue;
      parts.push_back(part);
      if (parts_[part].holders > 1) copies_[rank].push_back(item);
    }
  }
  for (auto& [entry, layouts] : parts_of) {
    if (layouts.contains(RankState::kNoLayout)) continue;
    std::vector<std::uint32_t> all;
    for (std::uint32_t at = entries_[entry].first_part; at != kNone; at = parts_[at].next) {
      if (parts_[at].bytes > 0) all.push_back(at);
    }
    std::ranges::sort(all);
    for (auto& [layout, parts] : layouts) {
      std::ranges::sort(parts);
      // Not std::ranges::unique, because clang 14's clang-tidy does not compile libstdc++ 12's.
      parts.erase(std::unique(parts.begin(), parts.end()), parts.end());
      if (parts == all) continue;
      // The first layout has the first part. If it has all parts, so must the other layouts.
      const auto other = std::ranges::find_if(
          layouts, [&, l = layout](const auto& one) { return one.first != l; });
      const std::string_view name = names_.at(entry);
      return refused(std::string(name) +
                     ": DTensors with this name have several layouts and are not copies of one "
                     "tensor: their shards differ between " +
                     mesh_of(states_, name, layout) + " and " +
                     mesh_of(states_, name, other->first) +
                     ". If each mesh has a tensor of its own, use different names. If they are "
                     "copies, divide them in the same way.");
    }
  }
  return {};
}

bool GlobalPlan::have_equal_parts(const Entry& one, const Entry& other) const {
  if (!std::ranges::equal(states_[one.rank].state().sizes(row_of(one)),
                          states_[other.rank].state().sizes(row_of(other)))) {
    return false;
  }
  std::uint32_t a = one.first_part;
  std::uint32_t b = other.first_part;
  while (a != kNone && b != kNone && parts_[a].offsets == parts_[b].offsets &&
         parts_[a].sizes == parts_[b].sizes) {
    a = parts_[a].next;
    b = parts_[b].next;
  }
  return a == kNone && b == kNone;
}

Result<> GlobalPlan::check_cover() const {
  // The first checked entry for each set of boxes, by hash: entries divided in the same way need no
  // second check.
  std::unordered_multimap<std::uint64_t, std::uint32_t> proven;
  std::vector<Box> boxes;
  for (std::uint32_t number = 0; number < entries_.size(); ++number) {
    const Entry& entry = entries_[number];
    if (row_of(entry).kind != Kind::shard) continue;
    std::uint64_t hash = 0;
    for (std::uint32_t at = entry.first_part; at != kNone; at = parts_[at].next) {
      hash = SeededHash()(hash ^ ((std::uint64_t{parts_[at].offsets} << 32) | parts_[at].sizes));
    }
    const auto [first, last] = proven.equal_range(hash);
    if (std::any_of(first, last, [&](const auto& one) {
          return have_equal_parts(entries_[one.second], entry);
        })) {
      continue;
    }
    const auto whole = states_[entry.rank].state().sizes(row_of(entry));
    boxes.clear();
    std::uint64_t held = 0;
    for (std::uint32_t at = entry.first_part; at != kNone; at = parts_[at].next) {
      const RankState& owner = states_[parts_[at].owner];
      const std::uint32_t box = owner.box(parts_[at].item);
      const auto offsets = owner.offsets(box);
      const auto sizes = owner.sizes(box);
      if (!index::lies_inside(offsets, sizes, whole)) {
        return refused(std::string(names_.at(number)) + ": rank " +
                       std::to_string(parts_[at].owner) + " has a shard of " + listed(sizes) +
                       " at " + listed(offsets) + ", which lies outside the tensor of " +
                       listed(whole));
      }
      const std::uint64_t elements = product(sizes);
      if (elements == 0) continue;
      held += elements;
      boxes.push_back({{offsets.begin(), offsets.end()}, {sizes.begin(), sizes.end()}});
    }
    const std::uint64_t all = product(whole);
    if (held != all || (boxes.size() > 1 && !tile(whole, boxes))) {
      return refused(std::string(names_.at(number)) + ": the shards of all ranks have " +
                     std::to_string(held) + " elements in total and do not cover each of the " +
                     std::to_string(all) + " elements of the tensor of " + listed(whole) +
                     " exactly once");
    }
    proven.emplace(hash, number);
  }
  return {};
}

std::vector<index::MetadataDraft::ShardId> GlobalPlan::describe(index::MetadataDraft& draft) const {
  std::vector<index::MetadataDraft::ShardId> shards(parts_.size());
  const auto last = [&] { return static_cast<std::uint32_t>(draft.entries().size() - 1); };
  for (std::uint32_t number = 0; number < entries_.size(); ++number) {
    const Entry& entry = entries_[number];
    const Row& row = row_of(entry);
    const StateTemplate& first = states_[entry.rank].state();
    const std::string_view name = names_.at(number);
    const auto path = first.path(entry.row);
    if (row.kind == Kind::object) {
      draft.add_object(name, path);
      shards[entry.first_part] = {last(), draft.add_shard({}, {})};
    } else {
      const auto whole = first.sizes(row);
      draft.add_tensor(name, path, first.dtype(row), row.requires_grad, whole);
      if (row.kind == Kind::tensor) {
        const std::vector<std::int64_t> begin(whole.size());
        shards[entry.first_part] = {last(), draft.add_shard(begin, whole)};
      } else {
        for (std::uint32_t at = entry.first_part; at != kNone; at = parts_[at].next) {
          const RankState& owner = states_[parts_[at].owner];
          const std::uint32_t box = owner.box(parts_[at].item);
          shards[at] = {last(), draft.add_shard(owner.offsets(box), owner.sizes(box))};
        }
      }
    }
  }
  return shards;
}

}  // namespace torch_ckpt::planning
