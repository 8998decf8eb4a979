#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "index/checkpoint_index.h"
#include "interrupt_check.h"
#include "planning/tiling.h"
#include "torch/flat_state.h"
#include "torch/tensor_reads.h"

namespace torch_ckpt::tensors {

/// Permitted differences between the size of a tensor in the state dict and its stored size.
enum class SizeRule : std::uint8_t {
  same,     // none
  growing,  // dimensions may be larger in the state dict
  any,      // dimensions may have any size, but their number must be equal
};

/// How a state dict compares with a checkpoint. The names belong to the state dict and to the
/// index, and stay valid as long as both exist.
struct MatchReport {
  struct Sizes {
    std::string_view name;
    std::vector<std::int64_t> stored;
    std::vector<std::int64_t> wanted;
  };
  struct Dtypes {
    std::string_view name;
    ScalarType stored;
    ScalarType wanted;
  };

  std::vector<std::string_view> loaded;
  std::vector<std::string_view> missing;     // not in the checkpoint
  std::vector<std::string_view> unexpected;  // only in the checkpoint
  std::vector<std::size_t> kinds;            // rows: a tensor on one side, an object on the other
  std::vector<Sizes> shapes;                 // sizes that the rule does not permit
  std::vector<Sizes> grown;                  // loaded, and larger than stored in some dimension
  std::vector<Sizes> truncated;              // loaded, and smaller than stored in some dimension
  std::vector<Dtypes> dtypes;
  std::vector<std::string_view> loaded_keys;  // top-level keys with a value that is loaded
  std::vector<std::string_view> absent_keys;  // top-level keys with values, none of them loaded
};

/// Plans the reads of a box of a stored tensor into `target`, and adds them to `reads`. Elements of
/// the box outside of the tensor are not read. Throws Failure with Errc::metadata_inconsistent if
/// the checkpoint lacks a record or does not have the box completely.
void plan_box(const index::CheckpointIndex& index, std::string_view name,
              const index::CheckpointIndex::Entry& entry, const planning::Box& box,
              const Tensor& target, TensorReads& reads, const InterruptCheck& check_interrupt);

// The targets of a load: a flattened state dict, and what a checkpoint has for it.
//
//   1. match() compares each value with the entry of the same name, by kind, size and dtype.
//   2. The caller describes the tensors of other kinds that are loaded (describe(), set_part()).
//   3. plan() finds the records of the values that can be loaded: of an object, its record; of a
//      tensor, the records of all shards that intersect this rank's parts.
//   4. zero_unstored() fills the parts of tensors that are not stored.
class LoadState : public FlatState {
 public:
  using FlatState::FlatState;

  /// chosen: returns true for the names to load; null loads all. `index` must outlive this object.
  MatchReport match(const index::CheckpointIndex& index, SizeRule rule,
                    const std::function<bool(std::string_view)>& chosen);

  /// Returns the rows that are loaded as tensors and must be described.
  std::vector<std::size_t> undescribed() const;
  /// Adds the reads of tensors to `reads`, and returns the rows of the objects. May be called
  /// again, after values were replaced. Throws Failure with Errc::metadata_inconsistent if the
  /// checkpoint lacks a record or does not have a tensor completely.
  std::vector<std::size_t> plan(TensorReads& reads, const InterruptCheck& check_interrupt) const;
  /// Returns the record of an object, and its file.
  const index::CheckpointIndex::Shard& record(std::size_t row) const;
  std::string_view file_of(const index::CheckpointIndex::Shard& shard) const;

  /// Returns the rows that are loaded and are tensors on the meta device.
  std::vector<std::size_t> loaded_on_meta() const;
  std::vector<std::size_t> loaded() const;
  /// Sets the elements to zero that lie outside the stored tensors.
  void zero_unstored() const;

 private:
  using Entry = index::CheckpointIndex::Entry;
  using Shard = index::CheckpointIndex::Shard;
  static constexpr std::uint32_t kNone = index::CheckpointIndex::kNone;

  /// A value that torch's planner would load as a tensor.
  struct TensorLike {
    std::vector<std::int64_t> size;
    std::optional<ScalarType> dtype;
  };

  std::optional<TensorLike> tensor_like(const Row& row) const;
  bool compare(std::size_t number, const Entry& entry, SizeRule rule, MatchReport& report) const;
  /// A part of a tensor on this rank, and the tensor to fill.
  struct Part {
    planning::Box box;
    Tensor target;
  };

  /// Returns this rank's parts of a tensor.
  std::vector<Part> parts_of(const Row& row) const;

  const index::CheckpointIndex* index_ = nullptr;
  std::vector<std::uint32_t> entries_;             // by row: the entry that is loaded, or kNone
  std::vector<std::optional<ScalarType>> dtypes_;  // by the index's dtype numbers
};

}  // namespace torch_ckpt::tensors
