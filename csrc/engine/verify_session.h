#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/read_pipeline.h"
#include "engine/record_verifier.h"
#include "engine/store.h"
#include "error.h"

namespace torch_ckpt::engine {

using VerifyOptions = ReadOptions;

// Verifies records: a ReadPipeline reads each of them once, with a RecordVerifier as its sink.
// Continues after findings and, in a directory, after read errors. start() and wait_for() must be
// called from the same thread.
class VerifySession {
 public:
  static Result<std::shared_ptr<VerifySession>> start(Context& context, Folder folder,
                                                      std::vector<LoadFile> files,
                                                      std::vector<planning::StoredRecord> records,
                                                      const VerifyOptions& options);

  /// Waits until every task has sent its result; returns false if `timeout` expires first.
  bool wait_for(std::chrono::milliseconds timeout);
  void cancel();

  std::uint64_t bytes_planned() const { return bytes_planned_; }
  std::uint64_t bytes_done() const { return pipeline_.bytes_read(); }

  // Valid once wait_for() has returned true:

  /// The error that ended the session early, e.g. a failed allocation or a failure of a store.
  std::optional<Error> failure() const;
  std::vector<Finding> findings() const { return verifier_.findings(); }
  std::vector<std::size_t> unverifiable() const { return verifier_.unverifiable(); }

 private:
  VerifySession(Context& context, Folder folder, const std::vector<LoadFile>& files,
                std::vector<planning::StoredRecord> records, const VerifyOptions& options,
                const ScratchLayout& scratch_layout);

  const std::vector<staging::ReadyEvent> no_devices_;
  const bool is_in_store_;
  RecordVerifier verifier_;
  ReadPipeline pipeline_;
  std::uint64_t bytes_planned_ = 0;
};

}  // namespace torch_ckpt::engine
