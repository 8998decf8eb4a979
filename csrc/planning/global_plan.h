#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "index/checkpoint_index.h"
#include "planning/state_template.h"

namespace torch_ckpt::planning {

// Assigns the parts of all ranks' state dicts to ranks, which write them:
//
//   1. Plain tensors, or objects, with the same name on several ranks are one part. Shards with the
//      same name are one part if they have the same offsets and sizes.
//   2. A part that only one rank has is written by that rank. A part that several ranks have is
//      assigned to the rank with the fewest bytes so far (like torch's dedup_save_plans).
//   3. Values with the same name must have the same kind, dtype and size on all ranks, and the
//      shards of a tensor must cover it, each element exactly once.
class GlobalPlan {
 public:
  /// Fails with Errc::invalid_argument, which names the value and the ranks, if rule 3 is violated.
  static Result<GlobalPlan> of(std::vector<RankState> states);

  std::size_t ranks() const { return states_.size(); }
  const RankState& of_rank(std::size_t rank) const { return states_[rank]; }
  /// The rows that the rank writes, in ascending order.
  std::span<const std::uint32_t> owned(std::size_t rank) const { return owned_[rank]; }
  /// True if this plan, and not torch's planner, assigns the value of this name.
  bool plans(std::string_view name) const;
  /// Names are numbered; each has a first row, on the first rank that has it.
  std::size_t names() const { return entries_.size(); }
  std::string_view name(std::size_t number) const { return names_.at(number); }
  const StateTemplate& first_template(std::size_t number) const {
    return states_[entries_[number].rank].state();
  }
  std::uint32_t first_row(std::size_t number) const { return entries_[number].row; }

  /// Adds all names to an index, without locations. Names planned by torch are taken from
  /// `torch_items`. Returns the shard of each part.
  std::vector<index::CheckpointIndex::ShardId> describe(
      index::CheckpointIndex& index, const index::CheckpointIndex* torch_items) const;
  /// The part of a row in owned(rank), by its position there.
  std::uint32_t part(std::size_t rank, std::size_t number) const {
    return part_of_row_[rank][owned_[rank][number]];
  }
  /// The number of the name of a row in owned(rank), by its position there.
  std::uint32_t entry(std::size_t rank, std::size_t number) const {
    return parts_[part(rank, number)].entry;
  }

 private:
  struct Entry {
    std::uint32_t rank = 0;
    std::uint32_t row = 0;
    std::uint32_t first_part = kNone;
    std::uint32_t last_part = kNone;
  };
  struct Part {
    std::uint32_t owner = kNone;
    std::uint32_t row = 0;  // of the owner
    std::uint32_t entry = 0;
    std::uint32_t next = kNone;  // of the entry
    std::uint32_t holders = 0;
    // For shards: numbers in a table in which equal extents have the same number.
    std::uint32_t offsets = 0;
    std::uint32_t sizes = 0;
    std::uint64_t bytes = 0;
  };
  static constexpr std::uint32_t kNone = 0xffffffff;

  const StateTemplate::Row& row_of(const Entry& entry) const {
    return states_[entry.rank].state().row(entry.row);
  }
  /// Adds the new names of a rank's template. Returns the entry of each of its rows.
  Result<std::vector<std::uint32_t>> add_entries(std::uint32_t rank);
  Result<> check_same(const Entry& first, std::uint32_t rank, std::uint32_t row) const;
  void choose_owners();
  /// True if the parts of two entries have the same offsets and sizes.
  bool have_equal_parts(const Entry& one, const Entry& other) const;
  Result<> check_cover() const;

  std::vector<RankState> states_;
  index::NameTable names_;
  std::vector<Entry> entries_;  // by name
  std::vector<Part> parts_;
  std::vector<std::vector<std::uint32_t>> part_of_row_;  // by rank and row
  std::vector<std::vector<std::uint32_t>> owned_;
};

}  // namespace torch_ckpt::planning
