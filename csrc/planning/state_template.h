#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "error.h"
#include "index/extents.h"
#include "index/metadata_draft.h"
#include "index/name_table.h"

namespace torch_ckpt::planning {

/// The part of a state dict on which a plan depends and which several ranks share: the name, kind,
/// dtype and size of each row, without values. The ranks of a mesh usually have the same template.
class StateTemplate {
 public:
  enum class Kind : std::uint8_t {
    tensor,  // a plain tensor; assumed to be replicated
    shard,   // shards of a tensor
    object,  // a value that is not a tensor; assumed to be replicated
    absent,  // a value that is not saved
  };
  struct Row {
    Kind kind = Kind::absent;
    bool is_described = false;  // torch describes the value, and Python provides its parts
    bool requires_grad = false;
    std::uint32_t dtype = 0;
    std::uint32_t size = 0;  // size of the global tensor

    bool operator==(const Row&) const = default;
  };
  using PathPart = index::MetadataDraft::PathPart;

  std::size_t size() const { return rows_.size(); }
  const Row& row(std::size_t number) const { return rows_[number]; }
  std::string_view name(std::size_t number) const { return names_.at(number); }
  /// Returns the number of the row with this name.
  std::optional<std::uint32_t> find(std::string_view name) const { return names_.find(name); }
  std::span<const PathPart> path(std::size_t number) const {
    return std::span(parts_).subspan(begins_[number], begins_[number + 1] - begins_[number]);
  }
  const std::string& dtype(const Row& row) const { return dtypes_[row.dtype].name; }
  std::uint64_t item_bytes(const Row& row) const { return dtypes_[row.dtype].item_bytes; }
  std::span<const std::int64_t> sizes(const Row& row) const { return extents_.at(row.size); }

  std::uint32_t add_dtype(std::string_view name, std::uint64_t item_bytes);
  std::uint32_t add_size(std::span<const std::int64_t> size) { return extents_.intern(size); }
  /// Adds a row. If the name exists, returns false and adds nothing.
  bool add(std::string_view name, std::span<const PathPart> path, const Row& row);

  std::string encode() const;
  /// Fails with Errc::frame_damaged if the bytes are not a template.
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

/// Describes the state dict of one rank: a template, and the rank's parts of sharded tensors.
///
/// A rank saves items: one for each row of the template, or several for a row of which the rank has
/// several parts. Items are numbered in the order of the rows.
class RankState {
 public:
  /// A part of a tensor, as ids in this rank's extents_.
  struct BoxIds {
    std::uint32_t offsets = 0;
    std::uint32_t sizes = 0;
    std::uint32_t layout = 0;  // in layouts_
  };
  static constexpr std::uint32_t kNone = 0xffffffff;
  /// The layout of a tensor without a mesh, such as a ShardedTensor.
  static constexpr std::uint64_t kNoLayout = 0;

  /// rows_of_items: the row of each item, in ascending order; empty if each row has one item.
  explicit RankState(std::shared_ptr<const StateTemplate> of,
                     std::vector<std::uint32_t> rows_of_items = {})
      : template_(std::move(of)), rows_of_items_(std::move(rows_of_items)) {
    boxes_of_items_.resize(rows_of_items_.empty() ? template_->size() : rows_of_items_.size(),
                           kNone);
  }

  const StateTemplate& state() const { return *template_; }
  const std::shared_ptr<const StateTemplate>& shared_template() const { return template_; }
  std::size_t items() const { return boxes_of_items_.size(); }
  std::uint32_t row_of(std::size_t item) const {
    return rows_of_items_.empty() ? static_cast<std::uint32_t>(item) : rows_of_items_[item];
  }
  const StateTemplate::Row& row(std::size_t item) const { return template_->row(row_of(item)); }
  std::string_view name(std::size_t item) const { return template_->name(row_of(item)); }
  /// Returns true if the rank has the item.
  bool has(std::size_t item) const {
    const StateTemplate::Kind kind = row(item).kind;
    return kind == StateTemplate::Kind::shard ? boxes_of_items_[item] != kNone
                                              : kind != StateTemplate::Kind::absent;
  }
  /// Returns the box of an item of Kind::shard, or kNone if the rank has no part of the tensor.
  std::uint32_t box(std::size_t item) const { return boxes_of_items_[item]; }
  std::size_t boxes() const { return boxes_.size(); }
  std::span<const std::int64_t> offsets(std::uint32_t box) const {
    return extents_.at(boxes_[box].offsets);
  }
  std::span<const std::int64_t> sizes(std::uint32_t box) const {
    return extents_.at(boxes_[box].sizes);
  }
  /// Returns a hash of the mesh and the placements of the DTensor that has the box, or kNoLayout.
  std::uint64_t layout(std::uint32_t box) const { return layouts_[boxes_[box].layout]; }
  /// Returns the size of an item, in bytes.
  std::uint64_t bytes(std::size_t item) const;

  /// Sets the part of a tensor that is an item.
  void set_box(std::size_t item, std::span<const std::int64_t> offsets,
               std::span<const std::int64_t> sizes, std::uint64_t layout = kNoLayout);

  /// Encodes the boxes, without the template.
  std::string encode() const;
  /// Fails with Errc::frame_damaged unless the bytes encode the boxes of a rank with this template.
  static Result<RankState> decode(std::shared_ptr<const StateTemplate> of, std::string_view bytes);

 private:
  std::shared_ptr<const StateTemplate> template_;
  index::ExtentsTable extents_;
  std::vector<std::uint64_t> layouts_;
  std::vector<BoxIds> boxes_;
  // Used by set_box().
  std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>, std::uint32_t> box_numbers_;
  std::vector<std::uint32_t> rows_of_items_;
  std::vector<std::uint32_t> boxes_of_items_;
};

}  // namespace torch_ckpt::planning
