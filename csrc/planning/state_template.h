#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "index/checkpoint_index.h"
#include "index/extents.h"
#include "index/name_table.h"

namespace torch_ckpt::planning {

/// What one rank has of a state dict, as far as a plan depends on it: names, kinds, dtypes, sizes
/// and places in the whole, and no values. Ranks tell each other of it as bytes.
class StateTemplate {
 public:
  enum class Kind : std::uint8_t {
    tensor,  // plain, taken to be the same on all ranks
    shard,   // of a DTensor
    object,  // what is not a tensor, taken to be the same on all ranks
    other,   // torch's planner plans it; here only its name and path count
  };
  struct Row {
    Kind kind = Kind::other;
    // Of shards: whether the rank has anything of it. Others that are not here count for nothing.
    bool is_here = true;
    bool requires_grad = false;
    std::uint32_t dtype = 0;    // of dtypes()
    std::uint32_t size = 0;     // of the whole tensor; these three in extents()
    std::uint32_t offsets = 0;  // of the part that is here
    std::uint32_t sizes = 0;
    std::uint64_t bytes = 0;  // of the part that is here

    bool operator==(const Row&) const = default;
  };
  using PathPart = index::CheckpointIndex::PathPart;

  std::size_t size() const { return rows_.size(); }
  const Row& row(std::size_t number) const { return rows_[number]; }
  std::string_view name(std::size_t number) const { return names_.at(number); }
  std::span<const PathPart> path(std::size_t number) const {
    return std::span(parts_).subspan(begins_[number], begins_[number + 1] - begins_[number]);
  }
  const std::string& dtype(const Row& row) const { return dtypes_[row.dtype]; }
  std::span<const std::int64_t> extents(std::uint32_t id) const { return extents_.at(id); }
  std::size_t extents_count() const { return extents_.size(); }

  std::uint32_t add_dtype(std::string_view dtype);
  std::uint32_t add_extents(std::span<const std::int64_t> numbers) {
    return extents_.intern(numbers);
  }
  /// False, and nothing is added, where a row has that name.
  bool add(std::string_view name, std::span<const PathPart> path, const Row& row);

  std::string encode() const;
  /// Errc::frame_damaged where they are not the bytes of a template.
  static Result<StateTemplate> decode(std::string_view bytes);

 private:
  index::NameTable names_;
  std::vector<Row> rows_;
  std::vector<PathPart> parts_;
  std::vector<std::size_t> begins_{0};
  std::vector<std::string> dtypes_;
  index::ExtentsTable extents_;
};

}  // namespace torch_ckpt::planning
