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
  std::vector<staging::ReadyEvent> ready;  // when targets on devices may be written
};

struct LoadFailure {
  static constexpr std::size_t kNoRequest = ~std::size_t{0};

  Error error;
  std::size_t request = kNoRequest;  // the culprit, where it is one request
};

// Reads regions of records' payloads into their targets: a ReadPipeline with a RecordDelivery.
//
// start() and wait_for() are for one thread. Targets must stay valid until wait_for() has returned
// true; after a failure their contents are unspecified.
class LoadSession {
 public:
  static Result<std::shared_ptr<LoadSession>> start(Context& context, os::Directory directory,
                                                    std::vector<LoadFile> files,
                                                    std::vector<ReadRequest> requests,
                                                    const LoadOptions& options);

  /// Waits until every task has sent its result; false when `timeout` passed before. In a forked
  /// child, which has no part in its parent's load, it is over at once and has failed.
  bool wait_for(std::chrono::milliseconds timeout);
  void cancel();

  /// After wait_for() has returned true.
  std::optional<LoadFailure> failure() const;
  const std::vector<ReadOutcome>& outcomes() const { return delivery_.outcomes(); }
  const std::vector<ReadRequest>& requests() const { return delivery_.requests(); }
  std::string path(const ReadRequest& request) const { return pipeline_.path(request.file); }

  /// Bytes asked for and bytes that reached their target so far, as stored.
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
