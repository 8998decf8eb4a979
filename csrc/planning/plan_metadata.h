#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "format/result_frame.h"
#include "index/checkpoint_index.h"
#include "index/metadata_encoder.h"
#include "planning/global_plan.h"

namespace torch_ckpt::planning {

/// What a rank has written: the rows that it owns, by their number among these, and behind them
/// what torch's planner plans.
using WrittenFiles = std::span<const format::FileResult>;

// The metadata of the saves of one plan. What the plan alone decides is encoded once, and where the
// shards lie again only if that has changed; the names of files and the checksums are another
// save's each time.
class PlanMetadata {
 public:
  /// Of a plan that stays.
  explicit PlanMetadata(const GlobalPlan& plan) : plan_(plan) {}

  /// Encodes what the plan alone decides.
  void describe();
  /// The pickle and its seal, in pieces that hold until the next call.
  ///
  /// Errc::metadata_inconsistent if a rank has not reported exactly one place of each of its rows.
  ///
  /// written: by rank.
  /// rest: the index of what torch's planner plans; may be null.
  Result<std::span<const std::string_view>> encode(std::span<const WrittenFiles> written,
                                                   const index::CheckpointIndex* rest,
                                                   const index::MetadataExtras& extras);

 private:
  struct Described {
    Described(const GlobalPlan& plan, std::span<const WrittenFiles> written,
              const index::CheckpointIndex* rest);
    void set_files(std::span<const WrittenFiles> written);

    index::CheckpointIndex index;
    std::vector<index::CheckpointIndex::Placed> shards;  // by part
    index::MetadataEncoder encoder;
  };
  /// Returns the name of an item that the rank owns.
  std::string name_of(std::size_t rank, std::size_t number) const;
  Result<> place(Described& described, std::span<const WrittenFiles> written) const;

  const GlobalPlan& plan_;
  std::unique_ptr<Described> described_;
  bool has_rest_ = false;
};

}  // namespace torch_ckpt::planning
