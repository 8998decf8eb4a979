#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/read_pipeline.h"
#include "engine/record_delivery.h"
#include "engine/region_read.h"
#include "error.h"
#include "os/directory.h"
#include "planning/stored_record.h"

namespace torch_ckpt::engine {

struct LoadOptions : ReadOptions {
  bool verify = true;
  std::vector<staging::ReadyEvent> ready;  // wait for these before writing to targets on devices
  std::uint64_t target_bytes = 0;          // part of max_scratch_bytes that the targets use

  /// The minimum scratch memory of a load.
  static constexpr std::uint64_t kMinScratchBytes = std::uint64_t{64} << 10;

  /// Fails with Errc::invalid_argument if max_scratch_bytes is below the minimum.
  Result<> check() const;
  /// Fails with Errc::invalid_argument if targets with a total size of `bytes` leave less than the
  /// minimum. `name` names the value that needs them.
  Result<> check_target_bytes(const std::string& name, std::uint64_t bytes) const;
};

/// Checks that records that are read together, entirely, fit into the limit, and that they lie
/// inside their files. Call this before allocating memory for the records: damaged metadata may
/// contain any length.
Result<> check_records_fit(const Folder& folder, const std::vector<LoadFile>& files,
                           std::span<const planning::StoredRecord> records,
                           const LoadOptions& options);

// Reads regions of record payloads into their targets.
//
//   1. start() checks that the scratch memory suffices, decodes the files' checksum tables and
//      plans the reads.
//   2. A ReadPipeline (engine/read_pipeline.h) reads the records on several threads.
//   3. A RecordDelivery (engine/record_delivery.h) verifies the bytes that were read and copies
//      them to the targets.
//   4. The first error, or cancel(), ends the load: tasks stop after their current step.
//   5. wait_for() returns true once all tasks have ended. After that, failure() returns the error,
//      if any, and outcomes() returns the result of each read.
//
// start() and wait_for() must be called from the same thread. Records and targets must stay valid
// until wait_for() has returned true; after a failure the targets' contents are unspecified.
class LoadSession {
 public:
  static Result<std::shared_ptr<LoadSession>> start(Context& context, Folder folder,
                                                    std::vector<LoadFile> files,
                                                    std::vector<RegionRead> reads,
                                                    const LoadOptions& options);

  /// Waits until every task has sent its result; returns false if `timeout` expires first. In a
  /// forked child, returns true immediately, and failure() reports that the load belongs to the
  /// parent.
  bool wait_for(std::chrono::milliseconds timeout);
  void cancel();

  /// Valid once wait_for() has returned true. If the error concerns a record, it names its value.
  std::optional<Error> failure() const;
  const std::vector<ReadOutcome>& outcomes() const { return delivery_.outcomes(); }

  /// Payload bytes that were requested, and those that have reached their targets so far. Bytes are
  /// counted before any conversion.
  std::uint64_t bytes_planned() const { return bytes_planned_; }
  std::uint64_t bytes_done() const { return delivery_.bytes_done(); }

 private:
  LoadSession(Context& context, Folder folder, const std::vector<LoadFile>& files,
              std::vector<RegionRead> reads, const LoadOptions& options,
              const ScratchLayout& scratch_layout)
      : options_(options),
        delivery_(std::move(reads), options.verify),
        pipeline_(context, std::move(folder), files, options_, scratch_layout, options_.ready,
                  delivery_, false) {
    delivery_.set_pipeline(pipeline_);
  }
  Result<> plan(const std::vector<LoadFile>& files);

  const LoadOptions options_;
  RecordDelivery delivery_;
  ReadPipeline pipeline_;
  std::uint64_t bytes_planned_ = 0;
};

}  // namespace torch_ckpt::engine
