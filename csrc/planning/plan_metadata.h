#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "format/result_frame.h"
#include "index/encoded_metadata.h"
#include "index/metadata_draft.h"
#include "index/metadata_encoder.h"
#include "planning/global_plan.h"

namespace torch_ckpt::planning {

/// The files that a rank has written. Items are numbered by position in GlobalPlan::owned().
using WrittenFiles = std::span<const format::FileResult>;

// Encodes the metadata of saves with the same plan. The part that depends only on the plan is
// encoded once. Locations are set again only for ranks whose locations have changed. If no rank's
// have changed, no location is encoded again. File names and checksums differ in each save.
class PlanMetadata {
 public:
  /// `plan` must outlive the PlanMetadata.
  explicit PlanMetadata(const GlobalPlan& plan) : plan_(plan) {}

  /// Encodes the part that depends only on the plan.
  void describe();
  /// Returns the contents of the metadata file. Fails with Errc::metadata_inconsistent if a rank
  /// has not reported exactly one location for each item that it owns. written: files by rank.
  Result<index::EncodedMetadata> encode(std::span<const WrittenFiles> written,
                                        const index::MetadataExtras& extras);

 private:
  /// The locations of a rank's items, and the number of the rank's first file.
  struct RankLocations {
    bool equal(std::uint32_t first, WrittenFiles written) const;

    std::uint32_t first_file = index::EntryTable::kNone;
    std::vector<format::ItemLocations> files = {};
  };
  struct Described {
    Described(const GlobalPlan& plan, std::span<const WrittenFiles> written);
    void set_files(std::span<const WrittenFiles> written);

    index::MetadataDraft draft;
    std::vector<index::MetadataDraft::ShardId> shards;  // by part
    index::MetadataEncoder encoder;
    std::vector<RankLocations> locations;  // by rank, as set in `draft`
  };
  /// Returns the name of an item that the rank owns.
  std::string name_of(std::size_t rank, std::size_t number) const;
  /// Sets the locations that differ from the last save.
  Result<> place(Described& described, std::span<const WrittenFiles> written) const;
  Result<> place(Described& described, std::size_t rank, std::uint32_t first,
                 WrittenFiles written) const;

  const GlobalPlan& plan_;
  std::unique_ptr<Described> described_;
};

}  // namespace torch_ckpt::planning
