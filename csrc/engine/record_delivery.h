#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/delivery.h"
#include "engine/read_pipeline.h"
#include "error.h"
#include "format/checksum_table.h"
#include "format/record_index.h"
#include "format/tensor_pickle.h"
#include "planning/region.h"

namespace torch_ckpt::engine {

enum class ReadKind {
  // The record's bytes, such as an object.
  raw,
  // The record's bytes, which are the row-major elements of a tensor.
  bare,
  // The payload of a tensor with `dtype` and `sizes`, stored row-major or with the strides of
  // `layout`.
  tensor,
  // The entire storage of such a tensor, with any strides.
  storage,
};

/// One region of one record, and its target.
struct ReadRequest {
  ReadKind kind = ReadKind::raw;
  std::size_t file = 0;
  std::uint64_t offset = 0;  // of the record in the file
  std::uint64_t length = 0;  // of the record
  const format::Dtype* dtype = nullptr;
  std::vector<std::uint64_t> sizes;
  std::shared_ptr<const format::TensorHeader> layout;
  planning::Region region;
  Target target;
  bool reads_entire_payload = false;  // also read bytes outside the region, to verify them
};

/// True if the entire record is payload, and is not parsed as an archive.
inline bool is_all_payload(ReadKind kind) {
  return kind == ReadKind::raw || kind == ReadKind::bare;
}

/// Returns the size that the payload of the request's record should have.
std::uint64_t payload_bytes_of(const ReadRequest& request);

enum class ReadStatus {
  pending,
  done,
  // A plain tensor with the requested dtype and sizes but different strides. The stored strides are
  // in ReadOutcome::header. Request it again with `layout`, or with ReadKind::storage.
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
//   1. Requests for the same record share a single read.
//   2. Bytes are read into scratch memory. A region that is contiguous in the payload and in a
//      target on the host is copied to the target and checksummed in one pass, if it is the only
//      request for its record. Other regions are checksummed, then copied or converted
//      (engine/delivery.h).
//   3. Blocks with known checksums are verified. If there are no such blocks, a payload that was
//      read entirely is verified against the archive's CRC-32. A raw record that is an archive is
//      checked entry by entry.
class RecordDelivery final : public ReadSink {
 public:
  RecordDelivery(std::vector<ReadRequest> requests, bool verify);

  /// Sets the checksum tables, by file. Without this call, no blocks are verified.
  void set_checksums(const std::vector<std::optional<format::ChecksumTable>>& tables);
  /// Returns the byte ranges to read, by record.
  std::vector<planning::WantedRecord> wanted() const;
  /// Returns the size of the largest block that is verified.
  std::uint64_t block_bytes() const;
  /// Returns all requests for this record.
  const std::vector<std::size_t>& requests_of(std::size_t record) const {
    return records_[record].requests;
  }
  void set_pipeline(ReadPipeline& pipeline) { pipeline_ = &pipeline; }

  const std::vector<ReadRequest>& requests() const { return requests_; }
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
  // The requests for one record.
  struct Record {
    std::vector<std::size_t> requests;
    std::optional<format::RecordSums> sums;
  };

  const ReadRequest& first(const Record& record) const { return requests_[record.requests[0]]; }
  const format::RecordSums* blocks(const Record& record) const {
    return block_sums(record.sums, is_all_payload(first(record).kind));
  }
  Result<ReadStatus> check_headers(const Record& record, const format::RecordIndex& archive);
  Result<> consume_in_place(const ReadRequest& request, std::uint64_t position,
                            std::span<const std::byte> bytes, PayloadCheck& check);
  Result<> check_raw(const Record& record, std::span<const std::byte> payload) const;
  void set_status(const Record& record, ReadStatus status);

  const std::vector<ReadRequest> requests_;
  const bool verify_;
  std::vector<Record> records_;
  std::vector<ReadOutcome> outcomes_;  // by request; written by the thread that finishes the record
  std::atomic<std::uint64_t> bytes_done_{0};
  ReadPipeline* pipeline_ = nullptr;
};

}  // namespace torch_ckpt::engine
