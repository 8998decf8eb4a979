#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/read_pipeline.h"
#include "engine/record_verifier.h"
#include "error.h"
#include "os/directory.h"

namespace torch_ckpt::engine {

using VerifyOptions = ReadOptions;

// Reads every record once and verifies it, and goes on after whatever is found: a ReadPipeline with
// a RecordVerifier. start() and wait_for() are for one thread.
class VerifySession {
 public:
  static Result<std::shared_ptr<VerifySession>> start(Context& context, os::Directory directory,
                                                      std::vector<LoadFile> files,
                                                      std::vector<NamedRecord> records,
                                                      const VerifyOptions& options);

  /// Waits until every task has sent its result; false when `timeout` passed before.
  bool wait_for(std::chrono::milliseconds timeout);
  void cancel();

  std::uint64_t bytes_planned() const { return bytes_planned_; }
  std::uint64_t bytes_done() const { return pipeline_.bytes_read(); }

  // After wait_for() has returned true:

  /// What ended the session before its time, such as a lack of memory.
  std::optional<Error> failure() const;
  std::vector<Finding> findings() const { return verifier_.findings(); }
  std::vector<std::size_t> unverifiable() const { return verifier_.unverifiable(); }

 private:
  VerifySession(Context& context, os::Directory directory, const std::vector<LoadFile>& files,
                std::vector<NamedRecord> records, const VerifyOptions& options,
                const ScratchLayout& scratch_layout)
      : verifier_(files, std::move(records)),
        pipeline_(context, std::move(directory), files, options, scratch_layout, no_devices_,
                  verifier_, true) {}

  const std::vector<staging::ReadyEvent> no_devices_;
  RecordVerifier verifier_;
  ReadPipeline pipeline_;
  std::uint64_t bytes_planned_ = 0;
};

}  // namespace torch_ckpt::engine
