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

/// Where a rank has stored a part.
struct StoredPart {
  std::string_view file;
  std::uint64_t offset = 0;  // in bytes
  std::uint64_t length = 0;
};

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
  static Result<GlobalPlan> of(std::vector<StateTemplate> templates);

  std::size_t ranks() const { return templates_.size(); }
  const StateTemplate& of_rank(std::size_t rank) const { return templates_[rank]; }
  /// Rows of the rank's template, in their order.
  std::span<const std::uint32_t> owned(std::size_t rank) const { return owned_[rank]; }
  /// Whether a name is that of a row that is planned here.
  bool plans(std::string_view name) const;
  /// All names, with the first row of each.
  std::size_t names() const { return entries_.size(); }
  std::string_view name(std::size_t number) const { return names_.at(number); }
  const StateTemplate& first_rank(std::size_t number) const {
    return templates_[entries_[number].rank];
  }
  std::uint32_t first_row(std::size_t number) const { return entries_[number].row; }

  /// The index of what the ranks have stored of their rows; of the names that are planned by torch
  /// what `rest` has.
  index::CheckpointIndex index(const std::vector<std::vector<StoredPart>>& stored,
                               const index::CheckpointIndex* rest) const;

 private:
  struct Entry {
    std::uint32_t rank = 0;
    std::uint32_t row = 0;
    std::uint32_t first_part = kNone;
    std::uint32_t last_part = kNone;
  };
  struct Part {
    std::uint32_t owner = kNone;
    std::uint32_t row = 0;       // of the owner
    std::uint32_t next = kNone;  // of the entry
    std::uint32_t holders = 0;
    std::uint64_t bytes = 0;
  };
  static constexpr std::uint32_t kNone = 0xffffffff;

  const StateTemplate::Row& row_of(const Entry& entry) const {
    return templates_[entry.rank].row(entry.row);
  }
  Result<> check_same(const Entry& first, std::uint32_t rank, std::uint32_t row) const;
  void choose_owners();
  Result<> check_cover() const;

  std::vector<StateTemplate> templates_;
  index::NameTable names_;
  std::vector<Entry> entries_;  // by name
  std::vector<Part> parts_;
  std::vector<std::vector<std::uint32_t>> part_of_row_;  // by rank and row
  std::vector<std::vector<std::uint32_t>> owned_;
};

}  // namespace torch_ckpt::planning
