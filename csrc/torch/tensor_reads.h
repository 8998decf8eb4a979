#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "index/name_table.h"
#include "torch/tensor_target.h"

namespace torch_ckpt::tensors {

/// Tensors to read from the files of one checkpoint. A TensorTarget's file is a number in files().
class TensorReads {
 public:
  /// Returns the number of a file. Adds the file if it is new.
  std::uint32_t file_number(std::string_view name) { return files_.add(name).first; }
  const index::NameTable& files() const { return files_; }

  /// Reserves memory for `count` more reads. Memory that is not used costs nothing.
  void reserve(std::size_t count) { targets_.reserve(targets_.size() + count); }
  void add(TensorTarget target) { targets_.push_back(std::move(target)); }
  /// Removes the targets from number `size` on.
  void truncate(std::size_t size) {
    targets_.erase(targets_.begin() + static_cast<std::ptrdiff_t>(size), targets_.end());
  }
  const std::vector<TensorTarget>& targets() const { return targets_; }

  /// Returns the number of stored bytes that are read.
  std::uint64_t stored_bytes() const;
  /// Returns a checksum of which bytes of which files are read, which is equal on ranks that read
  /// the same bytes in the same order.
  std::uint32_t digest() const;
  /// Returns the numbers of the CUDA devices that have targets.
  std::vector<int> devices() const;
  /// Splits each read whose target has more than `max_bytes` along the first dimension, if
  /// `can_split` returns true for the name of its file.
  void split(std::uint64_t max_bytes, const std::function<bool(std::string_view)>& can_split);
  /// Returns the reads with these numbers.
  TensorReads subset(const std::vector<std::size_t>& numbers) const;

 private:
  index::NameTable files_;
  std::vector<TensorTarget> targets_;
};

}  // namespace torch_ckpt::tensors
