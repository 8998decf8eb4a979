#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/context.h"
#include "engine/data_files.h"
#include "engine/delivery.h"
#include "engine/direct_io.h"
#include "engine/first_failure.h"
#include "engine/payload_check.h"
#include "engine/results_channel.h"
#include "error.h"
#include "format/checksum_table.h"
#include "os/file.h"
#include "planning/read_plan.h"

namespace torch_ckpt::engine {

struct ReadOptions {
  std::size_t threads = 8;
  std::size_t chunk_bytes = std::size_t{4} << 20;  // scratch chunk per thread; two for devices
  std::size_t max_scratch_bytes = std::size_t{1} << 30;
  DirectIo direct_io = DirectIo::automatic;
};

/// Scratch chunk for reads from a store, which has room for a request of 8 MiB. A request is large
/// enough that the time until its answer does not matter.
inline constexpr std::size_t kStoreChunkBytes = (std::size_t{8} << 20) + 2 * os::kDirectAlignment;

/// A data file in the checkpoint directory, with its checksums from the metadata.
struct LoadFile {
  std::string name;
  std::string checksum_table;  // encoded; empty: the metadata has no checksums
  bool is_bare = false;        // records are bare; see ReadKind::bare
};

/// Decodes the file's checksum table; returns nullopt if it has none. The table refers to memory of
/// `file`, which must outlive it.
Result<std::optional<format::ChecksumTable>> checksum_table_of(const LoadFile& file);

/// Returns the error for a record that lies beyond the end of its file, which has `bytes` bytes.
Error past_end_error(const planning::StoredRecord& record, std::uint64_t bytes);

/// The location of a payload in its record, and the checksums to compare it with.
struct Payload {
  bool is_read = false;      // false: the sink does not need the payload
  std::uint64_t offset = 0;  // in the record
  std::uint64_t bytes = 0;
  const format::RecordSums* blocks = nullptr;  // checksums of its blocks
  std::optional<std::uint32_t> crc;            // checksum of the entire payload
};

// Receives the records that a pipeline reads. A record is identified by its number in the
// pipeline's plan. Methods are called concurrently, but open() and finish() are called at most once
// per record.
class ReadSink {
 public:
  /// Parses the archive around the payload, and returns the payload's location.
  virtual Result<Payload> open(std::size_t record, format::RecordBytes& archive) = 0;

  /// Processes bytes of the payload, which lie in `scratch`. Each byte is passed once, and the
  /// bytes of a range are passed in ascending order.
  virtual Result<> consume(std::size_t record, const Payload& payload, std::uint64_t position,
                           std::span<const std::byte> bytes, PayloadCheck& check,
                           Scratch& scratch) = 0;

  /// Called for a range that cannot be read, if the pipeline continues after errors. Returns how
  /// many bytes to skip from the start of the range.
  virtual std::uint64_t skip(std::size_t /*record*/, const Payload& /*payload*/,
                             planning::ByteRange range, const Error& /*error*/) {
    return range.bytes();
  }

  /// Finishes a record after all requested bytes have been consumed. `crc` is the CRC-32 of the
  /// bytes that were read, if payload.crc is set. `payload_bytes` is the payload of a small record;
  /// for a large record it is empty.
  virtual Result<> finish(std::size_t record, const Payload& payload,
                          std::optional<std::uint32_t> crc,
                          std::span<const std::byte> payload_bytes) = 0;

  /// Called for a record that cannot be read, or for which a method above has failed.
  virtual void fail(std::size_t record, Error error) = 0;

 protected:
  ~ReadSink() = default;
};

// Reads records from data files, entirely or in part, using several tasks on the executor.
//
//   1. planning::plan_reads divides the requested bytes into units, ordered by file and offset.
//      Each task repeatedly takes the next unit.
//   2. Small neighbouring records form one unit, which is a single read into scratch memory.
//   3. A large record is divided into pieces. The first task that starts one of them reads both
//      ends of the archive and calls open(). In a store, the ends are units of their own, which
//      precede the pieces. Each piece is then read in steps into scratch memory,
//      and each step is consumed while it is in a cache.
//   4. Once the pipeline has failed, because the sink called fail() or a task itself failed, all
//      tasks stop before their next step.
//   5. Each task sends one message through the results channel when it ends.
//
// plan(), start() and wait_for() must be called from the same thread; the other methods may be
// called from any thread.
class ReadPipeline {
 public:
  /// `context`, `ready` and `sink` must outlive the pipeline. With `continue_after_errors`, read
  /// errors are only reported to the sink, and all other bytes are still read.
  ReadPipeline(Context& context, Folder folder, const std::vector<LoadFile>& files,
               const ReadOptions& options, const ScratchLayout& scratch_layout,
               const std::vector<staging::ReadyEvent>& ready, ReadSink& sink,
               bool continue_after_errors);

