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
    shard,   // a shard of a DTensor
    object,  // a value that is not a tensor; assumed to be replicated
    other,   // planned by torch; only its name and path are used here
  };
  struct Row {
    Kind kind = Kind::other;
    bool is_present = true;  // false: ignore this value of Kind::other
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

/// Describes the state dict of one rank: a template, and the rank's parts of DTensors.
class RankState {
 public:
  /// A part of a tensor, as ids in this rank's extents_.
  struct Box {
    std::uint32_t offsets = 0;
    std::uint32_t sizes = 0;
    std::uint32_t layout = 0;  // in layouts_
  };
  static constexpr std::uint32_t kNone = 0xffffffff;

  explicit RankState(std::shared_ptr<const StateTemplate> of) : template_(std::move(of)) {
    boxes_of_rows_.resize(template_->size(), kNone);
  }

  const StateTemplate& state() const { return *template_; }
  const std::shared_ptr<const StateTemplate>& shared_template() const { return template_; }
  std::size_t size() const { return boxes_of_rows_.size(); }
  /// Returns true if the rank has a part of the row.
  bool has(std::size_t row) const {
    const StateTemplate::Row& what = template_->row(row);
    return what.kind == StateTemplate::Kind::shard ? boxes_of_rows_[row] != kNone : what.is_present;
  }
  /// Returns the box of a row of Kind::shard, or kNone if the rank has no part of it.
  std::uint32_t box(std::size_t row) const { return boxes_of_rows_[row]; }
  std::size_t boxes() const { return boxes_.size(); }
  std::span<const std::int64_t> offsets(std::uint32_t box) const {
    return extents_.at(boxes_[box].offsets);
  }
  std::span<const std::int64_t> sizes(std::uint32_t box) const {
    return extents_.at(boxes_[box].sizes);
  }
  /// Returns a hash of the mesh and the placements of the DTensor that has the box.
  std::uint64_t layout(std::uint32_t box) const { return layouts_[boxes_[box].layout]; }
  /// Returns the size of the rank's part of a row, in bytes.
  std::uint64_t bytes(std::size_t row) const;

  /// Sets the rank's part of a DTensor.
  void set_box(std::size_t row, std::span<const std::int64_t> offsets,
               std::span<const std::int64_t> sizes, std::uint64_t layout = 0);

  /// Encodes the boxes, without the template.
  std::string encode() const;
  /// Fails with Errc::frame_damaged unless the bytes encode the boxes of a rank with this template.
  static Result<RankState> decode(std::shared_ptr<const StateTemplate> of, std::string_view bytes);

 private:
  std::shared_ptr<const StateTemplate> template_;
  index::ExtentsTable extents_;
  std::vector<std::uint64_t> layouts_;
  std::vector<Box> boxes_;
  // Used by set_box().
  std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>, std::uint32_t> box_numbers_;
  std::vector<std::uint32_t> boxes_of_rows_;
};

}  // namespace torch_ckpt::planning
