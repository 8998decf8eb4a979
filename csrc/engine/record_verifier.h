#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/read_pipeline.h"
#include "error.h"
#include "format/checksum_table.h"
#include "format/record_index.h"
#include "os/mutex.h"
#include "planning/stored_record.h"

namespace torch_ckpt::engine {

/// A problem found by verification.
struct Finding {
  static constexpr std::size_t kWholeFile = ~std::size_t{0};

  std::size_t file = 0;
  std::size_t record = kWholeFile;
  std::uint64_t bytes = 0;  // number of damaged bytes from error.offset; 0: unknown
  Error error;              // its offset is relative to the file
};

// The sink of a verification's pipeline: compares records with their checksums and with the
// metadata. Collects findings without stopping the pipeline.
//
//   1. If the file has a checksum table, the payload is verified block by block, and the bytes
//      around the payload against a checksum of their own.
//   2. Otherwise, each entry of the archive is verified against its CRC-32. A bare record has no
//      archive.
//   3. A tensor's record must be an archive of a tensor with the shape in the metadata. A different
//      dtype is a finding only if there is no table: a planner may have cast the tensor, and a
//      table proves that these bytes are the ones that were saved.
//   4. Records with bytes that have no checksum are listed as unverifiable.
class RecordVerifier final : public ReadSink {
 public:
  /// Decodes the checksum tables. A damaged table is a finding, and so is a record that ends beyond
  /// the maximum file size. Calls `on_read_error` for a record that cannot be read.
  RecordVerifier(const std::vector<LoadFile>& files, std::vector<planning::StoredRecord> records,
                 std::function<void(Error)> on_read_error);

  /// Returns all records, in full, in the order of the pipeline's record numbers.
  std::vector<planning::WantedRecord> wanted() const;
  std::uint64_t block_bytes() const;

  /// Returns the findings in ascending order of file and offset. Adjacent damaged blocks are
  /// merged.
  std::vector<Finding> findings() const;
  /// Returns the numbers of the records that contain bytes without a checksum, in ascending order.
  std::vector<std::size_t> unverifiable() const;

  Result<Payload> open(std::size_t record, format::RecordBytes& archive) override;
  Result<> consume(std::size_t record, const Payload& payload, std::uint64_t position,
                   std::span<const std::byte> bytes, PayloadCheck& check,
                   Scratch& scratch) override;
  std::uint64_t skip(std::size_t record, const Payload& payload, planning::ByteRange range,
                     const Error& error) override;
  Result<> finish(std::size_t record, const Payload& payload, std::optional<std::uint32_t> crc,
                  std::span<const std::byte> payload_bytes) override;
  void fail(std::size_t record, Error error) override { add_finding(record, std::move(error)); }

 private:
  struct Record {
    std::size_t number = 0;  // in the constructor's `records`
    planning::StoredRecord stored;
    std::optional<format::RecordSums> sums;
    bool is_bare = false;
  };

  void check_entries(std::size_t record, format::RecordBytes& archive, std::string_view skip);
  void check_header(std::size_t record, const format::TensorHeader& header);
  void add_finding(std::size_t record, Error error, std::uint64_t bytes = 0);
  void add_unverifiable(std::size_t record);

  std::vector<Record> records_;
  const std::function<void(Error)> on_read_error_;
  mutable os::Mutex mutex_;
  std::vector<Finding> findings_ TC_GUARDED_BY(mutex_);
  std::vector<std::size_t> unverifiable_ TC_GUARDED_BY(mutex_);
};

}  // namespace torch_ckpt::engine
