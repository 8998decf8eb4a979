#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/direct_io.h"
#include "engine/record_reader.h"
#include "engine/results_channel.h"
#include "error.h"
#include "format/tensor_pickle.h"
#include "planning/read_plan.h"

namespace torch_ckpt::engine {

struct LoadOptions {
  std::size_t threads = 8;
  std::size_t chunk_bytes = std::size_t{4} << 20;  // scratch of each thread
  std::size_t max_scratch_bytes = std::size_t{1} << 30;
  DirectIo direct_io = DirectIo::automatic;
  bool verify = true;
};

enum class ReadKind {
  // The bytes [begin, begin + bytes) of the record itself.
  raw,
  // The payload's bytes [begin, begin + bytes) of a tensor of `dtype` and `sizes`, stored
  // row-major.
  tensor,
  // The whole payload of a tensor of `dtype` and `sizes`, however it is strided.
  storage,
};

struct ReadRequest {
  ReadKind kind = ReadKind::raw;
  std::size_t file = 0;
  std::uint64_t offset = 0;  // of the record in the file
  std::uint64_t length = 0;  // of the record
  const format::Dtype* dtype = nullptr;
  std::vector<std::uint64_t> sizes;
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  std::byte* destination = nullptr;  // room for `bytes`
};

enum class ReadStatus {
  pending,
  done,
  // A plain tensor of the right dtype and sizes, but not stored row-major: `header` says how. Ask
  // again with ReadKind::storage.
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

// Reads a set of records' payloads straight into their destinations.
//
//   1. planning::plan_reads cuts the requests into units, ordered by file and offset.
//   2. A few tasks on the executor take unit after unit. Small neighbours are read at once into a
//      scratch chunk and decoded there; of a large record the archive's ends are read and decoded
//      once, then its payload in pieces, straight into the destination.
//   3. Where all of a payload was read its CRC-32 is compared with the archive's; raw records that
//      are archives are checked entry by entry.
//   4. Each task sends one result through the results channel; the first error ends all of them.
//
// start() and wait_for() are for one thread. Destinations must stay valid until wait_for() has
// returned true; after a failure their contents are unspecified.
class LoadSession : public std::enable_shared_from_this<LoadSession> {
 public:
  static Result<std::shared_ptr<LoadSession>> start(std::vector<std::string> files,
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
  const std::string& path(const ReadRequest& request) const { return paths_[request.file]; }

  /// Bytes asked for and bytes that reached their destination so far.
  std::uint64_t bytes_planned() const { return bytes_planned_; }
  std::uint64_t bytes_done() const { return bytes_done_; }

 private:
  // Opened by the first unit of the file and closed after its last, so that a checkpoint of many
  // files never has more than a few of them open.
  struct FileState {
    std::mutex mutex;
    std::shared_ptr<DataFile> file;  // guarded by mutex
    std::atomic<std::size_t> units_left{0};
  };
  struct LargeRecord {
    std::once_flag once;
    std::optional<Error> error;
    ReadStatus status = ReadStatus::done;
    std::uint64_t payload_offset = 0;
    std::uint64_t payload_bytes = 0;
    std::uint32_t payload_crc = 0;
    std::vector<std::uint32_t> piece_crcs;
    std::atomic<std::size_t> pieces_left{0};
  };

  LoadSession(std::vector<std::string> files, std::vector<ReadRequest> requests,
              const LoadOptions& options);
  void run_task();
  void run_units(std::span<std::byte> scratch);
  Result<> run_unit(const planning::ReadUnit& unit, std::span<std::byte> scratch,
                    std::size_t& culprit);
  Result<> run_batch(const planning::ReadUnit& unit, const DataFile& file,
                     std::span<std::byte> scratch, std::size_t& culprit);
  Result<> run_piece(const planning::ReadUnit& unit, const DataFile& file,
                     std::span<std::byte> scratch);
  Result<> take_from_memory(std::size_t index, std::span<const std::byte> record);
  void open_large(std::size_t index, const DataFile& file, LargeRecord& large);
  Result<std::shared_ptr<DataFile>> acquire_file(std::size_t file);
  void release_file(std::size_t file);
  void fail(Error error, std::size_t request);

  const std::vector<std::string> paths_;
  const std::vector<ReadRequest> requests_;
  const LoadOptions options_;
  std::vector<planning::ReadUnit> units_;
  std::vector<ReadOutcome> outcomes_;  // each written by the unit that completes the request
  std::vector<FileState> files_;
  std::vector<std::unique_ptr<LargeRecord>> large_;  // by request; empty for small ones

  std::optional<ResultsChannel> results_;  // of the tasks
  std::uint64_t bytes_planned_ = 0;
  std::atomic<std::uint64_t> bytes_done_{0};
  std::atomic<std::size_t> next_unit_{0};
  std::atomic<bool> cancelled_{false};

  mutable std::mutex mutex_;
  std::optional<LoadFailure> failure_;  // guarded by mutex_
};

}  // namespace torch_ckpt::engine
