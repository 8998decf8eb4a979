#include "index/metadata_draft.h"

#include <algorithm>

namespace torch_ckpt::index {

void MetadataDraft::add_tensor(std::string_view name, std::span<const PathPart> path,
                               std::string_view dtype, bool requires_grad,
                               std::span<const std::int64_t> size) {
  add_name(name, path);
  const auto known = std::ranges::find(dtypes_, dtype);
  const auto number = static_cast<std::uint32_t>(known - dtypes_.begin());
  if (known == dtypes_.end()) dtypes_.emplace_back(dtype);
  entries_.push_back({true, requires_grad, number, extents_.intern(size),
                      static_cast<std::uint32_t>(shards_.size()), 0});
}

void MetadataDraft::add_object(std::string_view name, std::span<const PathPart> path) {
  add_name(name, path);
  entries_.push_back({false, false, kNone, kNone, static_cast<std::uint32_t>(shards_.size()), 0});
}

std::uint32_t MetadataDraft::add_shard(std::span<const std::int64_t> offsets,
                                       std::span<const std::int64_t> sizes) {
  Shard& shard = shards_.emplace_back();
  if (entries_.back().is_tensor) {
    shard.offsets = extents_.intern(offsets);
    shard.sizes = extents_.intern(sizes);
  }
  return entries_.back().shard_count++;
}

void MetadataDraft::set_files(
    std::span<const std::pair<std::string_view, std::string_view>> files) {
  texts_.clear();
  files_.clear();
  tables_.clear();
  std::size_t bytes = 0;
  for (const auto& [name, table] : files) bytes += name.size() + table.size();
  texts_.reserve(bytes);
  for (const auto& [name, table] : files) {
    files_.push_back(add_text(name));
    tables_.push_back(add_text(table));
  }
}

bool MetadataDraft::set_location(ShardId shard, std::uint32_t file, std::uint64_t offset,
                                 std::uint64_t length) {
  Shard& location = shards_[entries_[shard.entry].first_shard + shard.number];
  if (location.file == file && location.offset == offset && location.length == length) return false;
  if (location.file == kNone) located_shards_.push_back(shard);
  location.file = file;
  location.offset = offset;
  location.length = length;
  return true;
}

void MetadataDraft::add_name(std::string_view name, std::span<const PathPart> path) {
  names_.add(name);
  path_parts_.insert(path_parts_.end(), path.begin(), path.end());
  path_begins_.push_back(path_parts_.size());
}

}  // namespace torch_ckpt::index
