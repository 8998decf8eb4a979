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
#include "os/directory.h"
#include "planning/read_plan.h"

namespace torch_ckpt::engine {

struct ReadOptions {
  std::size_t threads = 8;
  std::size_t chunk_bytes = std::size_t{4} << 20;  // scratch of each thread; two for devices
  std::size_t max_scratch_bytes = std::size_t{1} << 30;
  DirectIo direct_io = DirectIo::automatic;
};

/// A data file beneath the checkpoint's directory, and what the metadata knows of its checksums.
struct LoadFile {
  std::string name;
  std::string checksum_table;  // encoded; empty where there is none
};

/// nullopt where the file has none. It refers to the file's bytes.
Result<std::optional<format::ChecksumTable>> checksum_table_of(const LoadFile& file);

/// What a record's archive says of the payload, and how that is checked.
struct Payload {
  bool is_read = false;      // else nobody wants it
  std::uint64_t offset = 0;  // in the record
  std::uint64_t bytes = 0;
  const format::RecordSums* blocks = nullptr;  // compared block by block
  std::optional<std::uint32_t> crc;            // compared with that of all bytes
};

// What becomes of the records that a pipeline reads, by their numbers in its plan. Methods are
// called by several threads at once, but those of one record's open() and end() by one.
class ReadSink {
 public:
  /// Looks at the archive around a payload.
  virtual Result<Payload> open(std::size_t record, format::RecordBytes& archive) = 0;

  /// Where the payload's bytes from `position` on may be read to at once, or nothing. `bytes` is
  /// how many that will be; they may be made fewer.
  virtual std::span<std::byte> place(std::size_t /*record*/, std::uint64_t /*position*/,
                                     std::uint64_t& /*bytes*/) {
    return {};
  }

  /// Bytes of the payload, each once. Those of one range come in ascending order. `scratch` has
  /// them, or is null where they have been read to their place.
  virtual Result<> take(std::size_t record, const Payload& payload, std::uint64_t position,
                        std::span<const std::byte> bytes, PayloadCheck& check,
                        Scratch* scratch) = 0;

  /// Bytes that cannot be read, where the pipeline goes on after errors; returns how many from
  /// `position` on are left out.
  virtual std::uint64_t leave_out(std::size_t /*record*/, const Payload& /*payload*/,
                                  planning::ByteRange range, const Error& /*error*/) {
    return range.bytes();
  }

  /// All that is wanted of the payload has been taken. `crc` is what its bytes have, where there is
  /// one to compare it with; `payload_bytes` are those of a small record.
  virtual Result<> end(std::size_t record, const Payload& payload, std::optional<std::uint32_t> crc,
                       std::span<const std::byte> payload_bytes) = 0;

  /// A record that cannot be read, or whose methods have failed.
  virtual void fail(std::size_t record, Error error) = 0;

 protected:
  ~ReadSink() = default;
};

// Reads records of data files, wholly or in parts, by a few tasks on the executor.
//
//   1. planning::plan_reads cuts what is wanted into units, ordered by file and offset. Each task
//      takes unit after unit.
//   2. Small neighbours are read at once into scratch memory and taken from there.
//   3. Of a large record the archive's ends are read once, by whoever has its first piece; then its
//      ranges, a step at a time, into scratch memory or straight to their place, and taken while
//      they are in the cache.
//   4. Each task sends one result through the results channel. A failure of the pipeline ends all
//      of them.
//
// plan(), start() and wait_for() are for one thread, the other methods for any.
class ReadPipeline {
 public:
  static constexpr std::size_t kNoRecord = ~std::size_t{0};
  struct Failure {
    Error error;
    std::size_t record = kNoRecord;  // the culprit, where it is one
  };

  /// `context`, `ready` and `sink` outlive it. With `goes_on` an error of reading is the sink's
  /// affair, and as much as possible is read beside it.
  ReadPipeline(Context& context, os::Directory directory, const std::vector<LoadFile>& files,
               const ReadOptions& options, const ScratchLayout& scratch_layout,
               const std::vector<staging::ReadyEvent>& ready, ReadSink& sink, bool goes_on);

  /// Checksums are compared in blocks of up to `block_bytes`.
  void plan(std::vector<planning::WantedRecord> wanted, std::uint64_t bytes,
            std::uint64_t block_bytes);

  /// `owner`, of which the pipeline is a part, lives until the last task has ended.
  Result<> start(std::shared_ptr<const void> owner, std::string_view operation);

  /// Waits until every task has sent its result; false when `timeout` passed before. In a forked
  /// child, which has no part in its parent's work, it is over at once.
  bool wait_for(std::chrono::milliseconds timeout);
  bool inherited() const { return results_->inherited(); }

  void fail(Failure failure) noexcept { failure_.set(std::move(failure)); }
  std::optional<Failure> failure() const { return failure_.get(); }

  std::string path(std::size_t file) const { return files_.path(file); }
  /// Of units that have ended.
  std::uint64_t bytes_read() const { return bytes_read_; }

 private:
  // A record that is read in pieces. The archive is opened by the first piece.
  struct LargeRecord {
    std::once_flag once;
    Payload payload;
    std::uint64_t bytes_from_begin = 0;  // that are read in one, where nothing else is
    std::vector<std::pair<std::uint32_t, std::uint64_t>> pieces;  // CRC-32 and bytes of each
    std::atomic<bool> has_unread{false};
    std::atomic<std::size_t> pieces_left{0};
  };

  void run_task(std::shared_ptr<const void> threads, std::string_view operation) noexcept;
  void end_task(Result<> status) noexcept;
  void run_unit(const planning::ReadUnit& unit, Scratch& scratch);
  Result<> run_batch(const planning::ReadUnit& unit, const DataFile& file, Scratch& scratch);
  Result<> take_whole(std::size_t record, std::span<const std::byte> bytes, Scratch& scratch);
  Result<> run_piece(const planning::ReadUnit& unit, const DataFile& file, Scratch& scratch);
  Result<> read_range(std::size_t record, planning::ByteRange range, const DataFile& file,
                      Scratch& scratch, PayloadCheck& check);
  bool lies_in_file(std::size_t record, const DataFile& file);

  Context& context_;
  DataFiles files_;
  const std::size_t threads_;
  const ScratchLayout scratch_layout_;
  const std::vector<staging::ReadyEvent>& ready_;
  ReadSink& sink_;
  const bool goes_on_;
  std::vector<planning::WantedRecord> records_;
  std::vector<std::unique_ptr<LargeRecord>> large_;  // by record; null: a small one
  std::vector<planning::ReadUnit> units_;

  std::optional<ResultsChannel<>> results_;  // of the tasks
  std::atomic<std::uint64_t> bytes_read_{0};
  std::atomic<std::size_t> next_unit_{0};
  FirstFailure<Failure> failure_;
};

/// The scratch memory of a pipeline for these targets. Of the threads those are left that have
/// memory. Fails where there is not enough for one, with what `user` does.
Result<ScratchLayout> scratch_for(ReadOptions& options,
                                  std::span<const planning::Region* const> regions,
                                  std::span<const Target* const> targets, std::string_view user);

}  // namespace torch_ckpt::engine
