#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/load_session.h"
#include "error.h"
#include "os/directory.h"

namespace torch_ckpt::engine {

// Loads from the same files, one after another, within one memory limit. Scratch memory and targets
// that are allocated for a load count towards the limit. For one thread. The context and the
// directory outlive it.
class LimitedLoads {
 public:
  /// The least scratch memory that a load needs.
  static constexpr std::uint64_t kMinScratchBytes = std::uint64_t{64} << 10;

  /// Waits until a session has ended. It may throw, but only after the session has ended.
  /// `done_before` is the number of bytes that earlier loads have read.
  using Wait = std::function<void(LoadSession& session, std::uint64_t done_before)>;

  /// `options.max_scratch_bytes` is the limit.
  static Result<LimitedLoads> make(Context& context, const os::Directory& directory,
                                   std::vector<LoadFile> files, const LoadOptions& options,
                                   Wait wait);

  std::uint64_t limit() const { return options_.max_scratch_bytes; }

  /// Fails with Errc::invalid_argument if targets of `bytes` leave too little scratch memory.
  Result<> check_limit(const std::string& name, std::uint64_t bytes) const;

  /// Checks that raw records, read together, fit into the limit. Also checks that they lie inside
  /// their files before memory is allocated for them: damaged metadata may contain any length.
  Result<> check_records_fit(const std::vector<ReadRequest>& records,
                             const std::vector<std::string>& names) const;

  /// Runs one load. `target_bytes` of the limit are in use by its targets. An error names the
  /// request that failed. Copies to devices also wait for `ready`, whose events outlive the call.
  Result<std::shared_ptr<LoadSession>> run(std::vector<ReadRequest> requests,
                                           const std::vector<std::string>& names,
                                           std::uint64_t target_bytes, std::uint64_t done_before,
                                           const std::vector<staging::ReadyEvent>& ready = {});

 private:
  LimitedLoads(Context& context, const os::Directory& directory, std::vector<LoadFile> files,
               const LoadOptions& options, Wait wait)
      : context_(&context),
        directory_(&directory),
        files_(std::move(files)),
        options_(options),
        wait_(std::move(wait)) {}

  Context* context_;
  const os::Directory* directory_;
  std::vector<LoadFile> files_;
  LoadOptions options_;
  Wait wait_;
};

}  // namespace torch_ckpt::engine
