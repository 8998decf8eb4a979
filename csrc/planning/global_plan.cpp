#include "planning/global_plan.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "planning/tiling.h"
#include "seeded_hash.h"

namespace torch_ckpt::planning {
namespace {

using Kind = StateTemplate::Kind;
using Row = StateTemplate::Row;

using index::listed;

std::string_view kind_name(Kind kind) {
  switch (kind) {
    case Kind::tensor:
      return "a plain tensor";
    case Kind::shard:
      return "a DTensor";
    case Kind::object:
      return "an object";
    case Kind::other:
      break;
  }
  return "another kind of tensor";
}

std::uint64_t product(std::span<const std::int64_t> sizes) {
  std::uint64_t all = 1;
  for (const std::int64_t size : sizes) all *= static_cast<std::uint64_t>(size);
  return all;
}

Error refused(std::string detail) {
  return format_error(Errc::invalid_argument, std::move(detail));
}

constexpr std::uint32_t kNone = 0xffffffff;

/// Parts by their entry and their place in the whole.
class PartTable {
 public:
  /// The number of the part, or the free slot's, in which it is to be put.
  std::uint32_t& slot(std::uint32_t entry, std::uint32_t offsets, std::uint32_t sizes) {
    if (2 * (used_ + 1) > slots_.size()) grow();
    return find({entry, offsets, sizes});
  }
  void added() { ++used_; }

 private:
  struct Key {
    std::uint32_t entry = 0;
    std::uint32_t offsets = 0;
    std::uint32_t sizes = 0;
    bool operator==(const Key&) const = default;
  };
  struct Slot {
    Key key;
    std::uint32_t part = kNone;
  };

  std::uint32_t& find(const Key& key) {
    const std::size_t mask = slots_.size() - 1;
    const std::uint64_t hash =
        SeededHash()((std::uint64_t{key.entry} << 32) | key.offsets) + key.sizes;
    std::size_t at = hash & mask;
    while (slots_[at].part != kNone && !(slots_[at].key == key)) at = (at + 1) & mask;
    slots_[at].key = key;
    return slots_[at].part;
  }
  void grow() {
    std::vector<Slot> before = std::exchange(slots_, {});
    slots_.resize(std::max<std::size_t>(64, 4 * before.size()));
    for (const Slot& slot : before) {
      if (slot.part != kNone) find(slot.key) = slot.part;
    }
  }

  std::vector<Slot> slots_;
  std::size_t used_ = 0;
};

}  // namespace

Result<GlobalPlan> GlobalPlan::of(std::vector<StateTemplate> templates) {
  GlobalPlan plan;
  plan.templates_ = std::move(templates);
  plan.part_of_row_.resize(plan.ranks());
  PartTable known;
  index::ExtentsTable extents;
  // Of the template's extents those here.
  std::vector<std::uint32_t> known_extents;
  const auto interned = [&](const StateTemplate& here, std::uint32_t id) {
    std::uint32_t& found = known_extents[id];
    if (found == kNone) found = extents.intern(here.extents(id));
    return found;
  };
  // Of each row of the rank before: most ranks have the same names in the same order.
  std::vector<std::uint32_t> last_entries;
  for (std::uint32_t rank = 0; rank < plan.ranks(); ++rank) {
    const StateTemplate& here = plan.templates_[rank];
    known_extents.assign(here.extents_count(), kNone);
    last_entries.resize(here.size(), kNone);
    std::vector<std::uint32_t>& parts = plan.part_of_row_[rank];
    parts.assign(here.size(), kNone);
    for (std::uint32_t i = 0; i < here.size(); ++i) {
      const Row& row = here.row(i);
      if (row.kind == Kind::other && !row.is_here) continue;
      std::uint32_t& number = last_entries[i];
      if (number == kNone || plan.names_.at(number) != here.name(i)) {
        number = plan.names_.add(here.name(i)).first;
      }
      if (number == plan.entries_.size()) plan.entries_.push_back({rank, i, kNone, kNone});
      Entry& entry = plan.entries_[number];
      if (auto same = plan.check_same(entry, rank, i); !same) return std::move(same).error();
      if (row.kind == Kind::other || !row.is_here) continue;
      std::uint32_t offsets = 0;
      std::uint32_t sizes = 0;
      if (row.kind == Kind::shard) {
        offsets = interned(here, row.offsets);
        sizes = interned(here, row.sizes);
      }
      std::uint32_t& slot = known.slot(number, offsets, sizes);
      if (slot == kNone) {
        slot = static_cast<std::uint32_t>(plan.parts_.size());
        known.added();
        Part part;
        part.owner = rank;
        part.row = i;
        part.entry = number;
        part.bytes = row.bytes;
        (entry.last_part == kNone ? entry.first_part : plan.parts_[entry.last_part].next) = slot;
        entry.last_part = slot;
        plan.parts_.push_back(part);
      }
      ++plan.parts_[slot].holders;
      parts[i] = slot;
    }
  }
  plan.choose_owners();
  if (auto covered = plan.check_cover(); !covered) return std::move(covered).error();
  return plan;
}

Result<> GlobalPlan::check_same(const Entry& first, std::uint32_t rank, std::uint32_t row) const {
  if (first.rank == rank && first.row == row) return {};
  const StateTemplate& there = templates_[first.rank];
  const StateTemplate& here = templates_[rank];
  const Row& a = there.row(first.row);
  const Row& b = here.row(row);
  const bool has_size = a.kind == Kind::tensor || a.kind == Kind::shard;
  if (a.kind == b.kind &&
      (!has_size || (there.dtype(a) == here.dtype(b) &&
                     std::ranges::equal(there.extents(a.size), here.extents(b.size))))) {
    return {};
  }
  const std::string name(here.name(row));
  const std::string ranks[2] = {"rank " + std::to_string(first.rank),
                                "rank " + std::to_string(rank)};
  if (a.kind != b.kind) {
    return refused(name + ": " + ranks[0] + " has " + std::string(kind_name(a.kind)) + ", " +
                   ranks[1] + " " + std::string(kind_name(b.kind)));
  }
  const std::string of[2] = {"torch." + there.dtype(a) + " " + listed(there.extents(a.size)),
                             "torch." + here.dtype(b) + " " + listed(here.extents(b.size))};
  const std::string why =
      a.kind == Kind::tensor
          ? "; a plain tensor is taken to be the same on all ranks, so only one of them would be "
            "saved"
          : "; a DTensor has the same dtype and size on all ranks";
  return refused(name + ": " + ranks[0] + " has " + of[0] + ", " + ranks[1] + " has " + of[1] +
                 why);
}

void GlobalPlan::choose_owners() {
  std::vector<std::uint64_t> loads(ranks());
  for (Part& part : parts_) {
    if (part.holders == 1) loads[part.owner] += part.bytes;
  }
  // Of each part that several ranks have, these, in their order.
  std::vector<std::vector<std::pair<std::uint32_t, std::uint32_t>>> holders(parts_.size());
  std::vector<std::uint32_t> several;
  for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
    for (std::uint32_t row = 0; row < part_of_row_[rank].size(); ++row) {
      const std::uint32_t part = part_of_row_[rank][row];
      if (part == kNone || parts_[part].holders < 2) continue;
      if (holders[part].empty()) several.push_back(part);
      holders[part].emplace_back(rank, row);
    }
  }
  for (const std::uint32_t number : several) {
    Part& part = parts_[number];
    const auto chosen = std::ranges::min_element(
        holders[number], {}, [&](const auto& holder) { return loads[holder.first]; });
    std::tie(part.owner, part.row) = *chosen;
    loads[part.owner] += part.bytes;
  }
  owned_.assign(ranks(), {});
  for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
    for (std::uint32_t row = 0; row < part_of_row_[rank].size(); ++row) {
      const std::uint32_t part = part_of_row_[rank][row];
      if (part != kNone && parts_[part].owner == rank && parts_[part].row == row) {
        owned_[rank].push_back(row);
      }
    }
  }
}

