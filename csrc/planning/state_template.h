#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "error.h"
#include "index/checkpoint_index.h"
#include "index/extents.h"
#include "index/name_table.h"

namespace torch_ckpt::planning {

/// What a state dict is made of, as far as a plan depends on it and ranks have it alike: names,
/// kinds, dtypes and sizes, row by row, and no values. Ranks of one mesh have the same one.
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
    bool is_here = true;  // false: others that count for nothing
    bool requires_grad = false;
    std::uint32_t dtype = 0;
    std::uint32_t size = 0;  // of the whole tensor

    bool operator==(const Row&) const = default;
  };
  using PathPart = index::CheckpointIndex::PathPart;

  std::size_t size() const { return rows_.size(); }
  const Row& row(std::size_t number) const { return rows_[number]; }
  std::string_view name(std::size_t number) const { return names_.at(number); }
  std::span<const PathPart> path(std::size_t number) const {
    return std::span(parts_).subspan(begins_[number], begins_[number + 1] - begins_[number]);
  }
  const std::string& dtype(const Row& row) const { return dtypes_[row.dtype].name; }
  std::uint64_t item_bytes(const Row& row) const { return dtypes_[row.dtype].item_bytes; }
  std::span<const std::int64_t> sizes(const Row& row) const { return extents_.at(row.size); }

  std::uint32_t add_dtype(std::string_view name, std::uint64_t item_bytes);
  std::uint32_t add_size(std::span<const std::int64_t> size) { return extents_.intern(size); }
  /// False, and nothing is added, where a row has that name.
  bool add(std::string_view name, std::span<const PathPart> path, const Row& row);

  std::string encode() const;
  /// Errc::frame_damaged where they are not the bytes of a template.
  static Result<StateTemplate> decode(std::string_view bytes);

 private:
  struct Dtype {
    std::string name;
    std::uint64_t item_bytes = 0;
  };

  index::NameTable names_;
  std::vector<Row> rows_;
  std::vector<PathPart> parts_;
  std::vector<std::size_t> begins_{0};
  std::vector<Dtype> dtypes_;
  index::ExtentsTable extents_;
};

/// What one rank has of a state dict: a template, and which parts of the DTensors.
class RankState {
 public:
  /// A part of a tensor, in the extents of this rank.
  struct Box {
    std::uint32_t offsets = 0;
    std::uint32_t sizes = 0;
  };
  static constexpr std::uint32_t kNone = 0xffffffff;

  explicit RankState(std::shared_ptr<const StateTemplate> of) : template_(std::move(of)) {
    boxes_of_rows_.resize(template_->size(), kNone);
  }

  const StateTemplate& state() const { return *template_; }
  const std::shared_ptr<const StateTemplate>& shared_template() const { return template_; }
  std::size_t size() const { return boxes_of_rows_.size(); }
  /// Whether the rank has anything of a row.
  bool has(std::size_t row) const {
    const StateTemplate::Row& what = template_->row(row);
    return what.kind == StateTemplate::Kind::shard ? boxes_of_rows_[row] != kNone : what.is_here;
  }
  /// Of a shard that is here.
  std::uint32_t box(std::size_t row) const { return boxes_of_rows_[row]; }
  std::size_t boxes() const { return boxes_.size(); }
  std::span<const std::int64_t> offsets(std::uint32_t box) const {
    return extents_.at(boxes_[box].offsets);
  }
  std::span<const std::int64_t> sizes(std::uint32_t box) const {
    return extents_.at(boxes_[box].sizes);
  }
  /// Of what the rank has of a row.
  std::uint64_t bytes(std::size_t row) const;

  /// Says which part of a DTensor is here.
  void set_box(std::size_t row, std::span<const std::int64_t> offsets,
               std::span<const std::int64_t> sizes);

  /// All but the template.
  std::string encode() const;
  /// Errc::frame_damaged where they are not the bytes of what a rank has of this template.
  static Result<RankState> decode(std::shared_ptr<const StateTemplate> of, std::string_view bytes);

 private:
  std::shared_ptr<const StateTemplate> template_;
  index::ExtentsTable extents_;
  std::vector<Box> boxes_;
  std::unordered_map<std::uint64_t, std::uint32_t> box_numbers_;  // of a state that is made here
  std::vector<std::uint32_t> boxes_of_rows_;
};

}  // namespace torch_ckpt::planning
