#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "error.h"
#include "index/checkpoint_index.h"
#include "index/metadata_draft.h"
#include "planning/state_template.h"

namespace torch_ckpt::planning {

// Decides which rank writes which part of the ranks' state dicts:
//
//   1. Plain tensors or objects with the same name on several ranks are one part. Shards with the
//      same name are one part if they have the same offsets and sizes.
//   2. If only one rank has a part, that rank writes it. If several ranks have it, the part is
//      assigned to the one with the fewest bytes so far (like torch's dedup_save_plans).
//   3. Values with the same name must have the same kind, dtype and size on all ranks. The shards
//      of a tensor must cover each of its elements exactly once.
//   4. Sharded tensors with the same name may have several layouts (a mesh and placements): tied
//      weights of two pipeline stages, or a mesh for each group of ranks. They must be copies of one
//      tensor: each layout must have all parts, and the ranks compare the checksums of their copies
//      (planning/replicas.h) before the save is committed. The parts of a tensor without a mesh,
//      such as a ShardedTensor, are compared if several ranks have them.
//   5. A rank writes the items that torch describes after all others.
class GlobalPlan {
 public:
  /// Fails with Errc::unsavable if the states violate rule 3 or 4; the error names the value
  /// and the ranks.
  static Result<GlobalPlan> of(std::vector<RankState> states);

  std::size_t ranks() const { return states_.size(); }
  const RankState& of_rank(std::size_t rank) const { return states_[rank]; }
  /// Returns the items that the rank writes, in the order of writing.
  std::span<const std::uint32_t> owned(std::size_t rank) const { return owned_[rank]; }
  /// Returns the bytes of plain tensors and DTensors that each rank writes.
  std::span<const std::uint64_t> bytes() const { return bytes_; }
  /// Returns the items of a rank that other ranks have, too, and that must be copies, in ascending
  /// order. Empty for most plans.
  std::span<const std::uint32_t> copies(std::size_t rank) const {
    return copies_.empty() ? std::span<const std::uint32_t>() : copies_[rank];
  }
  /// Number of names. Each name has a first row, on the first rank that has the name.
  std::size_t names() const { return entries_.size(); }
  std::string_view name(std::size_t number) const { return names_.at(number); }
  const StateTemplate& first_template(std::size_t number) const {
    return states_[entries_[number].rank].state();
  }
  std::uint32_t first_row(std::size_t number) const { return entries_[number].row; }

  /// Adds all names to a draft, without locations. Returns the shard of each part.
  std::vector<index::MetadataDraft::ShardId> describe(index::MetadataDraft& draft) const;
  /// Returns the part of an item of a rank, which must have one.
  std::uint32_t part_of_item(std::size_t rank, std::size_t item) const {
    return part_of_item_[rank][item];
  }
  /// Returns the part of item owned(rank)[number].
  std::uint32_t part(std::size_t rank, std::size_t number) const {
    return part_of_item_[rank][owned_[rank][number]];
  }
  /// Returns the name number of item owned(rank)[number].
  std::uint32_t entry(std::size_t rank, std::size_t number) const {
    return parts_[part(rank, number)].entry;
  }

 private:
  struct Entry {
    std::uint32_t rank = 0;
    std::uint32_t row = 0;
    std::uint32_t first_part = kNone;
    std::uint32_t last_part = kNone;
    std::uint64_t layout = 0;  // of the first part
    bool has_copies = false;   // has several layouts, or one without a mesh
  };
  struct Part {
    std::uint32_t owner = kNone;
    std::uint32_t item = 0;  // of the owner
    std::uint32_t entry = 0;
    std::uint32_t next = kNone;  // next part of the entry
    std::uint32_t holders = 0;   // number of ranks that have the part
    // Shards only: ids of the extents; equal extents have equal ids.
    std::uint32_t offsets = 0;
    std::uint32_t sizes = 0;
    std::uint64_t bytes = 0;
  };
  static constexpr std::uint32_t kNone = 0xffffffff;

  const StateTemplate::Row& row_of(const Entry& entry) const {
    return states_[entry.rank].state().row(entry.row);
  }
  /// Adds the new names of a rank's template. Returns the entry of each row of the template.
  Result<std::vector<std::uint32_t>> add_entries(std::uint32_t rank);
  Result<> check_same(const Entry& first, std::uint32_t rank, std::uint32_t row) const;
  void choose_owners();
  /// Sets copies_, and checks rule 4 except for the checksums.
  Result<> find_copies();
  /// Returns true if the parts of two entries have the same offsets and sizes.
  bool have_equal_parts(const Entry& one, const Entry& other) const;
  Result<> check_cover() const;

  std::vector<RankState> states_;
  index::NameTable names_;
  std::vector<Entry> entries_;  // by name
  std::vector<Part> parts_;
  std::vector<std::vector<std::uint32_t>> part_of_item_;  // by rank and item
  std::vector<std::vector<std::uint32_t>> owned_;
  std::vector<std::uint64_t> bytes_;                // by rank
  std::vector<std::vector<std::uint32_t>> copies_;  // empty if no entry has copies
};

/// Formats a list of ranks in ascending order: "rank 3", "ranks 0-2, 7".
std::string text_of_ranks(std::span<const std::uint32_t> ranks);

}  // namespace torch_ckpt::planning
