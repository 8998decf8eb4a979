#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "index/checkpoint_index.h"
#include "torch/flat_state.h"
#include "torch/tensor_target.h"

namespace torch_ckpt::tensors {

/// Which sizes of a tensor a stored one goes with.
enum class SizeRule : std::uint8_t {
  same,
  growing,  // none is smaller
  any,      // of as many dimensions
};

// A state dict beside a checkpoint: what of it can be loaded, and from where.
//
//   1. Every row is compared with the entry of its name, by kind and size. The rows that FlatState
//      does not take apart are pending; the caller compares these.
//   2. plan() finds the records of tensors: all shards that meet what this rank has of a tensor.
//      It leaves to the caller what is not a tensor, what a transform has been at work on, and
//      what the checkpoint does not have all of.
class LoadMatch {
 public:
  enum class Status : std::uint8_t { pending, loaded, missing, shape, kind, skipped };

  /// `chosen`, if not empty, says of each row whether to look at it. Both outlive this.
  LoadMatch(const FlatState& state, const index::CheckpointIndex& index, SizeRule rule,
            const std::vector<bool>& chosen);

  Status status(std::size_t row) const { return statuses_[row]; }
  void set_status(std::size_t row, Status status) { statuses_[row] = status; }
  /// The entry of a row that is a tensor here and there; else nullptr.
  const index::CheckpointIndex::Entry* tensor(std::size_t row) const;
  /// A tensor's stored dtype; nullopt where this torch does not have it.
  std::optional<at::ScalarType> dtype(const index::CheckpointIndex::Entry& entry) const {
    return dtypes_[entry.dtype];
  }

  /// Numbers of rows.
  std::vector<std::size_t> with(Status status) const;
  /// Names in the checkpoint that the state dict does not have.
  std::vector<std::uint32_t> unexpected() const;
  /// Keys at the top with values in them of which none is loaded.
  std::vector<std::uint32_t> absent() const;

  /// Keys at the top with loaded values, and those that are such a value.
  std::vector<std::uint32_t> keys() const;

  /// Finds what is to be read, and gives the loaded rows that are left to the caller.
  std::vector<std::size_t> plan();
  const std::vector<TensorTarget>& targets() const { return targets_; }
  /// Of the index those that are read; the targets' file numbers count them.
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
  std::vector<bool> is_wanted_;                        // of the index's entries; chosen or not
  std::vector<std::optional<at::ScalarType>> dtypes_;  // of the index; none that this torch has not
  std::vector<TensorTarget> targets_;
  std::vector<std::uint32_t> files_;
  std::vector<std::uint32_t> file_numbers_;  // of the index's files among these
};

}  // namespace torch_ckpt::tensors
