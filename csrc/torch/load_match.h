#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "index/checkpoint_index.h"
#include "torch/flat_state.h"
#include "torch/tensor_target.h"

namespace torch_ckpt::tensors {

/// Permitted differences between the size of a tensor in the state dict and its stored size.
enum class SizeRule : std::uint8_t {
  same,     // none
  growing,  // dimensions may be larger in the state dict
  any,      // dimensions may have any size, but their number must be equal
};

// Matches a state dict with a checkpoint, to find out which rows can be loaded from which records.
//
//   1. Each row is compared with the entry of the same name, by kind and size. Rows
//      that are neither plain tensors nor DTensors are pending: the caller compares them.
//   2. plan() finds the records of each tensor: all shards that intersect this rank's part. It
//      leaves three kinds of rows to the caller: values that are not tensors, tensors with records
//      that a transform has changed, and tensors that the checkpoint contains only partly.
class LoadMatch {
 public:
  enum class Status : std::uint8_t { pending, loaded, missing, shape, kind, skipped };

  /// chosen: for each row, true to match it; if empty, all rows are matched. `state` and `index`
  /// must outlive the match.
  LoadMatch(const FlatState& state, const index::CheckpointIndex& index, SizeRule rule,
            const std::vector<bool>& chosen);

  Status status(std::size_t row) const { return statuses_[row]; }
  void set_status(std::size_t row, Status status) { statuses_[row] = status; }
  /// Returns the entry of a row that is a tensor in both the state dict and the checkpoint, or
  /// nullptr for any other row.
  const index::CheckpointIndex::Entry* tensor(std::size_t row) const;
  /// Returns a tensor's stored dtype, or nullopt if this version of torch lacks it.
  std::optional<at::ScalarType> dtype(const index::CheckpointIndex::Entry& entry) const {
    return dtypes_[entry.dtype];
  }

  /// Returns the rows with this status.
  std::vector<std::size_t> rows_with(Status status) const;
  /// Returns the entries that are in the checkpoint but not in the state dict.
  std::vector<std::uint32_t> unexpected() const;
  /// Returns the top-level keys of the state dict that contain values, but none that is loaded.
  std::vector<std::uint32_t> absent() const;

  /// Returns the top-level keys that are loaded values or contain some.
  std::vector<std::uint32_t> keys() const;

  /// Finds the records to read. Returns the loaded rows that it leaves to the caller.
  std::vector<std::size_t> plan();
  const std::vector<TensorTarget>& targets() const { return targets_; }
  /// The files to read, as numbers in the index. TensorTarget::file is a position in this list.
  const std::vector<std::uint32_t>& files() const { return files_; }

  const FlatState& state() const { return state_; }
  const index::CheckpointIndex& index() const { return index_; }

 private:
  using Entry = index::CheckpointIndex::Entry;
  using Shard = index::CheckpointIndex::Shard;
  static constexpr std::uint32_t kNone = index::CheckpointIndex::kNone;

  Status compare(const FlatState::Row& row, const Entry& entry) const;
  bool plan_row(std::size_t number);
  std::uint32_t file_number(std::uint32_t file);

  const FlatState& state_;
  const index::CheckpointIndex& index_;
  SizeRule rule_;
  std::vector<Status> statuses_;
  std::vector<std::uint32_t> entries_;
  std::vector<bool> is_wanted_;  // by entry: true if the state dict has it, chosen or not
  std::vector<std::optional<at::ScalarType>> dtypes_;  // by the index's dtype numbers
  std::vector<TensorTarget> targets_;
  std::vector<std::uint32_t> files_;
  std::vector<std::uint32_t> file_numbers_;  // by the index's file numbers: positions in files_
};

}  // namespace torch_ckpt::tensors
