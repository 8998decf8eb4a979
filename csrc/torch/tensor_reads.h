#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "index/name_table.h"
#include "torch/tensor_read.h"

namespace torch_ckpt::tensors {

/// Tensors to read from the files of one checkpoint. A record's file is a number in files().
class TensorReads {
 public:
  /// Returns the number of a file. Adds the file if it is new.
  std::uint32_t file_number(std::string_view name) { return files_.add(name).first; }
  const index::NameTable& files() const { return files_; }

  /// Reserves memory for `count` more reads. Memory that is not used costs nothing.
  void reserve(std::size_t count) { reads_.reserve(reads_.size() + count); }
  void add(TensorRead read) { reads_.push_back(std::move(read)); }
  const std::vector<TensorRead>& reads() const { return reads_; }

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
  std::vector<TensorRead> reads_;
};

}  // namespace torch_ckpt::tensors
