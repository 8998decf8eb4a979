#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/data_files.h"
#include "engine/delivery.h"
#include "engine/direct_io.h"
#include "engine/payload_check.h"
#include "engine/record_reader.h"
#include "engine/results_channel.h"
#include "error.h"
#include "format/checksum_table.h"
#include "format/tensor_pickle.h"
#include "os/directory.h"
#include "planning/read_plan.h"
#include "planning/region.h"

namespace torch_ckpt::engine {

struct LoadOptions {
  std::size_t threads = 8;
  std::size_t chunk_bytes = std::size_t{4} << 20;  // scratch of each thread; two for devices
  std::size_t max_scratch_bytes = std::size_t{1} << 30;
  DirectIo direct_io = DirectIo::automatic;
  bool verify = true;
  std::vector<staging::ReadyEvent> ready;  // when targets on devices may be written
};

/// A data file beneath the checkpoint's directory, and what the metadata knows of its checksums.
struct LoadFile {
  std::string name;
  std::string checksum_table;  // encoded; empty where there is none
};

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

struct LoadFailure {
  static constexpr std::size_t kNoRequest = ~std::size_t{0};

  Error error;
  std::size_t request = kNoRequest;  // the culprit, where it is one request
};

// Reads regions of records' payloads into their targets.
//
//   1. Requests for one record are served together: each of its bytes is read once. The regions
//      become byte ranges, those of them that lie close together one range. Where the checksums of
//      blocks are known, ranges are widened to whole blocks.
//   2. planning::plan_reads cuts the ranges into units, ordered by file and offset.
//   3. A few tasks on the executor take unit after unit. Small neighbours are read at once into
//      scratch memory and decoded there; of a large record the archive's ends are read and decoded
//      once, then its ranges, a step at a time: straight into the target where that is host memory
//      that runs in step with the payload, else into scratch memory and from there, element by
//      element or by way of a conversion, to all targets that want a part of it (delivery.h).
//   4. Blocks with a known checksum are compared with it. Without, a payload that was read whole is
//      compared with the archive's CRC-32, and raw records that are archives are checked entry by
//      entry.
//   5. Each task sends one result through the results channel; the first error ends all of them.
//
// start() and wait_for() are for one thread. Targets must stay valid until wait_for() has returned
// true; after a failure their contents are unspecified.
class LoadSession : public std::enable_shared_from_this<LoadSession> {
 public:
  static Result<std::shared_ptr<LoadSession>> start(os::Directory directory,
                                                    std::vector<LoadFile> files,
                                                    std::vector<ReadRequest> requests,
                                                    const LoadOptions& options);

  /// Waits until every task has sent its result; false when `timeout` passed before. In a forked
  /// child, which has no part in its parent's load, it is over at once and has failed.
  bool wait_for(std::chrono::milliseconds timeout);
  void cancel();

  /// After wait_for() has returned true.
  std::optional<LoadFailure> failure() const;
  const std::vector<ReadOutcome>& outcomes() const { return outcomes_; }
  const std::vector<ReadRequest>& requests() const { return requests_; }
  std::string path(const ReadRequest& request) const { return files_.path(request.file); }

  /// Bytes asked for and bytes that reached their target so far, as stored.
  std::uint64_t bytes_planned() const { return bytes_planned_; }
  std::uint64_t bytes_done() const { return bytes_done_; }

 private:
  // What a record's archive says of the payload.
  struct Payload {
    ReadStatus status = ReadStatus::done;
    std::uint64_t offset = 0;  // in the record
    std::uint64_t bytes = 0;
    std::uint32_t crc = 0;
  };
  // A record that is read in pieces. The archive is opened by the first piece.
  struct LargeRecord {
    std::once_flag once;
    std::optional<Error> error;
    Payload payload;
    std::uint64_t bytes_from_begin = 0;  // that are read in one, where nothing else is
    std::vector<std::pair<std::uint32_t, std::uint64_t>> pieces;  // CRC-32 and bytes of each
    std::atomic<std::size_t> pieces_left{0};
  };
  // Requests that are served by one reading.
  struct Record {
    std::vector<std::size_t> requests;
    std::optional<format::RecordSums> sums;
    std::unique_ptr<LargeRecord> large;
  };

  LoadSession(os::Directory directory, std::vector<LoadFile> files,
              std::vector<ReadRequest> requests, const LoadOptions& options);
  Result<> plan();
  void group_requests();
  planning::WantedRecord wanted_of(const Record& record) const;
  void run_task(std::shared_ptr<const void> threads);
  void fail_task(Error error) noexcept;
  void run_units(Scratch& scratch);
  Result<> run_unit(const planning::ReadUnit& unit, Scratch& scratch, std::size_t& culprit);
  Result<> run_batch(const planning::ReadUnit& unit, const DataFile& file, Scratch& scratch,
                     std::size_t& culprit);
  Result<> run_piece(const planning::ReadUnit& unit, const DataFile& file, Scratch& scratch);
  Result<> take_from_memory(const Record& record, std::span<const std::byte> bytes,
                            Scratch& scratch);
  Result<Payload> open_payload(const Record& record, format::RecordBytes& bytes);
  Result<> read_range(const Record& record, planning::ByteRange range, const DataFile& file,
                      Scratch& scratch, PayloadCheck& check);
  Result<> deliver(const Record& record, std::uint64_t position, std::span<const std::byte> bytes,
                   Scratch& scratch);
  void set_status(const Record& record, ReadStatus status);
  const ReadRequest& first(const Record& record) const { return requests_[record.requests[0]]; }
  void fail(Error error, std::size_t request) noexcept;

  const std::vector<LoadFile> files_given_;
  DataFiles files_;
  const std::vector<ReadRequest> requests_;
  const LoadOptions options_;
  ScratchLayout scratch_layout_;
  std::vector<Record> records_;
  std::vector<planning::ReadUnit> units_;
  std::vector<ReadOutcome> outcomes_;  // each written by the unit that completes the request

  std::optional<ResultsChannel<>> results_;  // of the tasks
  std::uint64_t bytes_planned_ = 0;
  std::atomic<std::uint64_t> bytes_done_{0};
  std::atomic<std::size_t> next_unit_{0};
  std::atomic<bool> cancelled_{false};

  mutable std::mutex mutex_;
  std::optional<LoadFailure> failure_;  // guarded by mutex_
};

}  // namespace torch_ckpt::engine
