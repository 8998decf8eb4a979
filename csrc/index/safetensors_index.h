#pragma once

#include <span>
#include <string_view>
#include <utility>

#include "error.h"
#include "format/safetensors.h"
#include "index/checkpoint_index.h"

namespace torch_ckpt::index {

/// Builds the index of safetensors files. Each tensor has one shard.
class SafetensorsIndexBuilder {
 public:
  SafetensorsIndexBuilder() { index_.is_bare_ = true; }

  /// Adds a file with its tensors. `table` is the file's encoded checksum table; empty: none. Fails
  /// with Errc::metadata_inconsistent if a tensor cannot be in an index, or if another file has a
  /// tensor of the same name.
  Result<> add_file(std::string_view name, std::span<const format::SafeTensor> tensors,
                    std::string_view table);

  CheckpointIndex finish() && { return std::move(index_); }

 private:
  Result<> add_tensor(const format::SafeTensor& tensor, std::uint32_t file);

  CheckpointIndex index_;
};

}  // namespace torch_ckpt::index
