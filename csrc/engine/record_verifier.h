#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "engine/read_pipeline.h"
#include "error.h"
#include "format/checksum_table.h"
#include "format/dtype.h"
#include "format/record_index.h"
#include "os/mutex.h"

namespace torch_ckpt::engine {

/// A record that the metadata places, and what it says of it.
struct NamedRecord {
  std::size_t file = 0;
  std::uint64_t offset = 0;  // in the file
  std::uint64_t length = 0;
  bool tensor = false;
  const format::Dtype* dtype = nullptr;  // of a tensor, where the decoder knows it
  std::vector<std::uint64_t> sizes;      // of a tensor
};

/// Something that is not as it should be.
struct Finding {
  static constexpr std::size_t kWholeFile = ~std::size_t{0};

  std::size_t file = 0;
  std::size_t record = kWholeFile;
  std::uint64_t bytes = 0;  // damaged ones from error.offset on; 0: somewhere behind it
  Error error;              // its offset counts from the file's begin
};

// Compares records with every checksum that there is, and with what the metadata says of them; a
// pipeline's sink, which keeps what it finds and lets the pipeline go on.
//
//   1. With a checksum table: the payload block by block, and all that is not payload.
//   2. Without: each entry of the archive with its CRC-32.
//   3. A tensor's archive must be one, of the shape that the metadata gives. Another dtype is a
//      finding only without a table: a planner may have stored one, and what the table knows is
//      what was stored.
//   4. What has no checksum at all is counted.
class RecordVerifier final : public ReadSink {
 public:
  /// Reads the checksum tables of the files. What cannot be read at all is found here.
  RecordVerifier(const std::vector<LoadFile>& files, std::vector<NamedRecord> records);

  /// All of the records, whose numbers are the pipeline's.
  std::vector<planning::WantedRecord> wanted() const;
  std::uint64_t block_bytes() const;

  /// Ascending by file and offset; neighbouring blocks of a record are one.
  std::vector<Finding> findings() const;
  /// Numbers of the records, ascending, of which some bytes have no checksum.
  std::vector<std::size_t> unverifiable() const;

  Result<Payload> open(std::size_t record, format::RecordBytes& archive) override;
  Result<> take(std::size_t record, const Payload& payload, std::uint64_t position,
                std::span<const std::byte> bytes, PayloadCheck& check, Scratch* scratch) override;
  std::uint64_t leave_out(std::size_t record, const Payload& payload, planning::ByteRange range,
                          const Error& error) override;
  Result<> end(std::size_t record, const Payload& payload, std::optional<std::uint32_t> crc,
               std::span<const std::byte> payload_bytes) override;
  void fail(std::size_t record, Error error) override { add_finding(record, std::move(error)); }

 private:
  struct Record {
    std::size_t number = 0;  // as given
    NamedRecord named;
    std::optional<format::RecordSums> sums;
  };

  void check_entries(std::size_t record, format::RecordBytes& archive, std::string_view skip);
  void check_header(std::size_t record, const format::TensorHeader& header);
  void add_finding(std::size_t record, Error error, std::uint64_t bytes = 0);
  void add_unverifiable(std::size_t record);

  std::vector<Record> records_;
  mutable os::Mutex mutex_;
  std::vector<Finding> findings_ TC_GUARDED_BY(mutex_);
  std::vector<std::size_t> unverifiable_ TC_GUARDED_BY(mutex_);
};

}  // namespace torch_ckpt::engine
