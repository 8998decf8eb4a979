#include "index/safetensors_index.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace torch_ckpt::index {

Result<> SafetensorsIndexBuilder::add_file(std::string_view name,
                                           std::span<const format::SafeTensor> tensors,
                                           std::string_view table) {
  const auto file = static_cast<std::uint32_t>(index_.files_.size());
  index_.files_.push_back(index_.add_text(name));
  index_.tables_.push_back(index_.add_text(table));
  for (const format::SafeTensor& tensor : tensors) {
    TC_TRY(add_tensor(tensor, file));
  }
  return {};
}

Result<> SafetensorsIndexBuilder::add_tensor(const format::SafeTensor& tensor, std::uint32_t file) {
  const auto refuse = [&](std::string reason) {
    return format_error(Errc::metadata_inconsistent, std::move(reason));
  };
  if (tensor.name.size() > CheckpointIndex::kMaxNameBytes) {
    return refuse("a tensor has a name of " + std::to_string(tensor.name.size()) +
                  " bytes; the maximum is " + std::to_string(CheckpointIndex::kMaxNameBytes));
  }
  constexpr auto kMaxSize = std::uint64_t{std::numeric_limits<std::int64_t>::max()};
  if (std::ranges::any_of(tensor.sizes, [](std::uint64_t size) { return size > kMaxSize; })) {
    return refuse(tensor.name + ": the tensor has a size of 2**63 or more");
  }
  const auto [number, is_new] = index_.names_.add(tensor.name);
  if (!is_new) {
    const auto& shard = index_.shards(index_.entries_[number]).front();
    return refuse(tensor.name + ": both this file and " +
                  std::string(index_.text(index_.files_[shard.file])) +
                  " contain a tensor of this name");
  }
  const auto known = std::ranges::find(index_.dtypes_, tensor.dtype->name);
  CheckpointIndex::Entry entry;
  entry.is_tensor = true;
  entry.dtype = static_cast<std::uint32_t>(known - index_.dtypes_.begin());
  if (known == index_.dtypes_.end()) index_.dtypes_.emplace_back(tensor.dtype->name);
  const std::vector<std::int64_t> sizes(tensor.sizes.begin(), tensor.sizes.end());
  entry.size = index_.extents_.intern(sizes);
  entry.first_shard = static_cast<std::uint32_t>(index_.shards_.size());
  entry.shard_count = 1;
  index_.entries_.push_back(entry);
  CheckpointIndex::Shard& shard = index_.shards_.emplace_back();
  shard.offsets = index_.extents_.intern(std::vector<std::int64_t>(sizes.size()));
  shard.sizes = entry.size;
  shard.file = file;
  shard.offset = tensor.begin;
  shard.length = tensor.bytes;
  return {};
}

}  // namespace torch_ckpt::index