  /// `bytes` is the total number of requested bytes; `block_bytes` is the size of the largest block
  /// that has a checksum.
  void plan(std::vector<planning::WantedRecord> wanted, std::uint64_t bytes,
            std::uint64_t block_bytes);

  /// Starts the tasks. They keep `owner`, which contains the pipeline, alive until the last task
  /// has ended.
  Result<> start(std::shared_ptr<const void> owner, std::string_view operation);

  /// Waits until every task has sent its result; returns false if `timeout` expires first. Returns
  /// true immediately in a forked child, which has none of the tasks.
  bool wait_for(std::chrono::milliseconds timeout);
  bool inherited() const { return results_->inherited(); }

  void fail(Error error) noexcept { failure_.set(std::move(error)); }
  std::optional<Error> failure() const { return failure_.get(); }

  std::string path(std::size_t file) const { return files_.path(file); }
  /// Returns the total bytes of the units that have ended.
  std::uint64_t bytes_read() const { return bytes_read_; }

 private:
  // A record that is read in pieces.
  struct LargeRecord {
    std::once_flag opened;  // by the first piece that a task starts
    Payload payload;
    // The number of requested bytes, if they are a single range from the start of the payload;
    // otherwise 0. A checksum of the entire payload can be verified only if this covers the
    // payload.
    std::uint64_t bytes_from_begin = 0;
    std::vector<std::pair<std::uint32_t, std::uint64_t>> pieces;  // CRC-32 and length of each
    std::atomic<bool> has_unread{false};                          // some bytes could not be read
    std::atomic<std::size_t> pieces_left{0};
  };

  std::size_t file_of(const planning::ReadUnit& unit) const {
    return records_[unit.records.front()].record->file;
  }
  void run_task(std::shared_ptr<const void> threads, std::string_view operation) noexcept;
  void end_task(Result<> status) noexcept;
  void run_unit(const planning::ReadUnit& unit, Scratch& scratch);
  Result<> run_batch(const planning::ReadUnit& unit, const DataFile& file, Scratch& scratch);
  Result<> consume_record(std::size_t record, std::span<const std::byte> bytes, Scratch& scratch);
  /// Opens a large record, unless a task has opened it.
  void open_large(std::size_t record, const DataFile& file);
  Result<> run_piece(const planning::ReadUnit& unit, const DataFile& file, Scratch& scratch);
  Result<> read_range(std::size_t record, planning::ByteRange range, const DataFile& file,
                      Scratch& scratch, PayloadCheck& check);
  Result<std::uint64_t> read_step(std::size_t record, planning::ByteRange range,
                                  const DataFile& file, Scratch& scratch, PayloadCheck& check);
  bool lies_in_file(std::size_t record, const DataFile& file);

  Context& context_;
  DataFiles files_;
  const std::size_t threads_;
  ScratchLayout scratch_layout_;
  const std::vector<staging::ReadyEvent>& ready_;
  ReadSink& sink_;
  const bool continue_after_errors_;
  std::vector<planning::WantedRecord> records_;
  std::vector<std::unique_ptr<LargeRecord>> large_;  // by record; nullptr for small records
  std::vector<planning::ReadUnit> units_;

  std::optional<ResultsChannel<>> results_;  // one message from each task
  std::atomic<std::uint64_t> bytes_read_{0};
  std::atomic<std::size_t> next_unit_{0};
  FirstFailure<> failure_;
};

/// Lays out a pipeline's scratch memory for these targets. Reduces options.threads to the number
/// that options.max_scratch_bytes has room for, and fails if that is 0. `user` names the operation
/// in the message.
Result<ScratchLayout> choose_scratch(ReadOptions& options,
                                     std::span<const planning::Region* const> regions,
                                     std::span<const Target* const> targets, std::string_view user);

}  // namespace torch_ckpt::engine