Result<> GlobalPlan::check_cover() const {
  std::vector<Box> boxes;
  for (std::uint32_t number = 0; number < entries_.size(); ++number) {
    const Entry& entry = entries_[number];
    if (row_of(entry).kind != Kind::shard) continue;
    const auto whole = templates_[entry.rank].extents(row_of(entry).size);
    boxes.clear();
    std::uint64_t held = 0;
    for (std::uint32_t at = entry.first_part; at != kNone; at = parts_[at].next) {
      const StateTemplate& owner = templates_[parts_[at].owner];
      const Row& row = owner.row(parts_[at].row);
      const auto offsets = owner.extents(row.offsets);
      const auto sizes = owner.extents(row.sizes);
      const std::uint64_t elements = product(sizes);
      if (elements == 0) continue;
      held += elements;
      boxes.push_back({{offsets.begin(), offsets.end()}, {sizes.begin(), sizes.end()}});
    }
    const std::uint64_t all = product(whole);
    if (held == all && (boxes.size() < 2 || tile(whole, boxes))) continue;
    return refused(std::string(names_.at(number)) + ": the shards of all ranks have " +
                   std::to_string(held) + " elements, and do not make up the tensor of " +
                   listed(whole) + ", which has " + std::to_string(all));
  }
  return {};
}

bool GlobalPlan::plans(std::string_view name) const {
  const auto number = names_.find(name);
  return number && row_of(entries_[*number]).kind != Kind::other;
}

std::vector<index::CheckpointIndex::Placed> GlobalPlan::describe(
    index::CheckpointIndex& index, const index::CheckpointIndex* rest) const {
  std::vector<index::CheckpointIndex::Placed> shards(parts_.size());
  const auto last = [&] { return static_cast<std::uint32_t>(index.entries().size() - 1); };
  for (std::uint32_t number = 0; number < entries_.size(); ++number) {
    const Entry& entry = entries_[number];
    const Row& row = row_of(entry);
    const StateTemplate& first = templates_[entry.rank];
    if (row.kind == Kind::other) {
      if (rest != nullptr) index.add_from(*rest, names_.at(number));
    } else if (row.kind == Kind::object) {
      index.add_object(names_.at(number));
      shards[entry.first_part] = {last(), index.add_shard({}, {})};
    } else {
      index.add_tensor(names_.at(number), first.dtype(row), row.requires_grad,
                       first.extents(row.size));
      for (std::uint32_t at = entry.first_part; at != kNone; at = parts_[at].next) {
        const StateTemplate& owner = templates_[parts_[at].owner];
        const Row& part = owner.row(parts_[at].row);
        shards[at] = {last(),
                      index.add_shard(owner.extents(part.offsets), owner.extents(part.sizes))};
      }
    }
    index.add_path(names_.at(number), first.path(entry.row));
  }
  return shards;
}

}  // namespace torch_ckpt::planning
