#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/read_pipeline.h"
#include "engine/region_read.h"
#include "error.h"
#include "format/checksum_table.h"
#include "format/record_index.h"
#include "format/tensor_pickle.h"

namespace torch_ckpt::engine {

enum class ReadStatus {
  pending,
  done,
  // A plain tensor with the expected dtype and sizes but different strides. The stored strides are
  // in ReadOutcome::header. Read it again with `layout`, or with ReadKind::storage.
  other_layout,
  // A record that the decoder does not recognize, or one with a different dtype; torch.load may be
  // able to read it.
  unknown_record,
};

struct ReadOutcome {
  ReadStatus status = ReadStatus::pending;
  std::optional<format::TensorHeader> header;  // set for other_layout
};

// The sink of a load's pipeline: delivers regions of payloads to their targets.
//
//   1. The regions of one record are read together.
//   2. Bytes are read into scratch memory. A region that is contiguous in the payload and in a
//      target on the host is copied to the target and checksummed in one pass, if it is the only
//      region of its record. Other regions are checksummed, then copied or converted
//      (engine/delivery.h).
//   3. Blocks with known checksums are verified. If there are no such blocks, a payload that was
//      read entirely is verified against the archive's CRC-32. A raw record that is an archive is
//      checked entry by entry.
class RecordDelivery final : public ReadSink {
 public:
  RecordDelivery(std::vector<RegionRead> reads, bool verify);

  /// Sets the checksum tables, by file. Without this call, no blocks are verified.
  void set_checksums(const std::vector<std::optional<format::ChecksumTable>>& tables);
  /// Returns the byte ranges to read, by record.
  std::vector<planning::WantedRecord> wanted() const;
  /// Returns the size of the largest block that is verified.
  std::uint64_t block_bytes() const;
  /// Returns the numbers of all reads of this record.
  const std::vector<std::size_t>& reads_of(std::size_t record) const {
    return records_[record].reads;
  }
  void set_pipeline(ReadPipeline& pipeline) { pipeline_ = &pipeline; }

  const std::vector<RegionRead>& reads() const { return reads_; }
  const std::vector<ReadOutcome>& outcomes() const { return outcomes_; }
  std::uint64_t bytes_done() const { return bytes_done_; }

  Result<Payload> open(std::size_t record, format::RecordBytes& archive) override;
  Result<> consume(std::size_t record, const Payload& payload, std::uint64_t position,
                   std::span<const std::byte> bytes, PayloadCheck& check,
                   Scratch& scratch) override;
  Result<> finish(std::size_t record, const Payload& payload, std::optional<std::uint32_t> crc,
                  std::span<const std::byte> payload_bytes) override;
  void fail(std::size_t record, Error error) override;

 private:
  // The reads of one record.
  struct Record {
    std::vector<std::size_t> reads;
    std::optional<format::RecordSums> sums;
  };

  const RegionRead& first(const Record& record) const { return reads_[record.reads[0]]; }
  const format::RecordSums* blocks(const Record& record) const {
    return block_sums(record.sums, first(record).is_all_payload());
  }
  Result<ReadStatus> check_headers(const Record& record, const format::RecordIndex& archive);
  Result<> consume_in_place(const RegionRead& read, std::uint64_t position,
                            std::span<const std::byte> bytes, PayloadCheck& check);
  Result<> check_raw(const Record& record, std::span<const std::byte> payload) const;
  void set_status(const Record& record, ReadStatus status);

  const std::vector<RegionRead> reads_;
  const bool verify_;
  std::vector<Record> records_;
  std::vector<ReadOutcome> outcomes_;  // by read; written by the thread that finishes the record
  std::atomic<std::uint64_t> bytes_done_{0};
  ReadPipeline* pipeline_ = nullptr;
};

}  // namespace torch_ckpt::engine
