#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/read_pipeline.h"
#include "engine/record_delivery.h"
#include "error.h"
#include "os/directory.h"

namespace torch_ckpt::engine {

struct LoadOptions : ReadOptions {
  bool verify = true;
  std::vector<staging::ReadyEvent> ready;  // wait for these before writing to targets on devices
};

struct LoadFailure {
  static constexpr std::size_t kNoRequest = ~std::size_t{0};

  Error error;
  std::size_t request = kNoRequest;  // the request that failed, if the error concerns one
};

// Reads the requested regions of record payloads into their targets.
//
//   1. start() checks that the scratch memory suffices, decodes the files' checksum tables and
//      plans the reads.
//   2. A ReadPipeline (engine/read_pipeline.h) reads the records on several threads.
//   3. A RecordDelivery (engine/record_delivery.h) verifies the bytes that were read and copies
//      them to the targets.
//   4. The first error, or cancel(), ends the load: tasks stop after their current step.
//   5. wait_for() returns true once all tasks have ended. After that, failure() returns the error,
//      if any, and outcomes() returns the result of each request.
//
// start() and wait_for() must be called from the same thread. Targets must stay valid until
// wait_for() has returned true; after a failure their contents are unspecified.
class LoadSession {
 public:
  static Result<std::shared_ptr<LoadSession>> start(Context& context, os::Directory directory,
                                                    std::vector<LoadFile> files,
                                                    std::vector<ReadRequest> requests,
                                                    const LoadOptions& options);

  /// Waits until every task has sent its result; returns false if `timeout` expires first. In a
  /// forked child, returns true immediately, and failure() reports that the load belongs to the
  /// parent.
  bool wait_for(std::chrono::milliseconds timeout);
  void cancel();

  /// Valid once wait_for() has returned true.
  std::optional<LoadFailure> failure() const;
  const std::vector<ReadOutcome>& outcomes() const { return delivery_.outcomes(); }
  const std::vector<ReadRequest>& requests() const { return delivery_.requests(); }
  std::string path(const ReadRequest& request) const { return pipeline_.path(request.file); }

  /// Payload bytes that were requested, and those that have reached their targets so far. Bytes are
  /// counted before any conversion.
  std::uint64_t bytes_planned() const { return bytes_planned_; }
  std::uint64_t bytes_done() const { return delivery_.bytes_done(); }

 private:
  LoadSession(Context& context, os::Directory directory, const std::vector<LoadFile>& files,
              std::vector<ReadRequest> requests, const LoadOptions& options,
              const ScratchLayout& scratch_layout)
      : options_(options),
        delivery_(std::move(requests), options.verify),
        pipeline_(context, std::move(directory), files, options_, scratch_layout, options_.ready,
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
