#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/data_files.h"
#include "engine/delivery.h"
#include "engine/direct_io.h"
#include "engine/load_session.h"
#include "engine/payload_check.h"
#include "engine/results_channel.h"
#include "error.h"
#include "format/checksum_table.h"
#include "format/dtype.h"
#include "os/directory.h"
#include "planning/read_plan.h"

namespace torch_ckpt::engine {

struct VerifyOptions {
  std::size_t threads = 8;
  std::size_t chunk_bytes = std::size_t{4} << 20;  // scratch of each thread
  std::size_t max_scratch_bytes = std::size_t{1} << 30;
  DirectIo direct_io = DirectIo::automatic;
};

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

// Reads every record once and compares it with every checksum that there is, and with what the
// metadata says of it. Goes on after whatever it finds.
//
//   1. With a checksum table: the payload block by block, and all that is not payload.
//   2. Without: each entry of the archive with its CRC-32.
//   3. A tensor's archive must be one, of the shape that the metadata gives. Another dtype is a
//      finding only without a table: a planner may have stored one, and what the table knows is
//      what was stored.
//   4. What has no checksum at all is counted.
//
// The units and tasks are those of a load, and so is the scratch memory; nothing else is allocated
// in proportion to what is read. start() and wait_for() are for one thread.
class VerifySession : public std::enable_shared_from_this<VerifySession> {
 public:
  static Result<std::shared_ptr<VerifySession>> start(os::Directory directory,
                                                      std::vector<LoadFile> files,
                                                      std::vector<NamedRecord> records,
                                                      const VerifyOptions& options);

  /// Waits until every task has sent its result; false when `timeout` passed before.
  bool wait_for(std::chrono::milliseconds timeout);
  void cancel();

  std::uint64_t bytes_planned() const { return bytes_planned_; }
  std::uint64_t bytes_done() const { return bytes_done_; }

  // After wait_for() has returned true:

  /// What ended the session before its time, such as a lack of memory.
  std::optional<Error> failure() const;
  /// Ascending by file and offset; neighbouring blocks of a record are one.
  std::vector<Finding> findings() const;
  /// Numbers of the records, ascending, of which some bytes have no checksum.
  std::vector<std::size_t> unverifiable() const;

 private:
  // How a record's payload is checked, once its archive has been.
  struct Payload {
    enum class Check { none, blocks, sum };
    Check check = Check::none;
    std::uint64_t offset = 0;  // in the record
    std::uint64_t bytes = 0;
    std::uint32_t crc = 0;  // of a sum: what it must be
  };
  // A record that is read in pieces. The archive is opened by the first piece.
  struct LargeRecord {
    std::once_flag once;
    Payload payload;
    std::vector<std::pair<std::uint32_t, std::uint64_t>> pieces;  // CRC-32 and bytes of each
    std::atomic<bool> unread{false};                              // some of it
    std::atomic<std::size_t> pieces_left{0};
  };

  VerifySession(os::Directory directory, std::vector<LoadFile> files,
                std::vector<NamedRecord> records, const VerifyOptions& options);
  void plan();
  void run_task(std::shared_ptr<const void> threads);
  void fail_task(Error error) noexcept;
  void run_units(Scratch& scratch);
  void run_unit(const planning::ReadUnit& unit, Scratch& scratch);
  Result<> run_batch(const planning::ReadUnit& unit, const DataFile& file, Scratch& scratch);
  Result<> run_piece(const planning::ReadUnit& unit, const DataFile& file, Scratch& scratch);
  Result<> check_range(std::size_t record, const Payload& payload, planning::ByteRange range,
                       const DataFile& file, Scratch& scratch, PayloadCheck& check);
  void check_in_memory(std::size_t record, std::span<const std::byte> bytes);
  void check_bytes(std::size_t record, const Payload& payload, std::uint64_t position,
                   std::span<const std::byte> bytes, PayloadCheck& check);
  void check_sum(std::size_t record, const Payload& payload, std::uint32_t found);
  Payload open(std::size_t record, format::RecordBytes& bytes);
  void check_entries(std::size_t record, format::RecordBytes& bytes, std::string_view skip);
  bool lies_in_file(std::size_t record, const DataFile& file);
  void add_finding(std::size_t record, Error error, std::uint64_t bytes = 0);
  void add_unverifiable(std::size_t record);

  const std::vector<LoadFile> files_given_;
  const std::vector<NamedRecord> records_;
  const VerifyOptions options_;
  DataFiles files_;
  ScratchLayout scratch_layout_;
  const std::vector<staging::ReadyEvent> no_devices_;
  std::vector<std::optional<format::RecordSums>> sums_;  // by record
  std::vector<std::unique_ptr<LargeRecord>> large_;      // by record; null: a small one
  std::vector<planning::ReadUnit> units_;

  std::optional<ResultsChannel<>> results_;  // of the tasks
  std::uint64_t bytes_planned_ = 0;
  std::atomic<std::uint64_t> bytes_done_{0};
  std::atomic<std::size_t> next_unit_{0};
  std::atomic<bool> cancelled_{false};

  mutable std::mutex mutex_;
  std::vector<Finding> findings_;          // guarded by mutex_
  std::vector<std::size_t> unverifiable_;  // guarded by mutex_
  std::optional<Error> failure_;           // guarded by mutex_
};

}  // namespace torch_ckpt::engine
