#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "index/checkpoint_index.h"
#include "torch/flat_state.h"
#include "torch/tensor_target.h"

namespace torch_ckpt::tensors {

/// How the size of a tensor in the state dict may differ from the stored size.
enum class SizeRule : std::uint8_t {
  same,     // not at all
  growing,  // no dimension is smaller
  any,      // in any dimension, but not in their number
};

// Matches a state dict with a checkpoint: which rows can be loaded, and from which records.
//
//   1. Each row is compared with the entry of the same name, by kind and size. Rows that are neither
//      plain tensors nor DTensors are pending; the caller compares them.
//   2. plan() finds the records of tensors: all shards that intersect the part that this rank has.
//      It leaves three kinds of rows to the caller: values that are not tensors, records that a
//      transform has changed, and tensors that the checkpoint contains only in part.
class LoadMatch {
 public:
  enum class Status : std::uint8_t { pending, loaded, missing, shape, kind, skipped };

  /// `chosen`, if not empty, selects the rows to match. `state` and `index` outlive the match.
  LoadMatch(const FlatState& state, const index::CheckpointIndex& index, SizeRule rule,
            const std::vector<bool>& chosen);

  Status status(std::size_t row) const { return statuses_[row]; }
  void set_status(std::size_t row, Status status) { statuses_[row] = status; }
  /// The entry of a row that is a tensor in both the state dict and the checkpoint; otherwise
  /// nullptr.
  const index::CheckpointIndex::Entry* tensor(std::size_t row) const;
  /// A tensor's stored dtype; nullopt if this version of torch does not have it.
  std::optional<at::ScalarType> dtype(const index::CheckpointIndex::Entry& entry) const {
    return dtypes_[entry.dtype];
  }

  /// The rows with a status.
  std::vector<std::size_t> rows_with(Status status) const;
  /// Names in the checkpoint that the state dict does not have.
  std::vector<std::uint32_t> unexpected() const;
  /// Top-level keys that contain values, none of which is loaded.
  std::vector<std::uint32_t> absent() const;

  /// Top-level keys that contain or are a loaded value.
  std::vector<std::uint32_t> keys() const;

  /// Finds the records to read. Returns the loaded rows that are left to the caller.
  std::vector<std::size_t> plan();
  const std::vector<TensorTarget>& targets() const { return targets_; }
  /// The index's files that are read; TensorTarget::file is a position in this list.
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
  std::vector<bool> is_wanted_;  // by the index's entries: the state dict has it, chosen or not
  std::vector<std::optional<at::ScalarType>> dtypes_;  // by the index's dtypes
  std::vector<TensorTarget> targets_;
  std::vector<std::uint32_t> files_;
  std::vector<std::uint32_t> file_numbers_;  // by the index's files: positions in files_
};

}  // namespace torch_ckpt::tensors
