#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "index/entry_table.h"

namespace torch_ckpt::index {

/// The metadata of a save before it is encoded: entries, paths, files and locations.
class MetadataDraft : public EntryTable {
 public:
  /// A key or list index in the path to a value in the nested state dict. A value's name is the
  /// parts of its path, joined by dots.
  struct PathPart {
    std::uint32_t bytes = 0;
    bool is_number = false;

    bool operator==(const PathPart&) const = default;
  };
  /// Identifies a shard by its entry's number and its own number within the entry.
  struct ShardId {
    std::uint32_t entry = 0;
    std::uint32_t number = 0;
  };

  void add_tensor(std::string_view name, std::span<const PathPart> path, std::string_view dtype,
                  bool requires_grad, std::span<const std::int64_t> size);
  void add_object(std::string_view name, std::span<const PathPart> path);
  /// Adds a shard to the last entry, and returns its number within the entry. Ignores the extents
  /// if the entry is an object.
  std::uint32_t add_shard(std::span<const std::int64_t> offsets,
                          std::span<const std::int64_t> sizes);
  /// Replaces all files. `files` holds names and encoded checksum tables.
  void set_files(std::span<const std::pair<std::string_view, std::string_view>> files);
  /// Sets the location of a shard. Returns true if it has changed.
  bool set_location(ShardId shard, std::uint32_t file, std::uint64_t offset, std::uint64_t length);

  /// Shards with a location, in the order in which their locations were first set.
  std::span<const ShardId> located_shards() const { return located_shards_; }
  std::span<const PathPart> path(std::size_t entry) const {
    return std::span(path_parts_)
        .subspan(path_begins_[entry], path_begins_[entry + 1] - path_begins_[entry]);
  }

 private:
  void add_name(std::string_view name, std::span<const PathPart> path);

  std::vector<PathPart> path_parts_;
  std::vector<std::size_t> path_begins_{0};
  std::vector<ShardId> located_shards_;
};

}  // namespace torch_ckpt::index
