#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/read_pipeline.h"
#include "engine/record_delivery.h"
#include "engine/store.h"
#include "error.h"
#include "planning/region.h"
#include "planning/stored_record.h"

namespace torch_ckpt::engine {

/// A range of bytes of a data file.
struct FileRange {
  std::size_t file = 0;
  planning::ByteRange bytes;
};

// Plans which bytes of remote data files a load reads, so that they can be fetched into sparse
// local copies before the load reads these. Uses the plan of the load itself (RecordDelivery).
//
//   1. Fetch ends(): the ends of a record describe the layout of its elements.
//   2. For each of waves(): fetch its ranges, and do its reads from the copies.
//
// A record that is read in part is fetched in part only if it contains a row-major tensor. All
// other records are fetched in full.
class FetchPlan {
 public:
  /// regions: the region of each record that contains a tensor of a known dtype. Without a value,
  /// or if `regions` is empty, the entire record is read. verify: also fetch the bytes that are
  /// needed to verify the requested ones.
  FetchPlan(std::vector<LoadFile> files, std::vector<planning::StoredRecord> records,
            const std::vector<std::optional<planning::Region>>& regions, bool verify);
  ~FetchPlan();

  const std::string& file_name(std::size_t file) const { return files_[file].name; }

  /// Returns both ends of each record that may be fetched in part.
  std::vector<FileRange> ends() const;

  struct Wave {
    std::vector<std::size_t> reads;  // numbers of records
    std::vector<FileRange> ranges;   // ascending by file and offset; small gaps are included
  };
  /// Groups the reads into waves of at most `max_bytes` bytes. A larger record gets a wave of
  /// its own. `copies` contains the copies, with the fetched ends.
  std::vector<Wave> waves(const Folder& copies, std::uint64_t max_bytes) const;

 private:
  struct Record {
    planning::WantedRecord wanted;
    std::uint64_t end_bytes = 0;  // to fetch at each end; 0: fetch the entire record
  };

  std::vector<planning::ByteRange> ranges_of(std::size_t record, const Folder& copies) const;

  const std::vector<LoadFile> files_;
  const std::vector<planning::StoredRecord> stored_;
  RecordDelivery delivery_;
  std::vector<Record> records_;
};

}  // namespace torch_ckpt::engine
