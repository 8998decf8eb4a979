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
  // The bytes of the record itself.
  raw,
  // The payload of a tensor of `dtype` and `sizes`, stored row-major or as `layout` says.
  tensor,
  // The same tensor's whole payload as it is, however it is strided.
  storage,
};

/// One region of one record, and where it goes.
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
  bool whole = false;  // all of the payload is read, to be verified
};

enum class ReadStatus {
  pending,
  done,
  // A plain tensor of the right dtype and sizes, but not stored row-major: `header` says how. Ask
  // again with `layout`, or with ReadKind::storage.
  other_layout,
  // Not a record that the decoder knows, or of another dtype; torch.load may read it.
  unknown_record,
};

struct ReadOutcome {
  ReadStatus status = ReadStatus::pending;
  std::optional<format::TensorHeader> header;  // with other_layout
};

// Brings regions of records' payloads to their targets; a pipeline's sink.
//
//   1. Requests for one record are served together: each of its bytes is read once.
//   2. A region that runs in step with the payload, in host memory, is read straight into its
//      target where nobody else wants the record. Others go by way of scratch memory, element by
//      element or by way of a conversion (delivery.h).
//   3. Blocks with a known checksum are compared with it. Without, a payload that was read whole is
//      compared with the archive's CRC-32, and raw records that are archives are checked entry by
//      entry.
class RecordDelivery final : public ReadSink {
 public:
  RecordDelivery(std::vector<ReadRequest> requests, bool verify);

  /// With the checksums that the metadata has of the files, by file.
  void set_checksums(const std::vector<std::optional<format::ChecksumTable>>& tables);
  /// What is to be read, by record.
  std::vector<planning::WantedRecord> wanted() const;
  /// The largest block that is compared with a checksum.
  std::uint64_t block_bytes() const;
  /// The one to tell of where a record is the culprit.
  std::size_t request_of(std::size_t record) const { return records_[record].requests.front(); }
  void set_pipeline(ReadPipeline& pipeline) { pipeline_ = &pipeline; }

  const std::vector<ReadRequest>& requests() const { return requests_; }
  const std::vector<ReadOutcome>& outcomes() const { return outcomes_; }
  std::uint64_t bytes_done() const { return bytes_done_; }

  Result<Payload> open(std::size_t record, format::RecordBytes& archive) override;
  std::span<std::byte> place(std::size_t record, std::uint64_t position,
                             std::uint64_t& bytes) override;
  Result<> take(std::size_t record, const Payload& payload, std::uint64_t position,
                std::span<const std::byte> bytes, PayloadCheck& check, Scratch* scratch) override;
  Result<> end(std::size_t record, const Payload& payload, std::optional<std::uint32_t> crc,
               std::span<const std::byte> payload_bytes) override;
  void fail(std::size_t record, Error error) override;

 private:
  // Requests that are served by one reading.
  struct Record {
    std::vector<std::size_t> requests;
    std::optional<format::RecordSums> sums;
  };

  const ReadRequest& first(const Record& record) const { return requests_[record.requests[0]]; }
  const format::RecordSums* blocks(const Record& record) const {
    return blocks_of(record.sums, first(record).kind == ReadKind::raw);
  }
  Result<ReadStatus> check_headers(const Record& record, const format::RecordIndex& archive);
  Result<> check_raw(const Record& record, std::span<const std::byte> payload) const;
  void set_status(const Record& record, ReadStatus status);

  const std::vector<ReadRequest> requests_;
  const bool verify_;
  std::vector<Record> records_;
  std::vector<ReadOutcome> outcomes_;  // each written by the unit that completes the request
  std::atomic<std::uint64_t> bytes_done_{0};
  ReadPipeline* pipeline_ = nullptr;
};

}  // namespace torch_ckpt::engine
