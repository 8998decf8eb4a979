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

// Which rank writes what, of the states of all ranks:
//
//   1. Plain tensors and objects of one name are one part, whoever has them. Shards of one name are
//      one part where they begin at the same place and have the same size.
//   2. What only one rank has, it writes. What several have goes to the one with the fewest bytes
//      so far (as torch's dedup_save_plans).
//   3. All that ranks have under one name has the same kind, dtype and size, and the shards of a
//      tensor make it up, each element once.
class GlobalPlan {
 public:
  /// Errc::invalid_argument where the third does not hold, by name and ranks.
  static Result<GlobalPlan> of(std::vector<RankState> states);

  std::size_t ranks() const { return states_.size(); }
  const RankState& of_rank(std::size_t rank) const { return states_[rank]; }
  /// Rows of the rank, in their order.
  std::span<const std::uint32_t> owned(std::size_t rank) const { return owned_[rank]; }
  /// Whether a name is that of a row that is planned here.
  bool plans(std::string_view name) const;
  /// All names, with the first row of each.
  std::size_t names() const { return entries_.size(); }
  std::string_view name(std::size_t number) const { return names_.at(number); }
  const StateTemplate& first_template(std::size_t number) const {
    return states_[entries_[number].rank].state();
  }
  std::uint32_t first_row(std::size_t number) const { return entries_[number].row; }

  /// Puts all names into an index, without places; of the names that are planned by torch what
  /// `rest` has. The shard of each part.
  std::vector<index::CheckpointIndex::Placed> describe(index::CheckpointIndex& index,
                                                       const index::CheckpointIndex* rest) const;
  /// The part that a rank's owned row is, by its number among these.
  std::uint32_t part(std::size_t rank, std::size_t number) const {
    return part_of_row_[rank][owned_[rank][number]];
  }
  /// The number of its name.
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
    // Of shards, each once in the plan.
    std::uint32_t offsets = 0;
    std::uint32_t sizes = 0;
    std::uint64_t bytes = 0;
  };
  static constexpr std::uint32_t kNone = 0xffffffff;

  const StateTemplate::Row& row_of(const Entry& entry) const {
    return states_[entry.rank].state().row(entry.row);
  }
  /// Adds what is new of a rank's template; the entry of each of its rows.
  Result<std::vector<std::uint32_t>> add_entries(std::uint32_t rank);
  Result<> check_same(const Entry& first, std::uint32_t rank, std::uint32_t row) const;
  void choose_owners();
  /// Whether the parts of two entries have the same sizes and places.
  bool are_cut_alike(const Entry& one, const Entry& other) const;
  Result<> check_cover() const;

  std::vector<RankState> states_;
  index::NameTable names_;
  std::vector<Entry> entries_;  // by name
  std::vector<Part> parts_;
  std::vector<std::vector<std::uint32_t>> part_of_row_;  // by rank and row
  std::vector<std::vector<std::uint32_t>> owned_;
};

}  // namespace torch_ckpt::planning
